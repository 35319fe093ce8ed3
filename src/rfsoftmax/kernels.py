"""`add`, `renew`, `draw` and `log_prob` of `tree.py` for CPU tensors, compiled by numba: same signatures, same results.

A kernel scores a node once per query, however many samples pass through it: the samples of one query that go left are
a prefix of its sorted uniforms, so the walk carries ranges of samples instead of samples. Kernels own no random state
and release the GIL; queries (or columns, for updates) are spread over threads of our own, as numba's own threads
clash with torch's.
"""

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from .tree import LEAF_ABSOLUTE, LEAF_QUADRATIC, MAX_UNIFORM, MIN_MASS, MIN_SHARE, Query, Tree

# Reassociation lets dot products use vector instructions; the flags that assume no NaN and no inf stay off.
_compile = functools.partial(njit, cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
_inline = functools.partial(_compile, inline="always")
# A class that has grown since the rebuild counts for at most this much more than the largest then, lest sums overflow.
MAX_LOG_FACTOR = 60.0
# Ratios of successive terms of the series of sin(x)/x and cos(x), from the ninth down.
_SINE_TERMS = tuple(1 / (2 * k * (2 * k + 1)) for k in range(9, 0, -1))
_COSINE_TERMS = tuple(1 / (2 * k * (2 * k - 1)) for k in range(9, 0, -1))
# Below this many multiplications waking a second thread costs more than it saves.
_MIN_WORK_PER_THREAD = 1_000_000
# Products of probabilities are turned into logs before they can underflow.
_LEAST_PRODUCT = 1e-200
# A score by subtraction is at least this share of what it was subtracted from, and its rounding error thus small.
_LEAST_KEPT = 0.2
# Nodes visited at once on a level: enough to hide the latency of memory, few enough for the cache.
_GROUP = 512


class FourierSettings(NamedTuple):
    """The numbers of a `KernelSampler` with a Fourier map: leaf query = leaf_hidden h + leaf_centred (h - anchor)."""

    nu: float
    floor: float
    leaf_hidden: float
    leaf_centred: float
    anchored: bool
    tau: float
    log_shift: float


def fourier_query(
    tree: Tree,
    hidden: Tensor,
    excluded: Tensor,
    frequencies: Tensor,
    anchor: Tensor,
    bias: Tensor,
    settings: FourierSettings,
) -> Query:
    """The query that `KernelSampler` makes with a Fourier map; excluded (B, E) are positions."""
    batch, width = len(hidden), 2 * len(frequencies)
    query = Query(
        hidden.new_empty(batch, width),
        torch.empty(batch, dtype=torch.float64),
        torch.empty_like(hidden),
        excluded,
        hidden.new_empty(excluded.shape),
        torch.empty(excluded.shape, dtype=torch.float64),
    )
    source = (hidden.contiguous().numpy(), frequencies.numpy(), anchor.numpy(), bias.numpy())
    state = _arrays(tree, query)
    _spread(lambda a, b: _fourier_query(source, state, settings, a, b), batch, _query_cost(frequencies, excluded))
    return query


def fourier_draw(
    tree: Tree,
    hidden: Tensor,
    excluded: Tensor,
    frequencies: Tensor,
    anchor: Tensor,
    bias: Tensor,
    settings: FourierSettings,
    position: Tensor,
    order: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """`draw` for `fourier_query` in one call, of classes: for small batches what lies between costs more than either.

    Here excluded (B, E) are classes; `position` (n + 1,) and `order` (n,) lead from them to positions and back.
    """
    ids = torch.empty(uniforms.shape, dtype=torch.int64)
    log_q = torch.empty(uniforms.shape, dtype=torch.float64)
    source = (hidden.contiguous().numpy(), frequencies.numpy(), anchor.numpy(), bias.numpy())
    classes = (excluded.contiguous().numpy(), position.numpy(), order.numpy())
    nodes = (tree.sums.numpy(), tree.weights.numpy(), tree.counts.numpy())
    leaves = (tree.rows.numpy(), tree.offsets.numpy(), tree.block_size, tree.leaf_rule)
    u, i, q = uniforms.numpy(), ids.numpy(), log_q.numpy()
    cost = _query_cost(frequencies, excluded) + u.shape[1] * _cost(tree)
    _spread(lambda a, b: _fourier_draw(source, classes, nodes, leaves, settings, u, i, q, a, b), len(u), cost)
    return ids, log_q


def _query_cost(frequencies: Tensor, excluded: Tensor) -> int:
    return (1 + excluded.shape[1]) * (frequencies.numel() + 32 * len(frequencies))


def add(tree: Tree, positions: Tensor, psi: Tensor, weight: Tensor) -> None:
    leaves = tree.leaf_of(positions).numpy()
    _add(tree.sums.numpy(), tree.weights.numpy(), leaves, psi.contiguous().numpy(), weight.numpy())


def renew(tree: Tree, positions: Tensor) -> None:
    leaves = tree.leaf_of(positions).unique().numpy()
    sums, weights = tree.sums.numpy(), tree.weights.numpy()
    _spread(lambda a, b: _renew(sums, weights, leaves, a, b), sums.shape[1], len(leaves) * tree.depth)


def draw(tree: Tree, query: Query, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    positions = torch.empty(uniforms.shape, dtype=torch.int64)
    log_q = torch.empty(uniforms.shape, dtype=torch.float64)
    state, u, p, q = _arrays(tree, query), uniforms.numpy(), positions.numpy(), log_q.numpy()
    _spread(lambda a, b: _draw(state, u, p, q, a, b), len(u), u.shape[1] * _cost(tree))
    return positions, log_q


def log_prob(tree: Tree, query: Query, positions: Tensor) -> tuple[Tensor, Tensor]:
    log_q = torch.empty(positions.shape, dtype=torch.float64)
    state, p, q = _arrays(tree, query), positions.contiguous().numpy(), log_q.numpy()
    _spread(lambda a, b: _log_prob(state, p, q, a, b), len(p), p.shape[1] * _cost(tree))
    return positions, log_q


def _cost(tree: Tree) -> int:
    """About how many multiplications it takes to walk one path and score its block."""
    return tree.depth * tree.sums.shape[1] + tree.block_size * tree.rows.shape[1]


def _arrays(tree: Tree, query: Query) -> tuple[Any, ...]:
    """Tree and query as numba takes them: one tuple, unpacked by `_draw` and `_log_prob`."""
    parts = [t.contiguous().numpy() for t in query]
    state = (tree.sums, tree.weights, tree.counts, tree.rows, tree.offsets)
    return (*parts, *(t.numpy() for t in state), tree.block_size, tree.leaf_rule)


def _spread(work: Callable[[int, int], None], size: int, cost: int) -> None:
    """work(start, stop) over [0, size) on as many threads as torch uses and the work is worth."""
    threads = min(torch.get_num_threads(), size, 1 + size * cost // _MIN_WORK_PER_THREAD)
    if threads <= 1:
        work(0, size)
        return
    edges = [size * i // threads for i in range(threads + 1)]
    pool = _pool(os.getpid(), torch.get_num_threads())
    waiting = [pool.submit(work, a, b) for a, b in itertools.pairwise(edges[1:])]
    work(edges[0], edges[1])
    for part in waiting:
        part.result()


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # Keyed by the process: threads do not survive a fork.
    return ThreadPoolExecutor(threads, thread_name_prefix="rfsoftmax")


@_compile
def _dot(x: np.ndarray, y: np.ndarray) -> float:
    total = x[0] - x[0]  # a zero of their own type, so that the loop keeps all its elements and whole vectors
    for i in range(x.shape[0]):
        total += x[i] * y[i]
    return total


@_compile
def _level(node: int) -> int:
    level = 0
    while node > 1:
        node >>= 1
        level += 1
    return level


@_compile
def _add(sums: np.ndarray, weights: np.ndarray, leaves: np.ndarray, psi: np.ndarray, weight: np.ndarray) -> None:
    for i in range(leaves.shape[0]):
        target, source = sums[leaves[i]], psi[i]
        for j in range(target.shape[0]):
            target[j] += source[j]
        weights[leaves[i]] += weight[i]


@_compile
def _renew(sums: np.ndarray, weights: np.ndarray, leaves: np.ndarray, start: int, stop: int) -> None:
    """Columns start..stop of all nodes above leaves, ascending; the thread with the first column does the weights."""
    blocks, count = sums.shape[0] // 2, leaves.shape[0]
    nodes = leaves.copy()
    for level in range(_level(2 * blocks - 1) - 1, -1, -1):
        # Leaves lie on two levels. Nodes below this one step up; changed leaves on it come after those parents.
        kept = 0
        here = np.searchsorted(nodes[:count], 2 << level)
        merged = np.concatenate((nodes[here:count] >> 1, nodes[:here]))
        for node in merged:
            if kept and nodes[kept - 1] == node:
                continue
            nodes[kept] = node
            kept += 1
            if node < blocks:
                target, left, right = sums[node], sums[2 * node], sums[2 * node + 1]
                for j in range(start, stop):
                    target[j] = left[j] + right[j]
                if start == 0:
                    weights[node] = weights[2 * node] + weights[2 * node + 1]
        count = kept


@_compile
def _cos_sin(angles: np.ndarray, cosines: np.ndarray, sines: np.ndarray, scale: float) -> None:
    """scale x cos and sin of angles, exact to float64 and vectorised: series about multiples of pi/2."""
    for i in range(angles.shape[0]):
        turns = np.rint(angles[i] * (2 / np.pi))
        x = angles[i] - turns * 1.5707963267341256 - turns * 6.077100506506192e-11
        y = x * x
        s, c = 1.0, 1.0
        for k in range(9):
            s = 1.0 - s * y * _SINE_TERMS[k]
            c = 1.0 - c * y * _COSINE_TERMS[k]
        s *= x
        quarter = np.int64(turns) & 3
        odd = (quarter & 1) == 1
        cosine, sine = (s, c) if odd else (c, s)
        cosines[i] = (-cosine if quarter == 1 or quarter == 2 else cosine) * scale
        sines[i] = (-sine if quarter >= 2 else sine) * scale


@_compile
def _fourier_draw(
    source: tuple[np.ndarray, ...],
    classes: tuple[np.ndarray, ...],
    nodes: tuple[np.ndarray, ...],
    leaves: tuple[Any, ...],
    settings: FourierSettings,
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
    features, leaf = np.empty((size, 2 * frequencies.shape[0]), dtype), np.empty((size, hidden.shape[1]), dtype)
    query = (features, np.empty(size), leaf, positions, np.empty((size, num), dtype), np.empty((size, num)))
    state = query + nodes + leaves
    _fourier_query((hidden[start:stop], frequencies, anchor, bias), state, settings, 0, size)
    _draw(state, uniforms[start:stop], ids[start:stop], log_q[start:stop], 0, size)
    for b in range(start, stop):
        for i in range(ids.shape[1]):
            ids[b, i] = order[ids[b, i]]


@_compile
def _fourier_query(
    source: tuple[np.ndarray, ...], state: tuple[Any, ...], settings: FourierSettings, start: int, stop: int
) -> None:
    """Fills the parts of the query in state, except `excluded`, from source = hidden, frequencies, anchor, bias."""
    hidden, frequencies, anchor, bias = source
    features, floors, leaf, excluded, excluded_mass, excluded_weight, _, _, _, rows, _, _, _ = state
    num, scale = frequencies.shape[0], 1 / np.sqrt(frequencies.shape[0])
    x, psi, angles = np.empty_like(hidden[0]), np.empty_like(features[0]), np.empty(num)
    for b in range(start, stop):
        for j in range(x.shape[0]):
            x[j] = hidden[b, j] - anchor[j]
            leaf[b, j] = settings.leaf_hidden * hidden[b, j] + settings.leaf_centred * x[j]
        for i in range(num):
            angles[i] = _dot(frequencies[i], x)
        _cos_sin(angles, features[b, :num], features[b, num:], scale)
        floors[b] = settings.floor * np.exp(-0.5 * settings.nu * _dot(x, x))
        for e in range(excluded.shape[1]):
            excluded_mass[b, e], excluded_weight[b, e] = 0.0, 0.0
            if excluded[b, e] < 0:
                continue
            row = rows[excluded[b, e]]
            for i in range(num):
                angles[i] = _dot(frequencies[i], row)
            _cos_sin(angles, psi[:num], psi[num:], scale)
            log_scale = -0.5 * settings.nu * _dot(row, row)
            log_weight = settings.tau * _dot(row, anchor) if settings.anchored else log_scale
            log_weight += bias[excluded[b, e]] - settings.log_shift
            factor = np.exp(min(log_weight - log_scale, MAX_LOG_FACTOR))
            excluded_mass[b, e] = factor * _dot(features[b], psi)
            excluded_weight[b, e] = np.exp(log_weight)


@_inline
def _mark_excluded(excluded: np.ndarray, blocks: int, block_size: int, leaves: np.ndarray, levels: np.ndarray) -> None:
    """The leaf and the level of each excluded position; -1 has a level above every node and so no ancestor."""
    for e in range(excluded.shape[0]):
        leaves[e], levels[e] = 0, -1
        if excluded[e] >= 0:
            leaves[e] = blocks + excluded[e] // block_size
            levels[e] = _level(leaves[e])


@_inline
def _floored(
    node: int,
    level: int,
    left: float,
    right: float,
    b: int,
    row: int,
    leaves: np.ndarray,
    leaf_levels: np.ndarray,
    state: tuple[Any, ...],
) -> tuple[float, float]:
    """The masses of both children of a node for query b, as `tree._mass`, from their scores; the level is theirs.

    What b excludes is in that row of leaves and leaf_levels.
    """
    _, floor, _, _, excluded_mass, excluded_weight, _, weights, counts, _, _, _, _ = state
    all_left, all_right = weights[2 * node], weights[2 * node + 1]
    weight_left, weight_right, count_left, count_right = all_left, all_right, 0, 0
    for e in range(leaves.shape[1]):
        up = leaf_levels[row, e] - level
        if up >= 0 and (leaves[row, e] >> (up + 1)) == node:
            if (leaves[row, e] >> up) & 1:
                right -= excluded_mass[b, e]
                weight_right -= excluded_weight[b, e]
                count_right += 1
            else:
                left -= excluded_mass[b, e]
                weight_left -= excluded_weight[b, e]
                count_left += 1
    left = max(max(left, floor[b] * max(weight_left, MIN_SHARE * all_left)), MIN_MASS)
    right = max(max(right, floor[b] * max(weight_right, MIN_SHARE * all_right)), MIN_MASS)
    if count_left and counts[2 * node] == count_left:
        left = 0.0
    if count_right and counts[2 * node + 1] == count_right:
        right = 0.0
    return left, right


@_inline
def _block_logits(
    block: int, b: int, logits: np.ndarray, masses: np.ndarray, state: tuple[Any, ...]
) -> tuple[int, float, float]:
    """Fills logits and masses, exp(logit - largest), of a block; returns their number, the largest logit, the sum."""
    _, _, queries, excluded, _, _, _, _, _, rows, offsets, block_size, leaf_rule = state
    start = block * block_size
    size = min(block_size, rows.shape[0] - start)
    for k in range(size):
        dot = np.float64(_dot(queries[b], rows[start + k]))
        if leaf_rule == LEAF_ABSOLUTE:
            dot = abs(dot)
        elif leaf_rule == LEAF_QUADRATIC:
            dot = np.log1p(dot * dot)
        logits[k] = dot + offsets[start + k]
    for e in range(excluded.shape[1]):
        if start <= excluded[b, e] < start + size:
            logits[excluded[b, e] - start] = -np.inf
    largest, total = -np.inf, 0.0
    for k in range(size):
        largest = max(largest, logits[k])
    for k in range(size):
        masses[k] = np.exp(logits[k] - largest) if logits[k] > -np.inf else 0.0
        total += masses[k]
    return size, largest, total


@_compile
def _draw(
    state: tuple[Any, ...],
    uniforms: np.ndarray,
    positions: np.ndarray,
    log_q: np.ndarray,
    start: int,
    stop: int,
) -> None:
    """Level by level for a group of queries: their walks do not wait for one another's memory."""
    phi, excluded, sums, block_size = state[0], state[3], state[6], state[11]
    blocks, num = sums.shape[0] // 2, uniforms.shape[1]
    group = min(stop - start, max(1, _GROUP // num))
    room = group * num
    u, score_left = np.empty((group, num)), np.empty(room)
    leaves, leaf_levels = np.empty((group, excluded.shape[1]), np.int64), np.empty((group, excluded.shape[1]), np.int64)
    # Nodes and the range of samples that pass through them: this level and the next in turn in the two halves, and in
    # the third part the leaves where walks have ended. A node's probability is path x exp(log_path): one log a path,
    # not one a level. A right child's score is its parent's less its sibling's, which spares half of the memory
    # read, unless too much of `scored`, the last score that came from a sum itself, would cancel.
    queries, nodes = np.empty(3 * room, np.int64), np.empty(3 * room, np.int64)
    firsts, lasts = np.empty(3 * room, np.int64), np.empty(3 * room, np.int64)
    paths, log_paths, scores, scoreds = np.empty(3 * room), np.empty(3 * room), np.empty(3 * room), np.empty(3 * room)
    logits, masses = np.empty(block_size), np.empty(block_size)
    for low in range(start, stop, group):
        here, there, count, level, done = 0, room, min(group, stop - low), 0, 2 * room
        for i in range(count):
            u[i] = uniforms[low + i]
            _mark_excluded(excluded[low + i], blocks, block_size, leaves[i], leaf_levels[i])
            score = np.float64(_dot(phi[low + i], sums[1]))
            k = i if blocks > 1 else done + i
            queries[k], nodes[k], firsts[k], lasts[k] = i, 1, 0, num
            paths[k], log_paths[k], scores[k], scoreds[k] = 1.0, 0.0, score, score
        if blocks == 1:
            done, count = done + count, 0
        while count:
            level += 1
            for i in range(count):
                score_left[i] = _dot(phi[low + queries[here + i]], sums[2 * nodes[here + i]])
            kept = there
            for i in range(here, here + count):
                query, node, first, last, path = queries[i], nodes[i], firsts[i], lasts[i], paths[i]
                of_left = score_left[i - here]
                of_right, scored = scores[i] - of_left, scoreds[i]
                if of_right < _LEAST_KEPT * scored or scored <= 0.0:
                    of_right = np.float64(_dot(phi[low + query], sums[2 * node + 1]))
                    scored = of_right
                left, right = _floored(node, level, of_left, of_right, low + query, query, leaves, leaf_levels, state)
                p = left / (left + right)
                middle = first
                while middle < last and u[query, middle] < p:
                    u[query, middle] = min(u[query, middle] / p, MAX_UNIFORM)
                    middle += 1
                for k in range(middle, last):
                    u[query, k] = min((u[query, k] - p) / (1 - p), MAX_UNIFORM)
                log_path = log_paths[i]
                if path < _LEAST_PRODUCT:
                    path, log_path = 1.0, log_path + np.log(path)
                if middle > first:
                    k = kept if 2 * node < blocks else done
                    queries[k], nodes[k], firsts[k], lasts[k] = query, 2 * node, first, middle
                    paths[k], log_paths[k], scores[k], scoreds[k] = path * p, log_path, of_left, of_left
                    if 2 * node < blocks:
                        kept += 1
                    else:
                        done += 1
                if middle < last:
                    k = kept if 2 * node + 1 < blocks else done
                    queries[k], nodes[k], firsts[k], lasts[k] = query, 2 * node + 1, middle, last
                    paths[k], log_paths[k], scores[k], scoreds[k] = path * (1 - p), log_path, of_right, scored
                    if 2 * node + 1 < blocks:
                        kept += 1
                    else:
                        done += 1
            here, there, count = there, here, kept - there
        for i in range(2 * room, done):
            query, block = queries[i], nodes[i] - blocks
            b = low + query
            size, largest, total = _block_logits(block, b, logits, masses, state)
            # Rounding may push a uniform past the end: it then means the last class that has any probability.
            end = size - 1
            while end > 0 and masses[end] == 0.0:
                end -= 1
            k, cdf, log_path = 0, masses[0], log_paths[i] + np.log(paths[i] / total) - largest
            for j in range(firsts[i], lasts[i]):
                while k < end and u[query, j] * total >= cdf:
                    k += 1
                    cdf += masses[k]
                positions[b, j] = block * block_size + k
                log_q[b, j] = log_path + logits[k]


@_compile
def _log_prob(state: tuple[Any, ...], positions: np.ndarray, log_q: np.ndarray, start: int, stop: int) -> None:
    phi, excluded, sums, block_size = state[0], state[3], state[6], state[11]
    blocks = sums.shape[0] // 2
    logits, masses = np.empty(block_size), np.empty(block_size)
    leaves, leaf_levels = np.empty((1, excluded.shape[1]), np.int64), np.empty((1, excluded.shape[1]), np.int64)
    for b in range(start, stop):
        _mark_excluded(excluded[b], blocks, block_size, leaves[0], leaf_levels[0])
        for i in range(positions.shape[1]):
            block, place = divmod(positions[b, i], block_size)
            _, largest, total = _block_logits(block, b, logits, masses, state)
            log_q[b, i] = -np.inf
            if logits[place] == -np.inf:
                continue
            value = logits[place] - largest - np.log(total)
            node = blocks + block
            level = _level(node)
            while node > 1:
                parent = node >> 1
                left, right = np.float64(_dot(phi[b], sums[2 * parent])), np.float64(_dot(phi[b], sums[2 * parent + 1]))
                left, right = _floored(parent, level, left, right, b, 0, leaves, leaf_levels, state)
                value += np.log((right if node & 1 else left) / (left + right))
                node, level = parent, level - 1
            log_q[b, i] = value


@_compile
def alias_table(probability: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's table by Vose's method: n P(i) = keep[i] + the sum of 1 - keep[j] over all j with alias[j] = i."""
    n = probability.shape[0]
    keep = probability * n / probability.sum()
    alias = np.arange(n)
    small, large = np.empty(n, np.int64), np.empty(n, np.int64)
    num_small, num_large = 0, 0
    for i in range(n):
        if keep[i] < 1.0:
            small[num_small] = i
            num_small += 1
        else:
            large[num_large] = i
            num_large += 1
    while num_small and num_large:
        num_small -= 1
        i, j = small[num_small], large[num_large - 1]
        alias[i] = j
        keep[j] -= 1.0 - keep[i]
        if keep[j] < 1.0:
            num_large -= 1
            small[num_small] = j
            num_small += 1
    # What is left differs from 1 by rounding alone.
    for i in range(num_small):
        keep[small[i]] = 1.0
    for i in range(num_large):
        keep[large[i]] = 1.0
    return keep, alias
