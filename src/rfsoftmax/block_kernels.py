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
# Walks whose blocks are drawn from together, stage by stage: else each stage would wait for the one before.
WALKS_TOGETHER = 2
# Which block is on its way to the cache, counted from the one that is worked on.
_BLOCKS_AHEAD = 3


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
    block: int, b: int, x: np.ndarray, unit: float, logits: np.ndarray, masses: np.ndarray, state: tuple[Any, ...]
) -> tuple[int, float, float]:
    """Fills logits and masses, exp(logit - largest), of a block for query b, which `leaf_query` made x and unit of;
    returns their number, the largest logit, the sum."""
    start, size = _extent(block, state)
    dots(x, state[9], start, size, logits)
    largest = _finish(start, size, b, unit, logits, state)
    _fill_masses(start, size, b, logits, largest, masses, state)
    total = masses.dtype.type(0.0)
    for k in range(size):
        total += masses[k]
    return size, largest, np.float64(total)


@lean
def _extent(block: int, state: tuple[Any, ...]) -> tuple[int, int]:
    """Where the rows of a block begin, and how many they are."""
    start = block * state[12]
    return start, min(state[12], state[9].shape[0] - start)


@lean
def _fetch(block: int, quarter: int, state: tuple[Any, ...]) -> None:
    """Have a quarter of a block's rows on their way, with the first its units and offsets; of -1, nothing. As much as
    memory brings while a stage of the work is done: with all at once the work would wait, and memory afterwards."""
    if block < 0:
        return
    rows, units, offsets, size = state[9], state[10], state[11], state[12]
    first, num = block * size, rows.shape[0]
    if quarter == 0:
        for k in range(first, min(first + size, num), 16):
            prefetch_number(offsets, k)
            if units.shape[0]:
                prefetch_number(units, k)
    prefetch_once(rows, min(first + quarter * size // 4, num), min(first + (quarter + 1) * size // 4, num))


@lean
def _finish(start: int, size: int, b: int, unit: float, logits: np.ndarray, state: tuple[Any, ...]) -> float:
    """Makes logits of the dot products in `logits`; returns the largest."""
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
    return np.float64(greatest(logits, size))


@lean
def _fill_masses(
    start: int, size: int, b: int, logits: np.ndarray, largest: float, masses: np.ndarray, state: tuple[Any, ...]
) -> None:
    excluded = state[3]
    exp(logits, largest, masses, size)
    for e in range(excluded.shape[1]):
        if start <= excluded[b, e] < start + size:
            masses[excluded[b, e] - start] = 0.0


@inlined
def _searched(cdf: np.ndarray, mass: float) -> int:
    """How many of cdf are at most `mass`: all are looked at, which takes less than to stop early."""
    found = 0
    for k in range(cdf.shape[0]):
        found += cdf[k] <= mass
    return found


@lean
def _following(places: np.ndarray, i: int, end: int, blocks: int) -> int:
    """The block of entry i, -1 if there is none or the entry before has it too."""
    if i < end and places[i, NODE] != places[i - 1, NODE]:
        return places[i, NODE] - blocks
    return -1


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
    """Draws of the walks that have ended, entries first to end, in the order of their blocks.

    With each of four stages a quarter of the block that is `_BLOCKS_AHEAD` is sent for.
    """
    (places, numbers), (u, turns, _) = walks, samples
    (x, x_units, logits, masses, cdf, largest), (positions, log_q) = room, drawn
    blocks, num = state[6].shape[0] // 2, u.shape[1]
    each = positions.shape[1] // max(1, num)
    for i in range(first, min(first + _BLOCKS_AHEAD, end)):
        for quarter in range(4):
            _fetch(places[i, NODE] - blocks, quarter, state)
    for begin in range(first, end, WALKS_TOGETHER):
        stop = min(begin + WALKS_TOGETHER, end)
        for i in range(begin, stop):
            _fetch(_following(places, i + _BLOCKS_AHEAD, end, blocks), 0, state)
            start, size = _extent(places[i, NODE] - blocks, state)
            dots(x[places[i, QUERY]], state[9], start, size, logits[i - begin])
        for i in range(begin, stop):
            _fetch(_following(places, i + _BLOCKS_AHEAD, end, blocks), 1, state)
            (start, size), query = _extent(places[i, NODE] - blocks, state), places[i, QUERY]
            largest[i - begin] = _finish(start, size, low + query, x_units[query], logits[i - begin], state)
        for i in range(begin, stop):
            _fetch(_following(places, i + _BLOCKS_AHEAD, end, blocks), 2, state)
            (start, size), b = _extent(places[i, NODE] - blocks, state), low + places[i, QUERY]
            _fill_masses(start, size, b, logits[i - begin], largest[i - begin], masses[i - begin], state)
        for i in range(begin, stop):
            _fetch(_following(places, i + _BLOCKS_AHEAD, end, blocks), 3, state)
            _, size = _extent(places[i, NODE] - blocks, state)
            mass, sums, summed = masses[i - begin], cdf[i - begin], 0.0
            for k in range(size):
                summed += mass[k]
                sums[k] = summed
            for k in range(size, sums.shape[0]):
                sums[k] = summed
        for i in range(begin, stop):
            query, (start, size), sums = places[i, QUERY], _extent(places[i, NODE] - blocks, state), cdf[i - begin]
            total = sums[size - 1]
            log_path = numbers[i, LOG_PATH] + np.log(numbers[i, PATH] / total) - largest[i - begin]
            for j in range(places[i, FIRST], places[i, LAST]):
                place = each * turned(j, turns[query], num)
                for e in range(each):
                    v = u[query, j] + e / each
                    # What is below 1, times total, is below total, rounded too: a class is found, and one with mass.
                    k = _searched(sums, (v if v < 1.0 else v - 1.0) * total)
                    positions[low + query, place + e] = start + k
                    log_q[low + query, place + e] = log_path + logits[i - begin, k]


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
