"""What happens in the blocks where walks down the tree end, compiled by numba: their classes' logits, and draws."""

from typing import Any

import numpy as np

from .block_dots import dots
from .tree import LARGEST_BYTE, LARGEST_SHORT, LARGEST_SUM, LEAF_ABSOLUTE, LEAF_QUADRATIC, LEAST_UNIT, Tree
from .vectors import exp, greatest, inlined, lean, prefetch_number, prefetch_once

# The columns of walks, an entry a row: the query, the node, and the range of its samples that pass through it;
QUERY, NODE, FIRST, LAST = range(4)
# the node's probability, which is path x exp(log_path): one log a path, not one a level; the node's score, and the last
# score before it that came from a sum itself. A right child's score is its parent's less its sibling's, which spares
# half of the memory read, unless too much of `scored` would cancel.
PATH, LOG_PATH, SCORE, SCORED = range(4)
# Which block is on its way to the cache, counted from the one that is drawn from.
_BLOCKS_AHEAD = 2


def leaf_arrays(tree: Tree) -> tuple[Any, ...]:
    """Of the kernels' state what concerns blocks; the last is an empty array of what queries are multiplied in."""
    factors = np.empty(0, np.int16) if tree.byte_rows else tree.rows.numpy()[:0, 0]
    return tree.rows.numpy(), tree.units.numpy(), tree.offsets.numpy(), tree.block_size, tree.leaf_rule, factors


@lean
def query_unit(query: np.ndarray, state: tuple[Any, ...]) -> float:
    """What `Tree.leaf_queries` has a query in whole multiples of; 0 if it leaves it as it is."""
    if state[10].shape[0] == 0:
        return 0.0
    largest = np.float64(LEAST_UNIT)
    for j in range(query.shape[0]):
        largest = max(largest, np.float64(abs(query[j])))
    return largest / min(LARGEST_SHORT, LARGEST_SUM // (LARGEST_BYTE * query.shape[0]))


@lean
def leaf_query(query: np.ndarray, state: tuple[Any, ...], out: np.ndarray) -> float:
    """out = query, which `Tree.leaf_queries` has seen, in the type that `dots` multiplies with rows, as multiples of
    what is returned."""
    unit = query_unit(query, state)
    for j in range(query.shape[0]):
        out[j] = np.rint(query[j] / unit) if unit else query[j]
    return unit if unit else 1.0


@lean
def block_logits(
    block: int,
    b: int,
    x: np.ndarray,
    unit: float,
    logits: np.ndarray,
    masses: np.ndarray,
    state: tuple[Any, ...],
    following: int,
) -> tuple[int, float, float]:
    """Fills logits and masses, exp(logit - largest), of a block for query b, which `leaf_query` made x and unit of;
    returns their number, the largest logit, the sum. Three quarters of `following`, if it is another block, are on
    their way to the cache meanwhile."""
    rows, block_size = state[9], state[12]
    start = block * block_size
    size, other = min(block_size, rows.shape[0] - start), following != block
    if other:
        _fetch(following, 0, state)
    dots(x, rows, start, size, logits)
    if other:
        _fetch(following, 1, state)
    largest, total = _block_masses(start, size, b, unit, logits, masses, state)
    if other:
        _fetch(following, 2, state)
    return size, largest, total


@lean
def _fetch(block: int, quarter: int, state: tuple[Any, ...]) -> None:
    """Have a quarter of a block's rows on their way, with the first its units and offsets. As much as memory brings
    while a step of the work is done: with all at once the work would wait, and memory afterwards."""
    rows, units, offsets, size = state[9], state[10], state[11], state[12]
    first, num = block * size, rows.shape[0]
    if quarter == 0:
        for k in range(first, min(first + size, num), 16):
            prefetch_number(offsets, k)
            if units.shape[0]:
                prefetch_number(units, k)
    prefetch_once(rows, min(first + quarter * size // 4, num), min(first + (quarter + 1) * size // 4, num))


@lean
def _block_masses(
    start: int, size: int, b: int, unit: float, logits: np.ndarray, masses: np.ndarray, state: tuple[Any, ...]
) -> tuple[float, float]:
    """Makes logits of the dot products in `logits`, and fills masses; returns the largest logit and the sum."""
    excluded, leaf_rule = state[3], state[13]
    # Slices: an index that might be negative, for all that a compiler knows, is not read by whole vectors.
    units, offsets = state[10][start : start + size], state[11][start : start + size]
    if units.shape[0]:
        scale = units.dtype.type(unit)
        for k in range(size):
            logits[k] *= scale * units[k]
    if leaf_rule == LEAF_ABSOLUTE:
        for k in range(size):
            logits[k] = abs(logits[k])
    elif leaf_rule == LEAF_QUADRATIC:
        for k in range(size):
            logits[k] = np.log1p(logits[k] * logits[k])
    for k in range(size):
        logits[k] += offsets[k]
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
def _searched(cdf: np.ndarray, end: int, mass: float) -> int:
    """How many of cdf[:end] are at most `mass`: all are looked at, which takes less than to stop early."""
    found = 0
    for k in range(end):
        found += cdf[k] <= mass
    return found


@lean
def draw_in_blocks(
    low: int,
    first: int,
    end: int,
    state: tuple[Any, ...],
    walks: tuple[np.ndarray, ...],
    samples: tuple[np.ndarray, ...],
    room: tuple[np.ndarray, ...],
    drawn: tuple[np.ndarray, ...],
) -> None:
    """Draws of the walks that have ended, entries first to end, in the order of their blocks."""
    sums = state[6]
    (places, numbers), (u, turns, _) = walks, samples
    (x, x_units, logits, masses, cdf), (positions, log_q) = room, drawn
    blocks, num = sums.shape[0] // 2, u.shape[1]
    each = positions.shape[1] // max(1, num)
    for i in range(first, end):
        query, block = places[i, QUERY], places[i, NODE] - blocks
        b, following = low + query, places[i + _BLOCKS_AHEAD, NODE] - blocks if i + _BLOCKS_AHEAD < end else block
        size, largest, total = block_logits(block, b, x[query], x_units[query], logits, masses, state, following)
        # Rounding may push a uniform past the end: it then means the last class that has any probability.
        last = size - 1
        while last > 0 and masses[last] == 0.0:
            last -= 1
        summed = 0.0
        for k in range(last + 1):
            summed += masses[k]
            cdf[k] = summed
        log_path = numbers[i, LOG_PATH] + np.log(numbers[i, PATH] / total) - largest
        for j in range(places[i, FIRST], places[i, LAST]):
            place = each * turned(j, turns[query], num)
            for e in range(each):
                v = u[query, j] + e / each
                k = _searched(cdf, last, (v if v < 1.0 else v - 1.0) * total)
                positions[b, place + e] = block * state[12] + k
                log_q[b, place + e] = log_path + logits[k]
        if following != block:
            _fetch(following, 3, state)


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
