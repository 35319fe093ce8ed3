"""The leaves' sums of a `KernelSampler` with a Fourier map, from all class rows, compiled by numba.

Features are summed where they are made: there is no (n, 2D) array of them, whole or in pieces. numba does not see
changes in another file: after one to `kernels.py` or `fourier_kernels.py` delete its cache, `__pycache__/*.nb*`.
"""

import numpy as np
from torch import Tensor

from .fourier_kernels import Fourier, Settings, _class_cost, _cos_sin, _log_weight
from .kernels import compiled, number, row_array, spread
from .tree import Tree

# Rows whose angles are made at once: each number of the frequencies that is read serves so many.
_TOGETHER = 4


def sum_leaves(tree: Tree, fourier: Fourier, blocks: Tensor | None = None) -> None:
    """`Tree.sum_leaves` for a Fourier map: fills the leaves of tree.sums and tree.weights, all or of blocks (k,)."""
    frequencies, anchor, bias = fourier.arrays()
    source = (np.ascontiguousarray(frequencies.T), anchor, bias, row_array(tree.rows))
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
    some, angles, psi = np.zeros((_TOGETHER, dim), dtype), np.empty((_TOGETHER, num), dtype), np.empty(2 * num, dtype)
    for k in range(start, stop):
        sums[blocks[k]] = 0.0
        weights[blocks[k]] = 0.0
    for first in range(start * block_size, stop * block_size, _TOGETHER):
        last = min(first + _TOGETHER, stop * block_size)
        for i in range(first, last):
            row = blocks[i // block_size] * block_size + i % block_size
            for j in range(dim if row < rows.shape[0] else 0):
                some[i - first, j] = number(rows[row, j])
        _angles(frequencies, some, angles)
        for i in range(first, last):
            block = blocks[i // block_size]
            row = block * block_size + i % block_size
            if row < rows.shape[0]:
                total = sums[block]
                log_weight, log_factor = _log_weight(some[i - first], bias[row], anchor, settings)
                _cos_sin(angles[i - first], psi[:num], psi[num:], scale * np.exp(log_factor))
                for j in range(2 * num):
                    total[j] += psi[j]
                weights[block] += np.exp(log_weight)


@compiled
def _angles(frequencies: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out (4, D) = rows (4, d) times frequencies (d, D): whole vectors of D, four rows of frequencies at a time."""
    out[:] = 0.0
    a, b, c, d = out[0], out[1], out[2], out[3]
    end = rows.shape[1] // 4 * 4
    for j in range(0, end, 4):
        f, g, h, k = frequencies[j], frequencies[j + 1], frequencies[j + 2], frequencies[j + 3]
        a0, a1, a2, a3 = rows[0, j], rows[0, j + 1], rows[0, j + 2], rows[0, j + 3]
        b0, b1, b2, b3 = rows[1, j], rows[1, j + 1], rows[1, j + 2], rows[1, j + 3]
        c0, c1, c2, c3 = rows[2, j], rows[2, j + 1], rows[2, j + 2], rows[2, j + 3]
        d0, d1, d2, d3 = rows[3, j], rows[3, j + 1], rows[3, j + 2], rows[3, j + 3]
        for i in range(f.shape[0]):
            a[i] += a0 * f[i] + a1 * g[i] + a2 * h[i] + a3 * k[i]
            b[i] += b0 * f[i] + b1 * g[i] + b2 * h[i] + b3 * k[i]
            c[i] += c0 * f[i] + c1 * g[i] + c2 * h[i] + c3 * k[i]
            d[i] += d0 * f[i] + d1 * g[i] + d2 * h[i] + d3 * k[i]
    for j in range(end, rows.shape[1]):
        for i in range(out.shape[1]):
            for k in range(_TOGETHER):
                out[k, i] += rows[k, j] * frequencies[j, i]
