"""The leaves' sums of a `KernelSampler` with a Fourier map: angles by torch, some rows at a time, the rest by numba.

Features are summed where they are made: there is no (n, 2D) array of them, whole or in pieces.
"""

import numpy as np
import torch
from torch import Tensor

from .fourier_kernels import ANGLE_COST, Fourier, Settings, _log_weight
from .threads import spread
from .tree import Tree
from .vectors import cos_sin, embedded

# Angles at once: a megabyte of them, but no fewer rows than a matrix product takes to be fast.
_ANGLES = 1 << 18
_LEAST_ROWS = 256


def sum_leaves(tree: Tree, fourier: Fourier, blocks: Tensor | None = None) -> None:
    """`Tree.sum_leaves` for a Fourier map: fills the leaves of tree.sums and tree.weights, all or of blocks (k,)."""
    size, num = tree.block_size, len(fourier.frequencies)
    leaves = (tree.sums.numpy()[tree.num_blocks :], tree.weights.numpy()[tree.num_blocks :])
    anchor, bias = fourier.anchor.numpy(), fourier.bias.numpy()
    which = torch.arange(tree.num_blocks) if blocks is None else blocks
    for some in which.split(-(-max(_LEAST_ROWS, _ANGLES // num) // size)):
        positions = (some.unsqueeze(1) * size + torch.arange(size)).flatten().clamp_(max=tree.num_classes - 1)
        rows = tree.values(positions)
        angles = rows @ fourier.frequencies.T
        source = (angles.numpy(), rows.numpy(), anchor, bias)
        arguments = (source, fourier.settings, size, some.numpy(), *leaves)
        spread(_sum_blocks, arguments, len(some), ANGLE_COST * num * size)


@embedded
def _sum_blocks(
    source: tuple[np.ndarray, ...],
    settings: Settings,
    block_size: int,
    blocks: np.ndarray,
    sums: np.ndarray,
    weights: np.ndarray,
    start: int,
    stop: int,
) -> None:
    """Those of blocks number start to stop; source has angles and rows of all their classes, one after the other."""
    angles, rows, anchor, bias = source
    num = angles.shape[1]
    scale, psi = 1 / np.sqrt(num), np.empty(2 * num, sums.dtype)
    for k in range(start, stop):
        total, weight = sums[blocks[k]], 0.0
        total[:] = 0.0
        first = blocks[k] * block_size
        for i in range(min(block_size, bias.shape[0] - first)):
            place = k * block_size + i
            log_weight, log_factor = _log_weight(rows[place], bias[first + i], anchor, settings)
            cos_sin(angles[place], psi[:num], psi[num:], scale * np.exp(log_factor))
            for j in range(2 * num):
                total[j] += psi[j]
            weight += np.exp(log_weight)
        weights[blocks[k]] = weight
