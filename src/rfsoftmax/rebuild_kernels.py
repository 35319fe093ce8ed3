"""The leaves' sums of a `KernelSampler` with a Fourier map, from all class rows, compiled by numba.

Features are summed where they are made: there is no (n, 2D) array of them, whole or in pieces.
"""

import numpy as np
from torch import Tensor

from .fourier_kernels import TOGETHER, Fourier, Settings, _class_cost, _log_weight, products
from .threads import spread
from .tree import Tree
from .vectors import compiled, cos_sin, number, row_array


def sum_leaves(tree: Tree, fourier: Fourier, blocks: Tensor | None = None) -> None:
    """`Tree.sum_leaves` for a Fourier map: fills the leaves of tree.sums and tree.weights, all or of blocks (k,)."""
    source = (*fourier.arrays(), row_array(tree.rows))
    sums, weights = tree.sums.numpy()[tree.num_blocks :], tree.weights.numpy()[tree.num_blocks :]
    which = np.arange(tree.num_blocks) if blocks is None else blocks.numpy()
    settings, size, cost = fourier.settings, tree.block_size, _class_cost(fourier) * tree.block_size
    spread(lambda a, b: _sum_blocks(source, settings, size, which, sums, weights, a, b), len(which), cost)


@compiled
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
    """Those of blocks number start to stop. Rows whose angles are made at once may lie in several blocks."""
    frequencies, anchor, bias, rows = source
    dim, num = frequencies.shape
    scale, dtype = 1 / np.sqrt(num), sums.dtype
    some, angles, psi = np.zeros((TOGETHER, dim), dtype), np.empty((TOGETHER, num), dtype), np.empty(2 * num, dtype)
    for k in range(start, stop):
        sums[blocks[k]] = 0.0
        weights[blocks[k]] = 0.0
    for first in range(start * block_size, stop * block_size, TOGETHER):
        last = min(first + TOGETHER, stop * block_size)
        for i in range(first, last):
            row = blocks[i // block_size] * block_size + i % block_size
            for j in range(dim if row < rows.shape[0] else 0):
                some[i - first, j] = number(rows[row, j])
        products(frequencies, some, angles)
        for i in range(first, last):
            block = blocks[i // block_size]
            row = block * block_size + i % block_size
            if row < rows.shape[0]:
                total = sums[block]
                log_weight, log_factor = _log_weight(some[i - first], bias[row], anchor, settings)
                cos_sin(angles[i - first], psi[:num], psi[num:], scale * np.exp(log_factor))
                for j in range(2 * num):
                    total[j] += psi[j]
                weights[block] += np.exp(log_weight)
