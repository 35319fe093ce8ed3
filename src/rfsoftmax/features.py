"""Feature maps phi with phi(x).phi(y) = kernel(x, y), exactly or on average over the map's own random numbers.

The kernels are the exponential one, exp(nu x.y); the Gaussian one, exp(-nu |x - y|^2 / 2), which is the
exponential one times a function of x and a function of y; and the quadratic one, alpha (x.y)^2 + beta.
"""

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Full precision for what is inside. Asks first: the context itself costs more than a small product."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


class FeatureMap(nn.Module, ABC):
    """A map from (..., dim) vectors to (..., width) features whose dot products estimate `kernel`.

    `num_features` is the paper's D. All is computed in the dtype of the map's buffers, to which inputs are cast,
    also under autocast: half-precision angles would ruin cosines, so bfloat16 inputs give float32 features.
    A subclass provides `_features`, `_kernel` and `_log_scale`, which receive checked and cast tensors.
    """

    width: int
    _unit: Tensor

    def __init__(self, dim: int, num_features: int) -> None:
        super().__init__()
        self.dim = _positive_int("dim", dim)
        self.num_features = _positive_int("num_features", num_features)
        self.register_buffer("_unit", torch.ones(()), persistent=False)  # carries the dtype

    def forward(self, x: Tensor) -> Tensor:
        """phi(x): (..., dim) to (..., width)."""
        x = self._checked("x", x)
        with no_autocast(x.device):
            return self._features(x)

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """The exact kernel: (..., dim) and (..., dim) to (...), leading dimensions broadcast.

        It is made from x.y and not from x - y, so (B, 1, dim) against (n, dim) is one matrix product with no
        (B, n, dim) tensor; rounding then costs a relative error of about nu (|x| + |y|)^2 eps.
        """
        x, y = self._checked("x", x), self._checked("y", y)
        with no_autocast(x.device):
            return self._kernel(x, y)

    def log_scale(self, x: Tensor) -> Tensor:
        """s(x), (..., dim) to (...), with kernel(x, y) = exp(s(x) + s(y)) wherever x.y = 0."""
        return self._log_scale(self._checked("x", x))

    @abstractmethod
    def _features(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _kernel(self, x: Tensor, y: Tensor) -> Tensor: ...

    @abstractmethod
    def _log_scale(self, x: Tensor) -> Tensor: ...

    def _checked(self, name: str, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.dim,):
            raise ValueError(f"{name}: expected last dimension {self.dim}, got shape {tuple(x.shape)}")
        return x.to(self._unit.dtype)


class _NuMap(FeatureMap):
    """A map whose buffers are of one nu alone: a state_dict holds nu too."""

    def __init__(self, dim: int, num_features: int, nu: float) -> None:
        super().__init__(dim, num_features)
        self.nu = _positive_float("nu", nu)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.nu, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.nu = float(state)


class GaussianMap(_NuMap):
    """The Gaussian kernel exp(-nu |x - y|^2 / 2), with two columns, a cosine and a sine, per frequency."""

    def __init__(self, dim: int, num_features: int, nu: float) -> None:
        super().__init__(dim, num_features, nu)
        self.width = 2 * num_features

    def retune(self, nu: float) -> None:
        """Move to another nu with the same random numbers."""
        self._lengths().mul_(math.sqrt(_positive_float("nu", nu) / self.nu))
        self.nu = float(nu)

    @abstractmethod
    def _lengths(self) -> Tensor:
        """The buffer that has sqrt(nu) as a factor."""

    def _kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(self._log_scale(x) + self._log_scale(y) + self.nu * _dot(x, y))

    def _log_scale(self, x: Tensor) -> Tensor:
        return -0.5 * self.nu * torch.linalg.vecdot(x, x)


class _ExponentialMap(_NuMap):
    """The exponential kernel exp(nu x.y), with one column per feature."""

    def __init__(self, dim: int, num_features: int, nu: float) -> None:
        super().__init__(dim, num_features, nu)
        self.width = num_features

    def _kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(self.nu * _dot(x, y))

    def _log_scale(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[:-1])


@final
class RandomFourier(GaussianMap):
    """phi(x) = [cos(W x), sin(W x)] / sqrt(D), the rows of W independent N(0, nu I). Unbiased.

    Rahimi and Recht (2007), and the map of the RF-softmax paper, whose eq. (rff-map) misprints N(0, I / nu).
    Cosine-sine pairs rather than random phases: less variance (Sutherland and Schneider 2015), phi(x).phi(x) = 1.
    `frequencies` is W, (D, dim); in plain PyTorch: a = x @ W.T; cat([a.cos(), a.sin()], -1) / sqrt(D).
    """

    frequencies: Tensor

    def __init__(self, dim: int, num_features: int, nu: float, *, generator: Generator | None = None) -> None:
        super().__init__(dim, num_features, nu)
        directions = torch.randn(num_features, dim, generator=generator)
        self.register_buffer("frequencies", math.sqrt(nu) * directions)

    def _lengths(self) -> Tensor:
        return self.frequencies

    def _features(self, x: Tensor) -> Tensor:
        return _cos_sin(F.linear(x, self.frequencies))


@final
class OrthogonalFourier(GaussianMap):
    """`RandomFourier` whose frequencies are orthogonal within each block of dim. Unbiased, less variance.

    Yu et al. (2016), orthogonal random features: Haar-distributed directions with independent chi(dim) lengths, so
    each row alone is N(0, nu I). The best map per feature; drawing it costs O(D dim^2), once.
    `frequencies` is (D, dim).
    """

    frequencies: Tensor

    def __init__(self, dim: int, num_features: int, nu: float, *, generator: Generator | None = None) -> None:
        super().__init__(dim, num_features, nu)
        self.register_buffer("frequencies", math.sqrt(nu) * _orthogonal_normal(num_features, dim, generator))

    def _lengths(self) -> Tensor:
        return self.frequencies

    def _features(self, x: Tensor) -> Tensor:
        return _cos_sin(F.linear(x, self.frequencies))


@final
class StructuredFourier(GaussianMap):
    """`OrthogonalFourier` in O(D log dim) time and O(D) memory: W = sqrt(nu) L H S1 H S2 H S3 in each block.

    Yu et al. (2016), SORF. H is the orthonormal Walsh-Hadamard matrix, never formed; the S are random signs; x is
    zero-padded to a power of two p, at least 64; D need not divide into blocks. Yu et al. take L = sqrt(p), which
    biases the estimate by up to -0.54 / p; here L holds independent chi(p) lengths, as in `OrthogonalFourier`.

    Bias: signs make finitely many directions, so it is not zero, but it is below 5e-4 everywhere we measured (spread
    and sparse x - y; 3e-4 at worst), which is the random error of D = 10^6. Blocks of 16 would bias by up to 0.05.
    `signs` is (3, blocks, p) and `lengths`, sqrt(nu) L, is (D,).
    """

    signs: Tensor
    lengths: Tensor

    def __init__(self, dim: int, num_features: int, nu: float, *, generator: Generator | None = None) -> None:
        super().__init__(dim, num_features, nu)
        size = max(64, 1 << (dim - 1).bit_length())
        blocks = math.ceil(num_features / size)
        self.register_buffer("signs", _random_signs(3, blocks, size, generator=generator))
        self.register_buffer("lengths", math.sqrt(nu) * _chi(num_features, size, generator))

    def _lengths(self) -> Tensor:
        return self.lengths

    def _features(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, self.signs.shape[-1] - self.dim)).unsqueeze(-2)
        for signs in self.signs:
            x = _walsh_hadamard(signs * x)
        return _cos_sin(x.flatten(-2)[..., : self.num_features] * self.lengths)


@final
class Quadratic(FeatureMap):
    """phi(z) = [sqrt(alpha) z (x) z, sqrt(beta)]: the kernel alpha (x.y)^2 + beta, with no error at all.

    Blanc and Rendle (2018), with their alpha and beta as the defaults: the baseline of the RF-softmax paper,
    eq. (quad-kernel). It stands for exp(tau |x.y|), since it cannot tell x.y from -x.y. D = dim^2, of which
    z_i z_j and z_j z_i are kept as one, sqrt(2) z_i z_j: width dim (dim + 1) / 2 + 1.
    """

    _first: Tensor
    _second: Tensor
    _scale: Tensor

    def __init__(self, dim: int, alpha: float = 100.0, beta: float = 1.0) -> None:
        super().__init__(dim, _positive_int("dim", dim) ** 2)
        self.alpha = _positive_float("alpha", alpha)
        self.beta = _positive_float("beta", beta)
        first, second = torch.triu_indices(dim, dim)
        self.width = len(first) + 1
        self.register_buffer("_first", first, persistent=False)
        self.register_buffer("_second", second, persistent=False)
        scale = torch.where(first == second, 1.0, math.sqrt(2)) * math.sqrt(self.alpha)
        self.register_buffer("_scale", scale, persistent=False)

    def _features(self, x: Tensor) -> Tensor:
        squares = x.index_select(-1, self._first) * x.index_select(-1, self._second) * self._scale
        return F.pad(squares, (0, 1), value=math.sqrt(self.beta))

    def _kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return self.alpha * _dot(x, y).square() + self.beta

    def _log_scale(self, x: Tensor) -> Tensor:
        return x.new_full(x.shape[:-1], 0.5 * math.log(self.beta))


@final
class RandomMaclaurin(_ExponentialMap):
    """phi_i(x) = sqrt(2^(N+1) nu^N / (N! D)) prod_{j<=N} r_ij.x, with P(N = k) = 2^-(k+1). Unbiased.

    Kar and Karnick (2012): each feature draws one term of the series of exp(nu x.y), and Rademacher vectors r for
    its powers. Its variance is far above that of the Fourier maps (Table 1 of the RF-softmax paper), which is what
    it is here to show. Features come in order of falling N, the `degrees` (D,), so that the j-th factors of all
    features that have one are a prefix of phi; `scales` is (D,). The rows of `signs` (2 D + 64, dim) are the
    first factors of all features, then the second ones, and so on.
    """

    signs: Tensor
    degrees: Tensor
    scales: Tensor

    def __init__(self, dim: int, num_features: int, nu: float, *, generator: Generator | None = None) -> None:
        super().__init__(dim, num_features, nu)
        degrees = torch.empty(num_features).geometric_(0.5, generator=generator).sub(1)
        degrees = degrees.sort(descending=True).values
        log_squares = (degrees + 1) * math.log(2) + degrees * math.log(nu) - torch.lgamma(degrees + 1)
        # The degrees add up to about D, above 2 D + 64 with a chance below 1e-13. A size that depends on D alone
        # lets any map load the state of any other.
        self.register_buffer("signs", _random_signs(2 * num_features + 64, dim, generator=generator))
        self.register_buffer("degrees", degrees.long())
        self.register_buffer("scales", torch.exp(0.5 * log_squares) / math.sqrt(num_features))

    def _features(self, x: Tensor) -> Tensor:
        counts = [int((self.degrees > j).sum()) for j in range(int(self.degrees[0]))]
        factors = F.linear(x, self.signs[: sum(counts)]).split(counts, dim=-1)
        product = x.new_ones(*x.shape[:-1], 0)
        for factor in reversed(factors):
            product = factor * _padded_with_ones(product, factor.shape[-1])
        return self.scales * _padded_with_ones(product, self.num_features)


@final
class PositiveRandom(_ExponentialMap):
    """phi(x) = exp(W x - nu |x|^2 / 2) / sqrt(D), the rows of W N(0, nu I). Unbiased, every feature positive.

    Choromanski et al. (2021), FAVOR+: E exp(w.x + w.y) = exp(nu |x + y|^2 / 2), and what is left after dividing by
    exp(nu |x|^2 / 2 + nu |y|^2 / 2) is exp(nu x.y). No estimate is negative, so none needs a floor, and small kernel
    values have small errors, large ones large errors. The rows are orthogonal in blocks of dim, which lowers
    the variance. `frequencies` is W, (D, dim).
    """

    frequencies: Tensor

    def __init__(self, dim: int, num_features: int, nu: float, *, generator: Generator | None = None) -> None:
        super().__init__(dim, num_features, nu)
        self.register_buffer("frequencies", math.sqrt(nu) * _orthogonal_normal(num_features, dim, generator))

    def _features(self, x: Tensor) -> Tensor:
        half_square = 0.5 * self.nu * x.square().sum(-1, keepdim=True)
        return torch.exp(F.linear(x, self.frequencies) - half_square) / math.sqrt(self.num_features)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("...d,...d->...", x, y)


def _cos_sin(angles: Tensor) -> Tensor:
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(angles.shape[-1] ** -0.5)


def _padded_with_ones(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[-1]), value=1.0)


def _walsh_hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension, a power of two."""
    size = x.shape[-1]
    # Each pass transforms the top bit of the index and rotates it to the bottom: after all bits, order is restored.
    for _ in range(size.bit_length() - 1):
        top, bottom = x.chunk(2, dim=-1)
        x = torch.stack((top + bottom, top - bottom), dim=-1).flatten(-2)
    return x / math.sqrt(size)


def _random_signs(*shape: int, generator: Generator | None) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).to(torch.get_default_dtype()) * 2 - 1


def _chi(num: int, dim: int, generator: Generator | None) -> Tensor:
    """`num` independent lengths of N(0, I) vectors in `dim` dimensions."""
    return torch.randn(num, dim, generator=generator).norm(dim=-1)


def _orthogonal_normal(num: int, dim: int, generator: Generator | None) -> Tensor:
    """(num, dim) rows, each N(0, I), orthogonal to one another within each block of dim rows."""
    size = min(num, dim)
    normal = torch.randn(math.ceil(num / size), dim, size, generator=generator)
    q, r = torch.linalg.qr(normal)
    # QR leaves the signs of Q to the library; those of R's diagonal make Q Haar-distributed (Mezzadri 2007).
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return q.mT.flatten(0, 1)[:num] * _chi(num, dim, generator).unsqueeze(-1)


def _positive_int(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a positive int, got {value!r}")
    return value


def _positive_float(name: str, value: float) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a positive finite float, got {value!r}")
    return float(value)
