"""Rows of a weight by their ids, compiled by numba: gathered, and compared with the copies that a tree has."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .threads import spread
from .tree import Tree, mean_rounding
from .vectors import AHEAD, compiled, dot, lean, number, prefetch, prefetch_number

_NORMALIZE_EPS = 1e-12  # the default of F.normalize
# Of a key for sorting: where its id stands in a list. The rest is its position.
_PLACE_BITS = 31


class Logits(NamedTuple):
    """What makes logits of rows: tau, and whether the rows are to be brought to unit length."""

    tau: float
    normalize: bool


def shifts(
    tree: Tree, ids: Tensor, position: Tensor, weight: Tensor, bias: tuple[Tensor, Tensor] | None, logits: Logits
) -> Tensor:
    """How far the logits of ids (k,) may have moved (k,): tau |c' - c| + |b' - b|, of weight (n, d), the tree's rows
    and both biases (n,), new by id and old by position; `position` (n + 1,) has that of each id.

    It is NaN or inf where weight or bias is.
    """
    moved = tree.offsets.new_empty(len(ids))
    none = tree.offsets[:0]
    new_bias, old_bias = (t.detach().contiguous().numpy() for t in bias or (none, none))
    source = (weight.detach().contiguous().numpy(), tree.rows.numpy(), tree.units.numpy(), new_bias, old_bias)
    rounding = mean_rounding(weight.shape[1])
    arguments = (source, ids.numpy(), position.numpy(), logits, rounding, moved.numpy())
    spread(_shifts, arguments, len(ids), 3 * weight.shape[1])
    return moved


def past(ids: Tensor, shifts: Tensor, tolerance: float, position: Tensor) -> tuple[float, Tensor, Tensor]:
    """The mean of shifts (k,); of those of ids (k,) that have a greater one than the tolerance the positions, ascending
    and each once, and the ids."""
    keys = np.empty(len(ids), np.int64)
    total, count = _past(ids.numpy(), shifts.numpy(), tolerance, position.numpy(), keys)
    keys = keys[:count]
    keys.sort()
    positions, which = np.empty(count, np.int64), np.empty(count, np.int64)
    count = _unpacked(ids.numpy(), keys, positions, which)
    return total / len(ids), torch.from_numpy(positions[:count]), torch.from_numpy(which[:count])


def distinct(ids: np.ndarray) -> np.ndarray:
    """ids (k,) in ascending order, each once: `np.unique`, several times faster, the more if they ascend already."""
    out = np.empty_like(ids)
    count = _distinct(ids, out)
    return out[: _distinct(np.sort(ids), out) if count < 0 else count]


def gathered(weight: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """The rows (k, d) of ids (k,), of unit length if `normalize`, in one pass: `F.normalize(weight[ids], dim=1)`."""
    rows = weight.new_empty(len(ids), weight.shape[1])
    source, i, out = weight.detach().numpy(), ids.numpy(), rows.numpy()
    spread(_gathered, (source, i, normalize, out), len(ids), 2 * weight.shape[1])
    return rows


@lean
def _shifts(
    source: tuple[np.ndarray, ...],
    ids: np.ndarray,
    position: np.ndarray,
    logits: Logits,
    rounding: float,
    out: np.ndarray,
    start: int,
    stop: int,
) -> None:
    weight, rows, units, new_bias, old_bias = source
    for k in range(start, stop):
        if k + 2 * AHEAD < stop:
            prefetch_number(position, ids[k + 2 * AHEAD])
        if k + AHEAD < stop:
            following = ids[k + AHEAD]
            prefetch(weight, following, following + 1)
            prefetch(rows, position[following], position[following] + 1)
            if units.shape[0]:
                prefetch_number(units, position[following])
        place = position[ids[k]]
        new, old = weight[ids[k]], rows[place]
        scale = 1 / max(np.sqrt(dot(new, new)), _NORMALIZE_EPS) if logits.normalize else 1.0
        scale = weight.dtype.type(scale)
        unit = units[place] if units.shape[0] else weight.dtype.type(1.0)
        total = new[0] - new[0]
        for j in range(new.shape[0]):
            step = scale * new[j] - unit * number(old[j])
            total += step * step
        if units.shape[0]:
            total -= rounding * unit * unit
            if total < 0.0:
                total = 0.0
        moved = logits.tau * np.sqrt(total)
        if new_bias.shape[0]:
            moved += abs(new_bias[ids[k]] - old_bias[place])
        out[k] = moved


@compiled
def _past(
    ids: np.ndarray, shifts: np.ndarray, tolerance: float, position: np.ndarray, keys: np.ndarray
) -> tuple[float, int]:
    """The sum of shifts, and how many of ids are past the tolerance: so many keys get position and place in ids."""
    total, count = 0.0, 0
    for k in range(ids.shape[0]):
        if shifts[k] > tolerance:
            keys[count] = (np.int64(position[ids[k]]) << _PLACE_BITS) | k
            count += 1
        total += shifts[k]
    return total, count


@compiled
def _unpacked(ids: np.ndarray, keys: np.ndarray, positions: np.ndarray, which: np.ndarray) -> int:
    """Fills in positions and ids of ascending keys (k,), a position once; returns how many those are."""
    count = 0
    for key in keys:
        if count == 0 or key >> _PLACE_BITS != positions[count - 1]:
            positions[count], which[count] = key >> _PLACE_BITS, ids[key & ((1 << _PLACE_BITS) - 1)]
            count += 1
    return count


@compiled
def _distinct(ascending: np.ndarray, out: np.ndarray) -> int:
    """Fills in the numbers that differ from the one before; returns how many they are, -1 if they do not ascend."""
    count = 0
    for k in range(ascending.shape[0]):
        if k and ascending[k] < ascending[k - 1]:
            return -1
        if k == 0 or ascending[k] != ascending[k - 1]:
            out[count] = ascending[k]
            count += 1
    return count


@lean
def given_length(row: np.ndarray, normalize: bool, out: np.ndarray) -> None:
    """out = row, of unit length if `normalize`: `F.normalize(row, dim=0)`."""
    length = row.dtype.type(max(np.sqrt(dot(row, row)), _NORMALIZE_EPS)) if normalize else row.dtype.type(1.0)
    for j in range(row.shape[0]):
        out[j] = row[j] / length


@lean
def _gathered(weight: np.ndarray, ids: np.ndarray, normalize: bool, out: np.ndarray, start: int, stop: int) -> None:
    for k in range(start, stop):
        if k + AHEAD < stop:
            prefetch(weight, ids[k + AHEAD], ids[k + AHEAD] + 1)
        given_length(weight[ids[k]], normalize, out[k])
