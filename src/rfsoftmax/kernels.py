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

from .block_kernels import (
    FIRST,
    LAST,
    LOG_PATH,
    NODE,
    PATH,
    QUERY,
    SCORE,
    SCORED,
    WALKS_TOGETHER,
    block_logits,
    draw_in_blocks,
    leaf_arrays,
    leaf_query,
    unturned,
)
from .row_kernels import distinct
from .threads import spread
from .tree import MAX_UNIFORM, MIN_MASS, MIN_SHARE, Query, Tree
from .vectors import (
    AHEAD,
    compiled,
    dot,
    embedded,
    inlined,
    lean,
    prefetch,
    prefetch_columns,
    prefetch_number,
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
    leaves = distinct(tree.num_blocks + positions.numpy() // tree.block_size)
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


@lean
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


@lean
def _floored(
    node: int,
    level: int,
    left: float,
    right: float,
    b: int,
    row: int,
    excluded_leaves: tuple[np.ndarray, ...],
    state: tuple[Any, ...],
) -> tuple[float, float]:
    """The masses of both children of a node for query b, as `tree._mass`, from their scores; the level is theirs.

    What b excludes is in that row of the leaves and levels that are excluded.
    """
    leaves, leaf_levels = excluded_leaves
    floor, excluded_mass, excluded_weight, weights, counts = state[1], state[4], state[5], state[7], state[8]
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


@lean
def _enter(
    walks: tuple[np.ndarray, ...], i: int, k: int, node: int, samples: tuple[int, int], path: float, score: float
) -> None:
    """Entry k: the walk of entry i, of its samples first to last, at a node below."""
    places, numbers = walks
    scored = numbers[i, SCORED] if node & 1 else score
    places[k, QUERY], places[k, NODE] = places[i, QUERY], node
    places[k, FIRST], places[k, LAST] = samples
    numbers[k, PATH], numbers[k, LOG_PATH], numbers[k, SCORE], numbers[k, SCORED] = (
        path,
        numbers[i, LOG_PATH],
        score,
        scored,
    )


@embedded
def _draw(
    state: tuple[Any, ...],
    uniforms: np.ndarray,
    positions: np.ndarray,
    log_q: np.ndarray,
    start: int,
    stop: int,
) -> None:
    """A group of queries at a time: first the walks of all, then the blocks where they have ended."""
    excluded, block_size, kind, num = state[3], state[12], state[0].dtype, uniforms.shape[1]
    group = min(stop - start, max(1, _GROUP // max(1, num)))
    room = group * num + 1  # for an entry that is written and not kept
    walks = (np.empty((3 * room, 4), np.int64), np.empty((3 * room, 4)))
    samples = (np.empty((group, num)), np.empty(group, np.int64), np.empty(group * num))
    leaves = (np.empty((group, excluded.shape[1]), np.int64), np.empty((group, excluded.shape[1]), np.int64))
    ends = np.empty(2, np.int64)
    x = np.empty((group, state[2].shape[1]), state[14].dtype)
    of_blocks = (WALKS_TOGETHER, block_size)
    logits, masses, cdf = np.empty(of_blocks, kind), np.empty(of_blocks, kind), np.empty(of_blocks)
    block = (x, np.empty(group), logits, masses, cdf, np.empty(WALKS_TOGETHER))
    for low in range(start, stop, group):
        _walk(low, min(group, stop - low), room, uniforms, state, walks, samples, leaves, ends)
        for i in range(min(group, stop - low)):
            block[1][i] = leaf_query(state[2][low + i], state, x[i])
        draw_in_blocks(low, 2 * room, ends[1], state, walks, samples, block, (positions, log_q))


@lean
def _walk(
    low: int,
    count: int,
    room: int,
    uniforms: np.ndarray,
    state: tuple[Any, ...],
    walks: tuple[np.ndarray, ...],
    samples: tuple[np.ndarray, ...],
    excluded_leaves: tuple[np.ndarray, ...],
    ends: np.ndarray,
) -> None:
    """Down to the leaves for `count` queries from `low` on; entries 2 room to ends[1] of `walks` are where they end.

    Level by level, in the order of the nodes: what several of them read is fetched once, and their walks do not wait
    for one another's memory. This level and the next are in turn in the two halves of the first 2 room entries.
    """
    phi, excluded, sums, weights = state[0], state[3], state[6], state[7]
    blocks, num = sums.shape[0] // 2, uniforms.shape[1]
    ahead = max(2, _FETCHED // (sums.shape[1] * sums.itemsize))
    (places, numbers), (u, turns, score_left), (leaves, leaf_levels) = walks, samples, excluded_leaves
    here, there, level, ends[1] = 0, room, 0, 2 * room
    for i in range(count):
        turns[i] = unturned(uniforms[low + i], u[i])
        _mark_excluded(excluded[low + i], blocks, state[12], leaves[i], leaf_levels[i])
        k, score = i if blocks > 1 else 2 * room + i, dot(phi[low + i], sums[1])
        places[k, QUERY], places[k, NODE], places[k, FIRST], places[k, LAST] = i, 1, 0, num
        numbers[k, PATH], numbers[k, LOG_PATH], numbers[k, SCORE], numbers[k, SCORED] = 1.0, 0.0, score, score
    if blocks == 1:
        ends[1], count = 2 * room + count, 0
    while count:
        level += 1
        for i in range(here, here + count):
            following = places[i + ahead, NODE] if i + ahead < here + count else 0
            if following and following != places[i + ahead - 1, NODE]:  # on its way while this node is scored
                prefetch(sums, 2 * following, 2 * following + 1)
                prefetch_number(weights, 2 * following)
            node = places[i, NODE]
            score_left[i - here] = dot(phi[low + places[i, QUERY]], sums[2 * node])
            if _cancels(numbers[i, SCORE] - score_left[i - here], numbers[i, SCORED]):
                prefetch(sums, 2 * node + 1, 2 * node + 2)
        ends[0], first = there, here
        while first < here + count:
            # All entries at one node: first their left children, then their right ones.
            node, last = places[first, NODE], first + 1
            while last < here + count and places[last, NODE] == node:
                last += 1
            left_end, right_end = 0 if 2 * node < blocks else 1, 0 if 2 * node + 1 < blocks else 1
            for i in range(first, last):
                of_left, begin, end = score_left[i - here], places[i, FIRST], places[i, LAST]
                of_right, p = _halves(i, of_left, level, low, state, walks, excluded_leaves)
                path, middle = numbers[i, PATH], _parted(u[places[i, QUERY]], begin, end, p)
                # Whether there is a child is not to be foreseen: it is written, and kept by moving on.
                _enter(walks, i, ends[left_end], 2 * node, (begin, middle), path * p, of_left)
                ends[left_end] += middle > begin
                places[i, FIRST], numbers[i, PATH], numbers[i, SCORE] = middle, path * (1 - p), of_right
            for i in range(first, last):
                begin, end = places[i, FIRST], places[i, LAST]
                _enter(walks, i, ends[right_end], 2 * node + 1, (begin, end), numbers[i, PATH], numbers[i, SCORE])
                ends[right_end] += end > begin
            first = last
        here, there, count = there, here, ends[0] - there


@lean
def _halves(
    i: int,
    of_left: float,
    level: int,
    low: int,
    state: tuple[Any, ...],
    walks: tuple[np.ndarray, ...],
    excluded_leaves: tuple[np.ndarray, ...],
) -> tuple[float, float]:
    """Of the children of entry i's node the right one's score, from the left one's, and the left one's probability."""
    phi, sums, (places, numbers) = state[0], state[6], walks
    query, node = places[i, QUERY], places[i, NODE]
    of_right = numbers[i, SCORE] - of_left
    if _cancels(of_right, numbers[i, SCORED]):
        of_right = np.float64(dot(phi[low + query], sums[2 * node + 1]))
        numbers[i, SCORED] = of_right
    if numbers[i, PATH] < _LEAST_PRODUCT:
        numbers[i, PATH], numbers[i, LOG_PATH] = 1.0, numbers[i, LOG_PATH] + np.log(numbers[i, PATH])
    left, right = _floored(node, level, of_left, of_right, low + query, query, excluded_leaves, state)
    return of_right, left / (left + right)


@lean
def _parted(u: np.ndarray, first: int, last: int, p: float) -> int:
    """Makes sorted uniforms first to last those of the children, of which the left one has probability p; returns where
    the right one's begin."""
    if last == first + 1:  # by far the most, and without a branch that cannot be foreseen
        right = u[first] >= p
        u[first] = min((u[first] - p if right else u[first]) / (1 - p if right else p), MAX_UNIFORM)
        return last - right
    while first < last and u[first] < p:
        u[first] = min(u[first] / p, MAX_UNIFORM)
        first += 1
    for j in range(first, last):
        u[j] = min((u[j] - p) / (1 - p), MAX_UNIFORM)
    return first


@embedded
def _log_prob(state: tuple[Any, ...], positions: np.ndarray, log_q: np.ndarray, start: int, stop: int) -> None:
    phi, excluded, sums, block_size = state[0], state[3], state[6], state[12]
    blocks = sums.shape[0] // 2
    x = np.empty(state[2].shape[1], state[14].dtype)
    logits, masses = np.empty(block_size, phi.dtype), np.empty(block_size, phi.dtype)
    leaves, leaf_levels = np.empty((1, excluded.shape[1]), np.int64), np.empty((1, excluded.shape[1]), np.int64)
    for b in range(start, stop):
        _mark_excluded(excluded[b], blocks, block_size, leaves[0], leaf_levels[0])
        unit = leaf_query(state[2][b], state, x)
        for i in range(positions.shape[1]):
            block, place = divmod(positions[b, i], block_size)
            _, largest, total = block_logits(block, b, x, unit, logits, masses, state)
            log_q[b, i] = -np.inf
            if logits[place] == -np.inf:
                continue
            value = logits[place] - largest - np.log(total)
            node = blocks + block
            level = _level(node)
            while node > 1:
                parent = node >> 1
                left, right = np.float64(dot(phi[b], sums[2 * parent])), np.float64(dot(phi[b], sums[2 * parent + 1]))
                left, right = _floored(parent, level, left, right, b, 0, (leaves, leaf_levels), state)
                value += np.log((right if node & 1 else left) / (left + right))
                node, level = parent, level - 1
            log_q[b, i] = value
