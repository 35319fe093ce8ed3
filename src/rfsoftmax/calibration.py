"""The choice of nu: least chi2 on a probe of recent queries, at a cost that does not grow with n."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .features import GaussianMap

# The candidates for nu, as shares of tau, at which the kernel is that of the softmax: 1/16 to 1, by factors of sqrt 2.
SHARES = tuple(2 ** (-k / 2) for k in range(8, -1, -1))
# Blocks probed: so many of the first, which are the heaviest if there is an anchor, and as many from all others.
NUM_BLOCKS = 32
# And no more classes than this in all, whatever the size of a block.
NUM_CLASSES = 4096


class Calibration(NamedTuple):
    """What was found: chi2 here is exp(mean of log(1 + chi2) over the queries) - 1, on the probe."""

    nu: float
    chi2: float
    chi2_of_double: float  # with twice as many frequencies: what more D would gain
    tried: dict[float, float]  # chi2 by nu


class Probe(NamedTuple):
    """K blocks of classes that stand for all, and Q queries."""

    rows: Tensor  # (K, b, d)
    log_weight: Tensor  # (K, b): log a_i of the classes, -inf where a block has no more
    block_weight: Tensor  # (K,): how many blocks each stands for
    queries: Tensor  # (Q, d), less the anchor
    log_mass: Tensor  # (Q, K): log sum over the block of e^{o_i}


def probed_blocks(num_blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Numbers of blocks (K,) and how many blocks each stands for: the first ones, and a stride through the others."""
    half = max(1, min(NUM_BLOCKS, NUM_CLASSES // (2 * block_size)) if block_size > 1 else NUM_CLASSES // 2)
    if num_blocks <= 2 * half:
        return torch.arange(num_blocks), torch.ones(num_blocks)
    stride = (num_blocks - half) / half
    others = half + ((torch.arange(half) + 0.5) * stride).long()
    return torch.cat([torch.arange(half), others]), torch.tensor([1.0, stride]).repeat_interleave(half)


def calibrate(feature_map: GaussianMap, probe: Probe, tau: float, floor: float) -> Calibration:
    """The best nu of SHARES x tau for a sampler with this map and floor; the map stays as it is."""
    make: Any = type(feature_map)
    shape = feature_map.dim, feature_map.num_features, feature_map.nu
    twin = make(*shape, generator=torch.Generator().manual_seed(0)).to(probe.rows)

    def chi2(nu: float, *maps: GaussianMap) -> float:
        masses = torch.stack([_masses(each, nu, probe) for each in maps]).mean(0)
        return _chi2(probe, masses, floor * _floors(nu, probe))

    tried = {nu: chi2(nu, feature_map) for nu in (share * tau for share in SHARES)}
    best = min(tried, key=lambda nu: tried[nu])
    return Calibration(best, tried[best], chi2(best, feature_map, twin), tried)


def _masses(feature_map: GaussianMap, nu: float, probe: Probe) -> Tensor:
    """phi(h).sum psi (Q, K), float64, if the map's nu were nu: its kernel is of sqrt(nu) x, whatever nu is."""
    scale = math.sqrt(nu / feature_map.nu)
    blocks = len(probe.rows)
    rows = scale * probe.rows.flatten(0, 1)
    # psi = a phi(c) / s(c), s = exp(-nu |c|^2 / 2); a is relative to the heaviest, as in the tree.
    factor = (probe.log_weight.flatten() - feature_map.log_scale(rows)).exp()
    psi = (feature_map(rows) * factor.unsqueeze(1)).view(blocks, -1, feature_map.width).sum(1)
    return (feature_map(scale * probe.queries) @ psi.T).double()


def _floors(nu: float, probe: Probe) -> Tensor:
    """The kernel at a right angle times the blocks' weights, (Q, K)."""
    right_angle = (-0.5 * nu * probe.queries.double().square().sum(1)).exp()
    return right_angle.unsqueeze(1) * probe.log_weight.double().exp().sum(1)


def _chi2(probe: Probe, masses: Tensor, floors: Tensor) -> float:
    """sum p^2 / q - 1 over blocks, p from the true masses and q from the floored ones: inside a block they agree."""
    mass = torch.maximum(masses, floors).clamp_min(1e-300)
    weight = probe.block_weight.double()
    log_p = (probe.log_mass.double() + weight.log()).log_softmax(1)
    log_q = (mass.log() + weight.log()).log_softmax(1)
    # sum over blocks of w (P/w)^2 / (Q/w), each block standing for w alike.
    log_moment = (2 * log_p - log_q).logsumexp(1)
    return math.expm1(float(log_moment.clamp_min(0).mean()))
