"""Dot products of a vector with many rows, and queries in whole numbers, against numpy's in float64."""

from typing import Any

import numpy as np
import pytest
import torch

from rfsoftmax.block_dots import LANES, dots
from rfsoftmax.block_kernels import leaf_query
from rfsoftmax.tree import Tree

DIMS = (1, 15, 2 * LANES - 1, 2 * LANES, 64, 200)
SIZES = (1, 3, LANES - 1, LANES, LANES + 1, 64)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_dots_of_floats_are_exact_to_their_type(dim: int, size: int, kind: type) -> None:
    g = np.random.default_rng(dim)
    numbers: list[Any] = [g.standard_normal(shape).astype(kind) for shape in (dim, (size + 5, dim), size + 2)]
    x, rows, out = numbers
    before = out.copy()
    dots(x, rows, 5, size, out)
    exact, scale = rows[5:].astype(np.longdouble) @ x, np.abs(rows[5:]).astype(np.longdouble) @ np.abs(x)
    assert (np.abs(out[:size] - exact) <= 8 * np.finfo(kind).eps * scale).all()
    assert (out[size:] == before[size:]).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_dots_of_bytes_with_shorts_are_exact(dim: int, size: int, kind: type) -> None:
    g = np.random.default_rng(dim)
    x, rows = g.integers(-(2**15) + 1, 2**15, dim, np.int16), g.integers(-127, 128, (size, dim), np.int8)
    out: Any = np.empty(size, kind)
    dots(x, rows, 0, size, out)
    exact, scale = (
        rows.astype(np.int64) @ x.astype(np.int64),
        np.abs(rows.astype(np.int64)) @ np.abs(x.astype(np.int64)),
    )
    assert (np.abs(out - exact) <= 8 * np.finfo(np.float32).eps * scale).all()


def test_the_largest_dots_of_a_wide_query_do_not_overflow() -> None:
    dim = 4096
    x, state = np.empty(dim, np.int16), state_of(True)
    unit = leaf_query(np.full(dim, 3.0, np.float32), state, x)
    out = np.empty(LANES, np.float32)
    dots(x, np.full((LANES, dim), 127, np.int8), 0, LANES, out)
    np.testing.assert_allclose(out * unit, 3.0 * 127 * dim, rtol=1e-6)


@pytest.mark.parametrize("dim", [64, 4096])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e20])
def test_a_rounded_query_is_found_again_in_whole_numbers(scale: float, dim: int) -> None:
    query = scale * torch.randn(1, dim, generator=torch.Generator().manual_seed(0))
    rounded = Tree(8, 0, byte_rows=True).leaf_queries(query)
    x = np.empty(dim, np.int16)
    unit = leaf_query(rounded[0].numpy(), state_of(True), x)
    most = min(2**15 - 1, (2**31 - 1) // (127 * dim))
    assert np.abs(x).max() == (most if scale else 0)
    np.testing.assert_allclose(unit * x, rounded[0].numpy(), rtol=3e-7)
    assert (np.abs(unit * x - query[0].numpy()) <= 0.51 * unit).all()


def test_a_query_for_rows_in_floats_is_as_it_is() -> None:
    query = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    x = np.empty_like(query)
    assert leaf_query(query, state_of(False), x) == 1.0
    assert (x == query).all()


def state_of(in_bytes: bool) -> tuple[Any, ...]:
    """A state of which `leaf_query` looks at the units alone."""
    units = np.ones(1 if in_bytes else 0, np.float32)
    return (*(np.empty(0, np.float32) for _ in range(10)), units)
