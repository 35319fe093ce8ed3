"""`KernelSampler` with a Fourier map on CPU tensors, compiled by numba: queries, draws and updates, no torch between.

For small batches the calls that lie between features and walk cost more than either; for updates the features of all
rows that moved would fill the memory's bus twice. What the feature map computes by torch is computed here by the same
formulas, to rounding.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .block_kernels import leaf_arrays, query_unit
from .kernels import MAX_LOG_FACTOR, _arrays, _draw, path_cost
from .row_kernels import given_length
from .threads import spread
from .tree import LARGEST_BYTE, LEAST_UNIT, Query, Tree
from .vectors import AHEAD, cos_sin, dot, embedded, inlined, lean, number, prefetch, prefetch_number

# Rows whose angles are made at once: each number of the frequencies that is read serves so many.
TOGETHER = 4
# Far below where exp overflows: a class's weight may still be added to others and taken away again.
MAX_LOG_WEIGHT = 600.0
# Multiplications that cosine and sine of an angle take.
ANGLE_COST = 32


class Settings(NamedTuple):
    """The numbers of a `KernelSampler` with a Fourier map: leaf query = leaf_hidden h + leaf_centred (h - anchor)."""

    nu: float
    floor: float
    leaf_hidden: float
    leaf_centred: float
    anchored: bool
    tau: float
    log_shift: float


class Fourier(NamedTuple):
    """What the features of queries and classes are made of."""

    frequencies: Tensor  # (D, d)
    anchor: Tensor  # (d,)
    bias: Tensor  # (n,), in the order of positions
    settings: Settings

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Frequencies (d, D), anchor and bias."""
        return np.ascontiguousarray(self.frequencies.numpy().T), self.anchor.numpy(), self.bias.numpy()


def query(tree: Tree, hidden: Tensor, excluded: Tensor, fourier: Fourier) -> Query:
    """The query that `KernelSampler` makes of hidden (B, d); excluded (B, E) are positions."""
    batch, width = len(hidden), 2 * len(fourier.frequencies)
    made = Query(
        hidden.new_empty(batch, width),
        torch.empty(batch, dtype=torch.float64),
        torch.empty_like(hidden),
        excluded,
        hidden.new_empty(excluded.shape),
        torch.empty(excluded.shape, dtype=torch.float64),
    )
    source = (hidden.contiguous().numpy(), *fourier.arrays())
    state, settings = _arrays(tree, made), fourier.settings
    spread(_query, (source, state, settings), batch, _query_cost(fourier, excluded))
    return made


class Plan:
    """All that a draw reads beside its queries, and an update beside what is new, as numba takes it: gathering it anew
    takes longer than a small draw.

    It shares the memory of the tensors, so updates show; whoever replaces one of them makes another plan. A copy or a
    pickle of it is None.
    """

    def __init__(self, tree: Tree, fourier: Fourier, position: Tensor, order: Tensor) -> None:
        self.address = tree.sums.data_ptr()  # by which it is known whether the tree is still the same
        self.source = fourier.arrays()
        self.places = (position.numpy(), order.numpy())
        self.nodes = (tree.sums.numpy(), tree.weights.numpy(), tree.counts.numpy())
        self.leaves = leaf_arrays(tree)
        self.settings = fourier.settings
        self.path_cost, self.class_cost = path_cost(tree), _class_cost(fourier)

    def __reduce__(self) -> Any:
        return type(None), ()


def draw(plan: Plan, hidden: Tensor, excluded: Tensor, uniforms: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """`kernels.draw` for `query` in one call, of classes, log q in float32; here excluded (B, E) are classes too."""
    ids = torch.empty(len(uniforms), each * uniforms.shape[1], dtype=torch.int64)
    log_q = torch.empty(ids.shape)
    source = (hidden.contiguous().numpy(), *plan.source)
    classes = (excluded.contiguous().numpy(), *plan.places)
    nodes, leaves, settings = plan.nodes, plan.leaves, plan.settings
    u, i, q = uniforms.numpy(), ids.numpy(), log_q.numpy()
    cost = (1 + excluded.shape[1]) * plan.class_cost + u.shape[1] * plan.path_cost
    spread(_query_and_draw, (source, classes, nodes, leaves, settings, u, i, q), len(u), cost, 1)
    return ids, log_q


def update(plan: Plan, positions: Tensor, which: Tensor, weight: Tensor, bias: Tensor | None, normalize: bool) -> None:
    """Give positions (k,), ascending, the rows number `which` (k,) of weight (*, d), and of bias (*,) unless None, here
    and in the leaves' sums and weights; with `normalize` brought to unit length.

    Offsets, and the nodes above the leaves, are for the caller.
    """
    biases = weight.new_empty(0) if bias is None else bias
    source, leaves = tuple(t.detach().contiguous().numpy() for t in (weight, biases)), plan.leaves
    new, settings, state = (positions.numpy(), which.numpy(), *source, normalize), plan.settings, plan.nodes
    spread(_update, (new, plan.source, settings, state, leaves), len(positions), 2 * plan.class_cost)


def _class_cost(fourier: Fourier) -> int:
    return fourier.frequencies.numel() + ANGLE_COST * len(fourier.frequencies)


def _query_cost(fourier: Fourier, excluded: Tensor) -> int:
    return (1 + excluded.shape[1]) * _class_cost(fourier)


@embedded
def products(frequencies: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
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
            for k in range(TOGETHER):
                out[k, i] += rows[k, j] * frequencies[j, i]


@embedded
def values(rows: np.ndarray, units: np.ndarray, i: int, out: np.ndarray) -> None:
    """`Tree.values` of row i."""
    unit = units[i] if units.shape[0] else out.dtype.type(1.0)
    for j in range(out.shape[0]):
        out[j] = unit * number(rows[i, j])


@embedded
def _log_weight(row: np.ndarray, bias: float, anchor: np.ndarray, settings: Settings) -> tuple[float, float]:
    """The log of a class's weight, and of the factor that makes psi of phi."""
    log_scale = -0.5 * settings.nu * dot(row, row)
    log_weight = settings.tau * dot(row, anchor) if settings.anchored else log_scale
    log_weight += bias - settings.log_shift
    return min(log_weight, MAX_LOG_WEIGHT), min(log_weight - log_scale, MAX_LOG_FACTOR)


@embedded
def _query_and_draw(
    source: tuple[np.ndarray, ...],
    classes: tuple[np.ndarray, ...],
    nodes: tuple[np.ndarray, ...],
    leaves: tuple[Any, ...],
    settings: Settings,
    uniforms: np.ndarray,
    ids: np.ndarray,
    log_q: np.ndarray,
    start: int,
    stop: int,
) -> None:
    (hidden, frequencies, anchor, bias), (excluded, position, order) = source, classes
    size, num, dtype = stop - start, excluded.shape[1], hidden.dtype
    positions = np.empty((size, num), np.int64)
    for b in range(size):
        for e in range(num):
            positions[b, e] = position[excluded[start + b, e]]
    features, leaf = np.empty((size, 2 * frequencies.shape[1]), dtype), np.empty((size, hidden.shape[1]), dtype)
    query = (features, np.empty(size), leaf, positions, np.empty((size, num), dtype), np.empty((size, num)))
    state = query + nodes + leaves
    _query((hidden[start:stop], frequencies, anchor, bias), state, settings, 0, size)
    _draw(state, uniforms[start:stop], ids[start:stop], log_q[start:stop], 0, size)
    _in_order(ids[start:stop].reshape(-1), order)


@lean
def _in_order(ids: np.ndarray, order: np.ndarray) -> None:
    """Makes classes of positions."""
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            prefetch_number(order, ids[i + AHEAD])
        ids[i] = order[ids[i]]


@embedded
def _query(source: tuple[np.ndarray, ...], state: tuple[Any, ...], settings: Settings, start: int, stop: int) -> None:
    """Fills the parts of the query in state, except `excluded`, from source = hidden, frequencies, anchor, bias."""
    hidden, frequencies, anchor, bias = source
    features, floors, leaf, excluded, excluded_mass, excluded_weight = state[:6]
    rows, units = state[9], state[10]
    (dim, num), per_query = frequencies.shape, excluded.shape[1]
    scale, dtype = 1 / np.sqrt(num), hidden.dtype
    x, angles, psi = np.zeros((TOGETHER, dim), dtype), np.empty((TOGETHER, num), dtype), np.empty(2 * num, dtype)
    for first in range(start, stop, TOGETHER):
        last = min(first + TOGETHER, stop)
        for b in range(first, last):
            for j in range(dim):
                x[b - first, j] = hidden[b, j] - anchor[j]
                leaf[b, j] = settings.leaf_hidden * hidden[b, j] + settings.leaf_centred * x[b - first, j]
            unit = query_unit(leaf[b], state)
            for j in range(dim if unit else 0):
                leaf[b, j] = unit * np.rint(leaf[b, j] / unit)
            floors[b] = settings.floor * np.exp(-0.5 * settings.nu * dot(x[b - first], x[b - first]))
        products(frequencies, x, angles)
        for b in range(first, last):
            cos_sin(angles[b - first], features[b, :num], features[b, num:], scale)
    for first in range(start * per_query, stop * per_query, TOGETHER):
        last = min(first + TOGETHER, stop * per_query)
        for i in range(first, last):
            position = excluded[i // per_query, i % per_query]
            if position >= 0:
                values(rows, units, position, x[i - first])
        products(frequencies, x, angles)
        for i in range(first, last):
            b, e = divmod(i, per_query)
            excluded_mass[b, e], excluded_weight[b, e] = 0.0, 0.0
            if excluded[b, e] >= 0:
                cos_sin(angles[i - first], psi[:num], psi[num:], scale)
                log_weight, log_factor = _log_weight(x[i - first], bias[excluded[b, e]], anchor, settings)
                excluded_mass[b, e] = np.exp(log_factor) * dot(features[b], psi)
                excluded_weight[b, e] = np.exp(log_weight)


@inlined
def _leaf_start(positions: np.ndarray, i: int, block_size: int) -> int:
    """The first place from i on where another leaf begins than the one before has, or the end."""
    while 0 < i < positions.shape[0] and positions[i] // block_size == positions[i - 1] // block_size:
        i += 1
    return i


@embedded
def _put(row: np.ndarray, rows: np.ndarray, units: np.ndarray, i: int) -> None:
    """`Tree.put` of a row at i; makes the row what `Tree.values` gives."""
    if units.shape[0]:
        largest = abs(row[0])
        for j in range(row.shape[0]):
            largest = max(largest, abs(row[j]))
        unit = max(largest, units.dtype.type(LEAST_UNIT)) / units.dtype.type(LARGEST_BYTE)
        units[i] = unit
        for j in range(row.shape[0]):
            row[j] = np.rint(row[j] / unit)
            rows[i, j] = rows.dtype.type(row[j])
            row[j] *= unit
    else:
        for j in range(row.shape[0]):
            rows[i, j] = row[j]


@embedded
def _update(
    new: tuple[Any, ...],
    source: tuple[np.ndarray, ...],
    settings: Settings,
    nodes: tuple[np.ndarray, ...],
    leaves: tuple[Any, ...],
    start: int,
    stop: int,
) -> None:
    """Places start to stop of `new`, but all of a leaf by the thread that has the first of them."""
    (positions, which, weight, biases, normalize), (frequencies, anchor, bias) = new, source
    (sums, weights, _), (rows, units, _, block_size, _, _) = nodes, leaves
    (dim, num), blocks, pairs = frequencies.shape, sums.shape[0] // 2, TOGETHER // 2
    scale, dtype = 1 / np.sqrt(num), sums.dtype
    # Old and new rows in turn.
    x, angles, psi = np.zeros((TOGETHER, dim), dtype), np.empty((TOGETHER, num), dtype), np.empty((2, 2 * num), dtype)
    end = _leaf_start(positions, stop, block_size)
    for first in range(_leaf_start(positions, start, block_size), end, pairs):
        last = min(first + pairs, end)
        for i in range(last + AHEAD, min(last + AHEAD + pairs, end)):  # on their way while others are made
            prefetch(weight, which[i], which[i] + 1)
            prefetch(rows, positions[i], positions[i] + 1)
        for i in range(last, min(last + pairs, end)):
            prefetch(sums, blocks + positions[i] // block_size, blocks + positions[i] // block_size + 1)
        for i in range(first, last):
            old, row = x[2 * (i - first)], x[2 * (i - first) + 1]
            values(rows, units, positions[i], old)
            given_length(weight[which[i]], normalize, row)
            _put(row, rows, units, positions[i])
        products(frequencies, x, angles)
        for i in range(first, last):
            position, leaf = positions[i], blocks + positions[i] // block_size
            for k in range(2):
                row = 2 * (i - first) + k
                if k and biases.shape[0]:
                    bias[position] = biases[which[i]]
                log_weight, log_factor = _log_weight(x[row], bias[position], anchor, settings)
                cos_sin(angles[row], psi[k, :num], psi[k, num:], scale * np.exp(log_factor))
                weights[leaf] += np.exp(log_weight) if k else -np.exp(log_weight)
            target, before, after = sums[leaf], psi[0], psi[1]
            for j in range(2 * num):
                target[j] += after[j] - before[j]
