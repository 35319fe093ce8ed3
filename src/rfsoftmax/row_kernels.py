"""Rows of a weight by their ids, compiled by numba: gathered, and compared with the copies that a tree has."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .threads import spread
from .tree import Tree, mean_rounding
from .vectors import AHEAD, dot, embedded, number, prefetch, prefetch_number

_NORMALIZE_EPS = 1e-12  # the default of F.normalize


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
    none = torch.zeros(0, dtype=tree.offsets.dtype)
    new_bias, old_bias = (t.detach().contiguous().numpy() for t in bias or (none, none))
    source = (weight.detach().contiguous().numpy(), tree.rows.numpy(), tree.units.numpy(), new_bias, old_bias)
    rounding = mean_rounding(weight.shape[1])
    arguments = (source, ids.numpy(), position.numpy(), logits, rounding, moved.numpy())
    spread(_shifts, arguments, len(ids), 3 * weight.shape[1])
    return moved


def distinct(ids: Tensor) -> Tensor:
    """ids (k,) in ascending order, each once: `ids.unique()`, several times faster."""
    ascending = np.sort(ids.numpy())
    return torch.from_numpy(ascending[np.flatnonzero(np.diff(ascending, prepend=-1))])


def gathered(weight: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """The rows (k, d) of ids (k,), of unit length if `normalize`, in one pass: `F.normalize(weight[ids], dim=1)`."""
    rows = weight.new_empty(len(ids), weight.shape[1])
    source, i, out = weight.detach().numpy(), ids.numpy(), rows.numpy()
    spread(_gathered, (source, i, normalize, out), len(ids), 2 * weight.shape[1])
    return rows


@embedded
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


@embedded
def _gathered(weight: np.ndarray, ids: np.ndarray, normalize: bool, out: np.ndarray, start: int, stop: int) -> None:
    for k in range(start, stop):
        if k + AHEAD < stop:
            prefetch(weight, ids[k + AHEAD], ids[k + AHEAD] + 1)
        row, length = weight[ids[k]], weight.dtype.type(1.0)
        if normalize:
            length = weight.dtype.type(max(np.sqrt(dot(row, row)), _NORMALIZE_EPS))
        for j in range(row.shape[0]):
            out[k, j] = row[j] / length
