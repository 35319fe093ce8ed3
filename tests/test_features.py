"""The laws of the feature maps.

A statistical test compares a mean over independently drawn maps with the truth and allows SIGMAS standard errors: a
false alarm once in 1.7 million comparisons for a normal mean, and there are about 700 of them. Seeds are fixed.
"""

import copy
import math
import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from rfsoftmax.features import (
    FeatureMap,
    OrthogonalFourier,
    PositiveRandom,
    Quadratic,
    RandomFourier,
    RandomMaclaurin,
    StructuredFourier,
)

MapClass = Callable[..., FeatureMap]

FOURIER: list[MapClass] = [RandomFourier, OrthogonalFourier, StructuredFourier]
EXPONENTIAL: list[MapClass] = [RandomMaclaurin, PositiveRandom]
RANDOM = FOURIER + EXPONENTIAL
ALL = [*RANDOM, Quadratic]

SIGMAS = 5.0
STRUCTURED_BIAS = 5e-4  # as StructuredFourier's docstring states

random_maps = pytest.mark.parametrize("cls", RANDOM)
all_maps = pytest.mark.parametrize("cls", ALL)


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def make(cls: MapClass, dim: int = 5, num_features: int = 24, seed: int = 0) -> FeatureMap:
    if cls is Quadratic:
        return cls(dim, alpha=3.0, beta=0.5)
    # Far from 1, where nu and 1 / nu are the same; small for the exponential maps, whose tails are heavy.
    return cls(dim, num_features, 2.0 if cls in FOURIER else 0.5, generator=seeded(seed))


def vectors(num: int, dim: int, normalized: bool, seed: int) -> Tensor:
    generator = seeded(seed)
    unit = F.normalize(torch.randn(num, dim, generator=generator), dim=-1)
    return unit if normalized else unit * (0.4 + 0.8 * torch.rand(num, 1, generator=generator))


def estimates(cls: MapClass, x: Tensor, y: Tensor, num_features: int, num_maps: int) -> Tensor:
    """phi(x).phi(y) of `num_maps` independent maps, (num_maps, pairs)."""
    maps = (make(cls, x.shape[-1], num_features, seed) for seed in range(num_maps))
    both = torch.stack((x, y))
    return torch.stack([phi(both).double().prod(0).sum(-1) for phi in maps])


@cache
def rms_error(cls: MapClass, dim: int, num_features: int, num_maps: int = 150) -> float:
    x, y = vectors(40, dim, True, seed=1), vectors(40, dim, True, seed=2)
    errors = estimates(cls, x, y, num_features, num_maps) - make(cls, dim).kernel(x, y)
    return errors.square().mean().sqrt().item()


def naive_kernel(phi: FeatureMap, x: Tensor, y: Tensor) -> Tensor:
    if isinstance(phi, Quadratic):
        return phi.alpha * (x * y).sum(-1) ** 2 + phi.beta
    if isinstance(phi, RandomMaclaurin | PositiveRandom):
        return torch.exp(phi.nu * (x * y).sum(-1))
    assert isinstance(phi, RandomFourier | OrthogonalFourier | StructuredFourier)
    return torch.exp(-phi.nu * (x - y).norm(dim=-1) ** 2 / 2)


# Statistics


@random_maps
@pytest.mark.parametrize("dim", [1, 3, 7, 16, 64])
def test_the_mean_over_maps_is_the_kernel(cls: MapClass, dim: int) -> None:
    x = torch.cat((vectors(14, dim, True, seed=1), vectors(14, dim, False, seed=2)))
    y = torch.cat((vectors(14, dim, True, seed=3), vectors(14, dim, False, seed=4)))
    values = estimates(cls, x, y, num_features=24, num_maps=400)  # 24 cuts the last block of 7, 16 and 64
    standard_error = values.std(0) / math.sqrt(len(values))
    bias = (values.mean(0) - make(cls, dim).kernel(x, y)).abs()
    allowed = SIGMAS * standard_error + (STRUCTURED_BIAS if cls is StructuredFourier else 1e-6)
    assert (bias < allowed).all(), (bias / standard_error).max()


@pytest.mark.parametrize("nonzeros", [1, 2, 16])
@pytest.mark.parametrize("dim", [16, 64])
def test_the_bias_of_structured_frequencies_is_as_stated(dim: int, nonzeros: int) -> None:
    """At sqrt(nu) |x - y| = 2, where fixed lengths bias by -0.0085, and 4, where blocks of 16 do by 0.05."""
    num_features, radius = 2**19, torch.tensor([2.0, 4.0])
    x = torch.zeros(2, dim)
    x[:, :nonzeros] = radius[:, None] / math.sqrt(2.0 * nonzeros)
    phi = make(StructuredFourier, dim, num_features)
    bias = phi(x).double() @ phi(torch.zeros(dim)).double() - torch.exp(-radius.square() / 2)
    standard_error = (1 - torch.exp(-radius.square())) / math.sqrt(2 * num_features)  # of independent frequencies
    assert (bias.abs() < STRUCTURED_BIAS + SIGMAS * standard_error).all()


@random_maps
def test_the_error_falls_as_one_over_the_root_of_num_features(cls: MapClass) -> None:
    # Whole blocks at both sizes. The ratio's standard error is 2 to 4.5 per cent: 20 are 4 of them, 1 in 16,000.
    ratio = rms_error(cls, 8, 64) / rms_error(cls, 8, 16 * 64)
    assert ratio == pytest.approx(4.0, rel=0.2)


@pytest.mark.parametrize("cls", [OrthogonalFourier, StructuredFourier])
@pytest.mark.parametrize("dim", [3, 16, 64])
@pytest.mark.parametrize("num_features", [24, 256])
def test_orthogonal_frequencies_err_no_more_than_independent_ones(cls: MapClass, dim: int, num_features: int) -> None:
    # The ratio is 0.80 to 0.96, its standard error 0.01 to 0.02.
    assert rms_error(cls, dim, num_features) < rms_error(RandomFourier, dim, num_features)


@pytest.mark.parametrize("cls", [RandomFourier, OrthogonalFourier, PositiveRandom])
@pytest.mark.parametrize("nu", [0.25, 4.0])
def test_the_variance_of_frequencies_is_nu_and_not_its_inverse(cls: MapClass, nu: float) -> None:
    frequencies = cls(8, 4096, nu, generator=seeded(0)).frequencies
    assert isinstance(frequencies, Tensor)
    assert frequencies.shape == (4096, 8)
    relative_error = math.sqrt(2 / frequencies.numel())
    assert frequencies.square().mean().item() == pytest.approx(nu, rel=SIGMAS * relative_error)
    assert frequencies.mean().abs() < SIGMAS * math.sqrt(nu / frequencies.numel())


@pytest.mark.parametrize("nu", [0.25, 4.0])
def test_the_variance_of_structured_frequencies_is_nu(nu: float) -> None:
    phi = StructuredFourier(8, 4096, nu, generator=seeded(0))
    size = phi.signs.shape[-1]
    relative_error = math.sqrt(2 / (4096 * size))
    assert phi.lengths.square().mean().item() / size == pytest.approx(nu, rel=SIGMAS * relative_error)


@pytest.mark.parametrize("cls", [OrthogonalFourier, PositiveRandom])
@pytest.mark.parametrize(("dim", "num_features"), [(7, 7), (7, 3), (1, 1)])
def test_frequencies_of_one_block_are_orthogonal(cls: MapClass, dim: int, num_features: int) -> None:
    frequencies = make(cls, dim, num_features).frequencies
    assert isinstance(frequencies, Tensor)
    gram = frequencies @ frequencies.mT
    torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-5, rtol=0)


def test_structured_frequencies_of_one_block_are_orthogonal() -> None:
    phi = StructuredFourier(64, 64, 1e-6, generator=seeded(0)).double()
    frequencies = phi(torch.eye(64))[:, 64:].mT  # at tiny angles sin(w.x) sqrt(D) is w.x
    gram = frequencies @ frequencies.mT
    torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-4 * gram.max().item(), rtol=0)


# Exact laws


@pytest.mark.parametrize("dim", [1, 3, 64])
def test_quadratic_features_give_the_kernel_exactly(dim: int) -> None:
    x, y = vectors(50, dim, False, seed=1), vectors(50, dim, False, seed=2)
    for phi in (Quadratic(dim), Quadratic(dim, alpha=3.0, beta=0.5)):
        torch.testing.assert_close((phi(x) * phi(y)).sum(-1), naive_kernel(phi, x, y))


@all_maps
def test_kernel_is_the_formula_and_broadcasts(cls: MapClass) -> None:
    phi = make(cls)
    x, y = vectors(4, 5, False, seed=1), vectors(3, 5, False, seed=2)
    expected = naive_kernel(phi, x.double()[:, None], y.double()).float()
    torch.testing.assert_close(phi.kernel(x[:, None], y), expected)
    torch.testing.assert_close(phi.kernel(x[0], y[0]), expected[0, 0])


@all_maps
def test_kernel_at_a_right_angle_is_the_product_of_the_scales(cls: MapClass) -> None:
    phi = make(cls, dim=6)
    x, y = vectors(10, 6, False, seed=1), vectors(10, 6, False, seed=2)
    x[:, 3:], y[:, :3] = 0, 0
    assert phi.log_scale(x).shape == (10,)
    torch.testing.assert_close(phi.kernel(x, y), torch.exp(phi.log_scale(x) + phi.log_scale(y)))


@all_maps
@pytest.mark.parametrize(("dim", "num_features"), [(1, 1), (5, 7), (64, 70)])
def test_width_is_the_columns_of_phi(cls: MapClass, dim: int, num_features: int) -> None:
    phi = make(cls, dim, num_features)
    expected = dim**2 if cls is Quadratic else num_features
    assert (phi.dim, phi.num_features) == (dim, expected)
    assert phi.width == (dim * (dim + 1) // 2 + 1 if cls is Quadratic else 2 * expected if cls in FOURIER else expected)
    assert phi(torch.ones(dim)).shape == (phi.width,)


def test_positive_features_are_positive() -> None:
    assert (make(PositiveRandom, 16, 256)(3 * vectors(100, 16, True, seed=1)) > 0).all()


@pytest.mark.parametrize("cls", FOURIER)
def test_fourier_features_have_unit_length(cls: MapClass) -> None:
    torch.testing.assert_close(make(cls)(vectors(9, 5, False, seed=1)).norm(dim=-1), torch.ones(9))


@pytest.mark.parametrize("seed", range(6))
def test_maclaurin_features_are_products_of_their_rademacher_projections(seed: int) -> None:
    num_features = 1 if seed < 3 else 40  # one feature: also of degree 0, with no factors at all
    phi = RandomMaclaurin(5, num_features, 0.5, generator=seeded(seed)).double()
    x = vectors(1, 5, False, seed=1)[0].double()
    row, expected = 0, phi.scales.clone()
    for j in range(int(phi.degrees.max())):
        for i in (phi.degrees > j).nonzero().flatten():
            expected[i] *= phi.signs[row] @ x
            row += 1
    torch.testing.assert_close(phi(x), expected)


# Randomness and state


@random_maps
def test_one_seed_gives_one_map(cls: MapClass) -> None:
    x = vectors(3, 5, True, seed=1)
    global_state = torch.get_rng_state()
    assert torch.equal(make(cls, seed=3)(x), make(cls, seed=3)(x))
    assert not torch.equal(make(cls, seed=3)(x), make(cls, seed=4)(x))
    assert torch.equal(torch.get_rng_state(), global_state)


@random_maps
def test_without_a_generator_the_global_one_decides(cls: MapClass) -> None:
    x = vectors(3, 5, True, seed=1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        phi = cls(5, 24, 2.0)
    assert torch.equal(phi(x), cls(5, 24, 2.0, generator=seeded(3))(x))


@all_maps
def test_a_loaded_state_and_a_copy_reproduce_the_features(cls: MapClass) -> None:
    x = vectors(3, 5, True, seed=1)
    phi = make(cls)
    loaded = make(cls, seed=1)
    loaded.load_state_dict(phi.state_dict())
    assert torch.equal(loaded(x), phi(x))
    assert torch.equal(copy.deepcopy(phi)(x), phi(x))


@random_maps
def test_a_loaded_state_brings_its_nu(cls: MapClass) -> None:
    x = vectors(3, 5, True, seed=1)
    phi, loaded = cls(5, 24, 0.5, generator=seeded(0)), cls(5, 24, 3.0, generator=seeded(1))
    loaded.load_state_dict(phi.state_dict())
    assert torch.equal(loaded(x), phi(x))
    assert torch.equal(loaded.kernel(x, x[0]), phi.kernel(x, x[0]))


@all_maps
def test_maps_have_buffers_and_no_parameters(cls: MapClass) -> None:
    assert list(make(cls).parameters()) == []
    assert (len(make(cls).state_dict()) > 0) == (cls is not Quadratic)


# Dtypes and shapes


@all_maps
def test_the_dtype_of_the_map_decides_and_not_that_of_the_input(cls: MapClass) -> None:
    phi = make(cls)
    x = vectors(3, 5, True, seed=1)
    for low in (torch.bfloat16, torch.float16, torch.float64):
        assert phi(x.to(low)).dtype == phi.kernel(x.to(low), x).dtype == phi.log_scale(x.to(low)).dtype == torch.float32
        assert torch.equal(phi(x.to(low)), phi(x.to(low).float()))
    double = copy.deepcopy(phi).double()
    assert double(x).dtype == double.kernel(x, x).dtype == double.log_scale(x).dtype == torch.float64
    torch.testing.assert_close(double(x).float(), phi(x))


@all_maps
def test_autocast_does_not_lower_the_precision(cls: MapClass) -> None:
    phi = make(cls)
    x = vectors(3, 5, True, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        features, kernel = phi(x), phi.kernel(x, x[0])
    assert torch.equal(features, phi(x))
    assert torch.equal(kernel, phi.kernel(x, x[0]))


@all_maps
def test_leading_dimensions_are_batch_dimensions(cls: MapClass) -> None:
    phi = make(cls)
    x = vectors(6, 5, True, seed=1)
    torch.testing.assert_close(phi(x[0]), phi(x)[0])
    torch.testing.assert_close(phi(x.view(2, 3, 5)), phi(x).view(2, 3, phi.width))
    assert phi(x[:0]).shape == (0, phi.width)
    assert phi.log_scale(x.view(2, 3, 5)).shape == (2, 3)


# Errors


@all_maps
def test_a_wrong_last_dimension_is_named(cls: MapClass) -> None:
    phi, good, bad = make(cls), torch.ones(2, 5), torch.ones(3, 4)
    message = "expected last dimension 5, got shape "
    for call in (lambda: phi(bad), lambda: phi.log_scale(bad), lambda: phi.kernel(bad, good)):
        with pytest.raises(ValueError, match=re.escape("x: " + message + "(3, 4)")):
            call()
    with pytest.raises(ValueError, match=re.escape("y: " + message + "(3, 4)")):
        phi.kernel(good, bad)
    with pytest.raises(ValueError, match=re.escape("x: " + message + "()")):
        phi(torch.tensor(1.0))


@random_maps
@pytest.mark.parametrize("name", ["dim", "num_features"])
@pytest.mark.parametrize("value", [0, -3, 2.5, None])
def test_sizes_must_be_positive_ints(cls: MapClass, name: str, value: object) -> None:
    arguments = {"dim": 5, "num_features": 7, "nu": 1.0} | {name: value}
    with pytest.raises(ValueError, match=re.escape(f"{name}: expected a positive int, got {value}")):
        cls(**arguments)


@random_maps
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, None])
def test_nu_must_be_positive_and_finite(cls: MapClass, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"nu: expected a positive finite float, got {value}")):
        cls(5, 7, value)


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, None])
def test_alpha_and_beta_must_be_positive_and_finite(name: str, value: object) -> None:
    cls: MapClass = Quadratic
    with pytest.raises(ValueError, match=re.escape(f"{name}: expected a positive finite float, got {value}")):
        cls(5, **{name: value})


@pytest.mark.parametrize("value", [0, -3, 2.5, None])
def test_the_dim_of_quadratic_must_be_a_positive_int(value: object) -> None:
    cls: MapClass = Quadratic
    with pytest.raises(ValueError, match=re.escape(f"dim: expected a positive int, got {value}")):
        cls(value)


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        FeatureMap(5, 7)  # type: ignore[abstract]
