"""The series that stand for exp, cos and sin in the kernels, against numpy's in long double."""

import numpy as np
import pytest

from rfsoftmax import vectors

KINDS = (np.float32, np.float64)
SIZES = (1, 2, 507, 10_000)


def numbers(size: int, scale: float, kind: type) -> np.ndarray:
    return (scale * np.random.default_rng(size).standard_normal(size)).astype(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("largest", [0.0, -3.25, 70.5])
def test_exp_is_exact_to_its_type(kind: type, size: int, largest: float) -> None:
    x = kind(largest) - np.abs(numbers(size, 20.0, kind))
    out = np.empty_like(x)
    vectors.exp(x, largest, out, size)
    expected = np.exp(np.maximum(x - kind(largest), kind(-85.0)).astype(np.longdouble))
    assert (np.abs(out - expected) <= 4 * np.finfo(kind).eps * expected).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 5_000.0])
def test_cosine_and_sine_are_exact_to_their_type(kind: type, size: int, scale: float) -> None:
    angles = numbers(size, scale, kind)
    cosines, sines = np.empty_like(angles), np.empty_like(angles)
    vectors.cos_sin(angles, cosines, sines, 0.5)
    exact = angles.astype(np.longdouble)
    assert (np.abs(cosines - np.cos(exact) / 2) <= np.finfo(kind).eps).all()
    assert (np.abs(sines - np.sin(exact) / 2) <= np.finfo(kind).eps).all()
