"""Rows of a weight by their ids, compiled by numba: gathered, and compared with the copies that a tree has."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .threads import spread
from .tree import Tree
from .vectors import AHEAD, dot, embedded, number, prefetch, prefetch_number, row_array

_NORMALIZE_EPS = 1e-12  # the default of F.normalize


class Limits(NamedTuple):
    """How far a class may move before it is given to the sampler again: tau |c' - c| + |b' - b| <= tolerance."""

    tau: float
    tolerance: float
    normalize: bool


def stale(
    tree: Tree, ids: Tensor, positions: Tensor, weight: Tensor, bias: tuple[Tensor, Tensor] | None, limits: Limits
) -> tuple[Tensor, float]:
    """Those of ids (k,) whose logit may have moved by more than the limit, by weight (n, d), the tree's rows and both
    biases (n,), new by id and old by position, and how far all may have on average; `positions` (n + 1,) has the
    position of each id.

    What is not finite counts as moved: it is for others to raise.
    """
    moved = tree.offsets.new_empty(len(ids))
    none = torch.zeros(0, dtype=tree.offsets.dtype)
    new_bias, old_bias = (t.detach().contiguous().numpy() for t in bias or (none, none))
    source = (weight.detach().contiguous().numpy(), row_array(tree.rows), new_bias, old_bias)
    places, i, out = positions.numpy(), ids.numpy(), moved.numpy()
    spread(_stale, (source, i, places, limits, out), len(ids), 3 * weight.shape[1])
    return ids[~(moved <= limits.tolerance)], float(moved.mean())


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
def _stale(
    source: tuple[np.ndarray, ...],
    ids: np.ndarray,
    positions: np.ndarray,
    limits: Limits,
    out: np.ndarray,
    start: int,
    stop: int,
) -> None:
    weight, rows, new_bias, old_bias = source
    for k in range(start, stop):
        if k + 2 * AHEAD < stop:
            prefetch_number(positions, ids[k + 2 * AHEAD])
        if k + AHEAD < stop:
            following = ids[k + AHEAD]
            prefetch(weight, following, following + 1)
            prefetch(rows, positions[following], positions[following] + 1)
        new, old = weight[ids[k]], rows[positions[ids[k]]]
        scale = 1 / max(np.sqrt(dot(new, new)), _NORMALIZE_EPS) if limits.normalize else 1.0
        scale = weight.dtype.type(scale)
        total = new[0] - new[0]
        for j in range(new.shape[0]):
            step = scale * new[j] - number(old[j])
            total += step * step
        moved = limits.tau * np.sqrt(total)
        if new_bias.shape[0]:
            moved += abs(new_bias[ids[k]] - old_bias[positions[ids[k]]])
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
