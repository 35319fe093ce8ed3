"""The functions of `tree.py` for CPU tensors, compiled by numba: same signatures, same results.

A kernel scores a node once per query, however many samples pass through it: the samples of one query that go left are
a prefix of its sorted uniforms, so the walk carries ranges of samples instead of samples. Uniforms that are sorted but
for where they begin will do (`unturned`), and the samples come out in their order. Kernels own no random state
and release the GIL; queries (or columns, for updates) are spread over torch's threads, with which numba's own clash.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .row_kernels import distinct
from .threads import spread
from .tree import LEAF_ABSOLUTE, LEAF_QUADRATIC, MAX_UNIFORM, MIN_MASS, MIN_SHARE, Query, Tree
from .vectors import (
    AHEAD,
    compiled,
    dot,
    dots,
    embedded,
    exp,
    greatest,
    inlined,
    prefetch,
    prefetch_columns,
    prefetch_number,
    two_dots,
)

# A class that has grown since the rebuild counts for at most this much more than the largest then, lest sums overflow.
MAX_LOG_FACTOR = 60.0
# Products of probabilities are turned into logs before they can underflow.
_LEAST_PRODUCT = 1e-200
# A score by subtraction is at least this share of what it was subtracted from, and its rounding error thus small.
_LEAST_KEPT = 0.05
# Walks at once: the more, the more of them read the same node and block one after another.
_GROUP = 1 << 15
# Bytes of sums on their way at once, ahead of the node that is scored; at least two nodes.
_FETCHED = 4096


def add(tree: Tree, positions: Tensor, psi: Tensor, weight: Tensor) -> None:
    leaves = tree.leaf_of(positions).numpy()
    _add(tree.sums.numpy(), tree.weights.numpy(), leaves, psi.contiguous().numpy(), weight.numpy())


def renew(tree: Tree, positions: Tensor) -> None:
    leaves = distinct(tree.leaf_of(positions)).numpy()
    sums, weights = tree.sums.numpy(), tree.weights.numpy()
    spread(_renew, (sums, weights, leaves), sums.shape[1], len(leaves) * tree.depth, 1)


def draw(tree: Tree, query: Query, uniforms: Tensor, each: int = 1) -> tuple[Tensor, Tensor]:
    positions = torch.empty(len(uniforms), each * uniforms.shape[1], dtype=torch.int64)
    log_q = torch.empty(positions.shape, dtype=torch.float64)
    state, u, p, q = _arrays(tree, query), uniforms.numpy(), positions.numpy(), log_q.numpy()
    spread(_draw, (state, u, p, q), len(u), u.shape[1] * path_cost(tree), 1)
    return positions, log_q


def log_prob(tree: Tree, query: Query, positions: Tensor) -> tuple[Tensor, Tensor]:
    log_q = torch.empty(positions.shape, dtype=torch.float64)
    state, p, q = _arrays(tree, query), positions.contiguous().numpy(), log_q.numpy()
    spread(_log_prob, (state, p, q), len(p), p.shape[1] * path_cost(tree))
    return positions, log_q


def path_cost(tree: Tree) -> int:
    """About how many multiplications it takes to walk one path and score its block."""
    return tree.depth * tree.sums.shape[1] + tree.block_size * tree.rows.shape[1]


def _arrays(tree: Tree, query: Query) -> tuple[Any, ...]:
    """Tree and query as numba takes them: one tuple, unpacked by `_draw` and `_log_prob`."""
    parts = [t.contiguous().numpy() for t in query]
    state = (tree.sums, tree.weights, tree.counts)
    return (*parts, *(t.numpy() for t in state), *leaf_arrays(tree))


def leaf_arrays(tree: Tree) -> tuple[Any, ...]:
    return tree.rows.numpy(), tree.units.numpy(), tree.offsets.numpy(), tree.block_size, tree.leaf_rule


@embedded
def _level(node: int) -> int:
    level = 0
    while node > 1:
        node >>= 1
        level += 1
    return level


@compiled
def _add(sums: np.ndarray, weights: np.ndarray, leaves: np.ndarray, psi: np.ndarray, weight: np.ndarray) -> None:
    for i in range(leaves.shape[0]):
        target, source = sums[leaves[i]], psi[i]
        for j in range(target.shape[0]):
            target[j] += source[j]
        weights[leaves[i]] += weight[i]


@embedded
def _renew(sums: np.ndarray, weights: np.ndarray, leaves: np.ndarray, start: int, stop: int) -> None:
    """Columns start..stop of all nodes above leaves, ascending; the thread with the first column does the weights."""
    blocks, count = sums.shape[0] // 2, leaves.shape[0]
    nodes = leaves.copy()
    for level in range(_level(2 * blocks - 1) - 1, -1, -1):
        # Leaves lie on two levels. Nodes below this one step up; changed leaves on it come after those parents.
        kept = 0
        here = np.searchsorted(nodes[:count], 2 << level)
        merged = np.concatenate((nodes[here:count] >> 1, nodes[:here]))
        for i in range(merged.shape[0]):
            node = merged[i]
            if i + AHEAD < merged.shape[0] and merged[i + AHEAD] < blocks:
                prefetch_columns(sums, 2 * merged[i + AHEAD], start, stop)
                prefetch_columns(sums, 2 * merged[i + AHEAD] + 1, start, stop)
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


@inlined
def unturned(uniforms: np.ndarray, out: np.ndarray) -> int:
    """out (m,) gets uniforms (m,), sorted but for where they begin, sorted; returns the place of the least."""
    num, turn = uniforms.shape[0], 0
    for i in range(1, num):
        if uniforms[i] < uniforms[i - 1]:
            turn = i
    for i in range(num):
        out[i] = uniforms[turned(i, turn, num)]
    return turn


@inlined
def turned(i: int, turn: int, num: int) -> int:
    return i + turn if i + turn < num else i + turn - num


@inlined
def _cancels(difference: float, scored: float) -> bool:
    """Whether a score by subtraction from `scored` may have lost too much to rounding."""
    return difference < _LEAST_KEPT * scored or scored <= 0.0


@inlined
def _mark_excluded(excluded: np.ndarray, blocks: int, block_size: int, leaves: np.ndarray, levels: np.ndarray) -> None:
    """The leaf and the level of each excluded position; -1 has a level above every node and so no ancestor."""
    for e in range(excluded.shape[0]):
        leaves[e], levels[e] = 0, -1
        if excluded[e] >= 0:
            leaves[e] = blocks + excluded[e] // block_size
            levels[e] = _level(leaves[e])


@inlined
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
    _, floor, _, _, excluded_mass, excluded_weight, _, weights, counts, _, _, _, _, _ = state
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


@inlined
def _block_logits(
    block: int, b: int, logits: np.ndarray, masses: np.ndarray, state: tuple[Any, ...], following: int
) -> tuple[int, float, float]:
    """Fills logits and masses, exp(logit - largest), of a block; returns their number, the largest logit, the sum."""
    queries, rows = state[2], state[9]
    start, size, ahead = _block_rows(block, state, following)
    dots(queries[b], rows, start, size, ahead, logits)
    largest, total = _block_masses(start, size, b, logits, masses, state)
    return size, largest, total


@inlined
def _block_rows(block: int, state: tuple[Any, ...], following: int) -> tuple[int, int, int]:
    """The first row of a block, their number, and how far from them those of the block lie that follows.

    Row by row, these are to be fetched meanwhile; all at once they would drive out this block's.
    """
    rows, units, offsets, block_size = state[9], state[10], state[11], state[12]
    start = block * block_size
    size = min(block_size, rows.shape[0] - start)
    ahead = (following - block) * block_size
    if start + ahead + size > rows.shape[0]:
        ahead = 0
    for k in range(0, size if ahead else 0, 16):
        prefetch_number(offsets, start + ahead + k)
        if units.shape[0]:
            prefetch_number(units, start + ahead + k)
    return start, size, ahead


@inlined
def _block_masses(
    start: int, size: int, b: int, logits: np.ndarray, masses: np.ndarray, state: tuple[Any, ...]
) -> tuple[float, float]:
    """Makes logits of the dot products in `logits`, and fills masses; returns the largest logit and the sum."""
    excluded, units, offsets, leaf_rule = state[3], state[10], state[11], state[13]
    if units.shape[0]:
        for k in range(size):
            logits[k] *= units[start + k]
    if leaf_rule == LEAF_ABSOLUTE:
        for k in range(size):
            logits[k] = abs(logits[k])
    elif leaf_rule == LEAF_QUADRATIC:
        for k in range(size):
            logits[k] = np.log1p(logits[k] * logits[k])
    for k in range(size):
        logits[k] += offsets[start + k]
    for e in range(excluded.shape[1]):
        if start <= excluded[b, e] < start + size:
            logits[excluded[b, e] - start] = -np.inf
    largest, total = greatest(logits, size), logits.dtype.type(0.0)
    exp(logits, largest, masses, size)
    for e in range(excluded.shape[1]):
        if start <= excluded[b, e] < start + size:
            masses[excluded[b, e] - start] = 0.0
    for k in range(size):
        total += masses[k]
    return np.float64(largest), np.float64(total)


@inlined
def _enter(
    walk: tuple[np.ndarray, ...], i: int, k: int, node: int, samples: tuple[int, int], path: float, score: float
) -> None:
    """Entry k: the walk of entry i, of its samples first to last, at a node below."""
    queries, nodes, firsts, lasts, paths, log_paths, scores, scoreds = walk
    queries[k], nodes[k], log_paths[k] = queries[i], node, log_paths[i]
    firsts[k], lasts[k] = samples
    paths[k], scores[k], scoreds[k] = path, score, scoreds[i] if node & 1 else score


@inlined
def _searched(cdf: np.ndarray, end: int, mass: float) -> int:
    """How many of cdf[:end] are at most `mass`: all are looked at, which takes less than to stop early."""
    found = 0
    for k in range(end):
        found += cdf[k] <= mass
    return found


@embedded
def _draw(
    state: tuple[Any, ...],
    uniforms: np.ndarray,
    positions: np.ndarray,
    log_q: np.ndarray,
    start: int,
    stop: int,
) -> None:
    """Level by level for a group of queries, in the order of the nodes: what several of them read is fetched once, and
    their walks do not wait for one another's memory."""
    phi, leaf_queries, excluded, sums, weights, rows = state[0], state[2], state[3], state[6], state[7], state[9]
    block_size = state[12]
    blocks, num = sums.shape[0] // 2, uniforms.shape[1]
    each = positions.shape[1] // max(1, num)
    group = min(stop - start, max(1, _GROUP // num))
    room, ahead = group * num, max(2, _FETCHED // (sums.shape[1] * sums.itemsize))
    u, turns, score_left = np.empty((group, num)), np.empty(group, np.int64), np.empty(room)
    leaves, leaf_levels = np.empty((group, excluded.shape[1]), np.int64), np.empty((group, excluded.shape[1]), np.int64)
    # Nodes and the range of samples that pass through them: this level and the next in turn in the two halves, and in
    # the third part the leaves where walks have ended. A node's probability is path x exp(log_path): one log a path,
    # not one a level. A right child's score is its parent's less its sibling's, which spares half of the memory
    # read, unless too much of `scored`, the last score that came from a sum itself, would cancel.
    queries, nodes = np.empty(3 * room, np.int64), np.empty(3 * room, np.int64)
    firsts, lasts = np.empty(3 * room, np.int64), np.empty(3 * room, np.int64)
    paths, log_paths, scores, scoreds = np.empty(3 * room), np.empty(3 * room), np.empty(3 * room), np.empty(3 * room)
    walk = (queries, nodes, firsts, lasts, paths, log_paths, scores, scoreds)
    # Where the next entry goes: of an inner node on the next level, or of a leaf.
    ends = np.empty(2, np.int64)
    logits, masses, cdf = np.empty((2, block_size), phi.dtype), np.empty(block_size, phi.dtype), np.empty(block_size)
    for low in range(start, stop, group):
        here, there, count, level = 0, room, min(group, stop - low), 0
        ends[1] = 2 * room
        for i in range(count):
            turns[i] = unturned(uniforms[low + i], u[i])
            _mark_excluded(excluded[low + i], blocks, block_size, leaves[i], leaf_levels[i])
            k = i if blocks > 1 else 2 * room + i
            queries[k], nodes[k], firsts[k], lasts[k], paths[k], log_paths[k] = i, 1, 0, num, 1.0, 0.0
            scores[k] = dot(phi[low + i], sums[1])
            scoreds[k] = scores[k]
        if blocks == 1:
            ends[1], count = 2 * room + count, 0
        while count:
            level += 1
            for i in range(count):
                following = nodes[here + i + ahead] if i + ahead < count else 0
                if following and following != nodes[here + i + ahead - 1]:  # on its way while this node is scored
                    prefetch(sums, 2 * following, 2 * following + 1)
                    prefetch_number(weights, 2 * following)
                score_left[i] = dot(phi[low + queries[here + i]], sums[2 * nodes[here + i]])
                if _cancels(scores[here + i] - score_left[i], scoreds[here + i]):
                    prefetch(sums, 2 * nodes[here + i] + 1, 2 * nodes[here + i] + 2)
            ends[0], first = there, here
            while first < here + count:
                # All entries at one node: first their left children, then their right ones.
                node, last = nodes[first], first
                left_end, right_end = 0 if 2 * node < blocks else 1, 0 if 2 * node + 1 < blocks else 1
                while last < here + count and nodes[last] == node:
                    i, query = last, queries[last]
                    of_left = score_left[i - here]
                    of_right = scores[i] - of_left
                    if _cancels(of_right, scoreds[i]):
                        of_right = np.float64(dot(phi[low + query], sums[2 * node + 1]))
                        scoreds[i] = of_right
                    masses_of = _floored(node, level, of_left, of_right, low + query, query, leaves, leaf_levels, state)
                    p = masses_of[0] / (masses_of[0] + masses_of[1])
                    middle = firsts[i]
                    while middle < lasts[i] and u[query, middle] < p:
                        u[query, middle] = min(u[query, middle] / p, MAX_UNIFORM)
                        middle += 1
                    for j in range(middle, lasts[i]):
                        u[query, j] = min((u[query, j] - p) / (1 - p), MAX_UNIFORM)
                    if paths[i] < _LEAST_PRODUCT:
                        paths[i], log_paths[i] = 1.0, log_paths[i] + np.log(paths[i])
                    if middle > firsts[i]:
                        _enter(walk, i, ends[left_end], 2 * node, (firsts[i], middle), paths[i] * p, of_left)
                        ends[left_end] += 1
                    firsts[i], paths[i], scores[i] = middle, paths[i] * (1 - p), of_right
                    last += 1
                for i in range(first, last):
                    if firsts[i] < lasts[i]:
                        _enter(walk, i, ends[right_end], 2 * node + 1, (firsts[i], lasts[i]), paths[i], scores[i])
                        ends[right_end] += 1
                first = last
            here, there, count = there, here, ends[0] - there
        first = 2 * room
        while first < ends[1]:
            # Two walks that have ended at one block score its rows together.
            node, last = nodes[first], first + 1
            if last < ends[1] and nodes[last] == node:
                last += 1
            following = nodes[last] - blocks if last < ends[1] else node - blocks
            block_start, size, rows_ahead = _block_rows(node - blocks, state, following)
            of_one, of_other = leaf_queries[low + queries[first]], leaf_queries[low + queries[last - 1]]
            if last == first + 2:
                two_dots(of_one, of_other, rows, block_start, size, rows_ahead, logits)
            else:
                dots(of_one, rows, block_start, size, rows_ahead, logits[0])
            for i in range(first, last):
                query, own = queries[i], logits[i - first]
                b = low + query
                largest, total = _block_masses(block_start, size, b, own, masses, state)
                # Rounding may push a uniform past the end: it then means the last class that has any probability.
                end = size - 1
                while end > 0 and masses[end] == 0.0:
                    end -= 1
                summed = 0.0
                for k in range(end + 1):
                    summed += masses[k]
                    cdf[k] = summed
                log_path = log_paths[i] + np.log(paths[i] / total) - largest
                for j in range(firsts[i], lasts[i]):
                    place = each * turned(j, turns[query], num)
                    for e in range(each):
                        v = u[query, j] + e / each
                        k = _searched(cdf, end, (v if v < 1.0 else v - 1.0) * total)
                        positions[b, place + e] = block_start + k
                        log_q[b, place + e] = log_path + own[k]
            first = last


@embedded
def _log_prob(state: tuple[Any, ...], positions: np.ndarray, log_q: np.ndarray, start: int, stop: int) -> None:
    phi, excluded, sums, block_size = state[0], state[3], state[6], state[12]
    blocks = sums.shape[0] // 2
    logits, masses = np.empty(block_size, phi.dtype), np.empty(block_size, phi.dtype)
    leaves, leaf_levels = np.empty((1, excluded.shape[1]), np.int64), np.empty((1, excluded.shape[1]), np.int64)
    for b in range(start, stop):
        _mark_excluded(excluded[b], blocks, block_size, leaves[0], leaf_levels[0])
        for i in range(positions.shape[1]):
            block, place = divmod(positions[b, i], block_size)
            _, largest, total = _block_logits(block, b, logits, masses, state, block)
            log_q[b, i] = -np.inf
            if logits[place] == -np.inf:
                continue
            value = logits[place] - largest - np.log(total)
            node = blocks + block
            level = _level(node)
            while node > 1:
                parent = node >> 1
                left, right = np.float64(dot(phi[b], sums[2 * parent])), np.float64(dot(phi[b], sums[2 * parent + 1]))
                left, right = _floored(parent, level, left, right, b, 0, leaves, leaf_levels, state)
                value += np.log((right if node & 1 else left) / (left + right))
                node, level = parent, level - 1
            log_q[b, i] = value
