"""The leaves' sums of a `KernelSampler` with a Fourier map, from all class rows, compiled by numba.

Features are summed where they are made: there is no (n, 2D) array of them, whole or in pieces. numba does not see
changes in another file: after one to `kernels.py` or `fourier_kernels.py` delete its cache, `__pycache__/*.nb*`.
"""

import numpy as np

from .fourier_kernels import Fourier, Settings, _class_cost, _cos_sin, _log_weight
from .kernels import compiled, number, row_array, spread
from .tree import Tree

# Rows whose angles are made at once: each number of the frequencies that is read serves so many.
_TOGETHER = 4


def sum_leaves(tree: Tree, fourier: Fourier) -> None:
    """`Tree.sum_leaves` for the features of a Fourier map: fills the leaves of tree.sums and tree.weights."""
    frequencies, anchor, bias = fourier.arrays()
    source = (np.ascontiguousarray(frequencies.T), anchor, bias, row_array(tree.rows))
    sums, weights = tree.sums.numpy()[tree.num_blocks :], tree.weights.numpy()[tree.num_blocks :]
    settings, size, cost = fourier.settings, tree.block_size, _class_cost(fourier) * tree.block_size
    spread(lambda a, b: _sum_blocks(source, settings, size, sums, weights, a, b), tree.num_blocks, cost)


@compiled
def _sum_blocks(
    source: tuple[np.ndarray, ...],
    settings: Settings,
    block_size: int,
    sums: np.ndarray,
    weights: np.ndarray,
    start: int,
    stop: int,
) -> None:
    frequencies, anchor, bias, rows = source
    dim, num = frequencies.shape
    scale, dtype = 1 / np.sqrt(num), sums.dtype
    some, angles, psi = np.zeros((_TOGETHER, dim), dtype), np.empty((_TOGETHER, num), dtype), np.empty(2 * num, dtype)
    for block in range(start, stop):
        total, weight = sums[block], 0.0
        total[:] = 0.0
        last = min((block + 1) * block_size, rows.shape[0])
        for first in range(block * block_size, last, _TOGETHER):
            count = min(_TOGETHER, last - first)
            for i in range(count):
                for j in range(dim):
                    some[i, j] = number(rows[first + i, j])
            _angles(frequencies, some, angles)
            for i in range(count):
                log_weight, log_factor = _log_weight(some[i], bias[first + i], anchor, settings)
                _cos_sin(angles[i], psi[:num], psi[num:], scale * np.exp(log_factor))
                for j in range(2 * num):
                    total[j] += psi[j]
                weight += np.exp(log_weight)
        weights[block] = weight


@compiled
def _angles(frequencies: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out (4, D) = rows (4, d) times frequencies (d, D): whole vectors of D, two rows of frequencies at a time."""
    out[:] = 0.0
    a, b, c, d = out[0], out[1], out[2], out[3]
    end = rows.shape[1] // 2 * 2
    for j in range(0, end, 2):
        f, g = frequencies[j], frequencies[j + 1]
        a0, b0, c0, d0 = rows[0, j], rows[1, j], rows[2, j], rows[3, j]
        a1, b1, c1, d1 = rows[0, j + 1], rows[1, j + 1], rows[2, j + 1], rows[3, j + 1]
        for i in range(f.shape[0]):
            a[i] += a0 * f[i] + a1 * g[i]
            b[i] += b0 * f[i] + b1 * g[i]
            c[i] += c0 * f[i] + c1 * g[i]
            d[i] += d0 * f[i] + d1 * g[i]
    for j in range(end, rows.shape[1]):
        for i in range(out.shape[1]):
            for k in range(_TOGETHER):
                out[k, i] += rows[k, j] * frequencies[j, i]
