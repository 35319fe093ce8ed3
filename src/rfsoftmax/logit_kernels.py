"""`losses.gathered_logits` and `losses.gathered_rows` for CPU tensors, compiled by numba: the same results.

Of the logits there is no (B, P, d) tensor: forward reads each class row once and keeps its dot product and length.
Backward sorts the ids, so that the gradient of a class that occurs several times is summed once and normalised once:
the sparse gradient has each class once, in order, which a sparse optimizer coalesces at once. What a thread computes
does not depend on how many there are.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .losses import _NORMALIZE_EPS, _gathered
from .row_kernels import gathered
from .threads import spread
from .vectors import AHEAD, compiled, dot, dot_and_square, inlined, lean, prefetch


def suits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `gathered_logits` takes these; what it does not take is for `losses.gathered_logits`."""
    return (
        weight.device.type == "cpu" and weight.dtype == hidden.dtype and weight.dtype in (torch.float32, torch.float64)
    )


def gathered_logits(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    tau: float = 1.0,
    normalize: bool = False,
    absolute: bool = False,
    sparse: bool = True,
) -> Tensor:
    logits: Tensor = _GatheredDots.apply(tau * hidden, weight, ids, normalize, sparse)
    if bias is not None:
        logits = logits + _gathered(bias, ids, sparse)
    return logits.abs() if absolute else logits


def gathered_rows(weight: Tensor, ids: Tensor, *, dtype: torch.dtype, normalize: bool, sparse: bool) -> Tensor:
    # `suits` has seen to the dtype: it is the weight's.
    rows: Tensor = _GatheredRows.apply(weight, ids, normalize, sparse)
    return rows


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, normalize: bool, sparse: bool) -> Tensor:
        weight, flat = weight.contiguous(), ids.contiguous().view(-1)
        ctx.save_for_backward(weight, flat)
        ctx.normalize, ctx.sparse = normalize, sparse
        return gathered(weight, flat, normalize).view(*ids.shape, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, flat = ctx.saved_tensors
        classes, order, starts, ends = _occurrences(flat.numpy())
        rows = weight.new_empty(len(classes), weight.shape[1])
        arrays = (weight.detach().numpy(), grad.contiguous().view(-1, weight.shape[1]).numpy())
        normalize, cost = ctx.normalize, 3 * len(flat) * weight.shape[1] // max(1, len(classes))
        places = (classes, order, starts, ends)
        spread(_summed, (arrays, normalize, places, rows.numpy()), len(classes), cost)
        return _gradient(weight, torch.from_numpy(classes), rows, ctx.sparse), None, None, None


class _GatheredDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, weight: Tensor, ids: Tensor, normalize: bool, sparse: bool) -> Tensor:
        queries, weight, ids = queries.contiguous(), weight.contiguous(), ids.contiguous()
        dots, norms = queries.new_empty(ids.shape), queries.new_empty(ids.shape if normalize else (1, 1))
        q, w, i, out, lengths = (t.detach().numpy() for t in (queries, weight, ids, dots, norms))
        spread(_forward, (q, w, i, normalize, out, lengths), len(ids), ids.shape[1] * q.shape[1])
        ctx.save_for_backward(queries, weight, ids, dots, norms)
        ctx.normalize, ctx.sparse = normalize, sparse
        return dots

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, weight, ids, dots, norms = ctx.saved_tensors
        grad = grad.contiguous()
        arrays = tuple(t.detach().numpy() for t in (queries, weight, ids, dots, norms, grad))
        grad_queries = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_queries = torch.empty_like(queries)
            out = grad_queries.numpy()
            cost = ids.shape[1] * queries.shape[1]
            spread(_query_gradient, (arrays, ctx.normalize, out), len(ids), cost)
        if ctx.needs_input_grad[1]:
            grad_weight = _gradient(weight, *_weight_gradient(weight, arrays, ctx.normalize), ctx.sparse)
        return grad_queries, grad_weight, None, None, None


def _gradient(weight: Tensor, classes: Tensor, rows: Tensor, sparse: bool) -> Tensor:
    """The gradient of weight (n, d) that has rows (U, d) at classes (U,), ascending."""
    if sparse:
        shape = tuple(weight.shape)
        return torch.sparse_coo_tensor(classes[None], rows, shape, is_coalesced=True, check_invariants=False)
    return torch.zeros_like(weight).index_copy_(0, classes, rows)


def _weight_gradient(weight: Tensor, arrays: tuple[np.ndarray, ...], normalize: bool) -> tuple[Tensor, Tensor]:
    """The classes that occur (U,), ascending, and the gradients of their rows of weight (U, d)."""
    flat = arrays[2].reshape(-1)
    classes, order, starts, ends = _occurrences(flat)
    # By torch, whose memory begins where a line of the cache does: rows across lines take twice as long to write.
    rows = weight.new_empty(len(starts), weight.shape[1])
    cost = len(flat) * rows.shape[1] // max(1, len(starts))
    spread(_row_gradients, (arrays, normalize, (classes, order, starts, ends), rows.numpy()), len(starts), cost)
    return torch.from_numpy(classes), rows


def _occurrences(ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """The classes among ids (k,), ascending; the places of ids by class; where those of each class start and end."""
    ascending, order = _sorted(ids)
    classes, edges = np.empty_like(ids), np.empty(1 + len(ids), np.int64)
    count = _runs(ascending, classes, edges)
    return classes[:count], order, edges[:count], edges[1 : 1 + count]


def _sorted(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ids (k,) in ascending order, and the place that each had: equal ones in the order of their places."""
    bits = max(1, len(ids) - 1).bit_length()
    if not len(ids) or int(ids.max()) >> (63 - bits):
        order = np.argsort(ids, kind="stable")
        return ids[order], order
    # Both in one number, whose sort takes a fraction of the time of an argsort.
    keys = (ids << bits) | np.arange(len(ids))
    keys.sort()
    return keys >> bits, keys & ((1 << bits) - 1)


@compiled
def _runs(ascending: np.ndarray, classes: np.ndarray, edges: np.ndarray) -> int:
    """Fills in the numbers that differ from the one before, where each begins, and the end; returns how many."""
    count, last = 0, -1
    for i in range(ascending.shape[0]):
        # Whether it is another is not to be foreseen: it is written, and kept by moving on.
        classes[count], edges[count] = ascending[i], i
        count += ascending[i] != last
        last = ascending[i]
    edges[count] = ascending.shape[0]
    return count


@inlined
def _fetch(weight: np.ndarray, ids: np.ndarray, b: int, p: int, stop: int) -> None:
    """Have the row of ids[b, p] on its way; p may lie beyond the end of row b of ids."""
    if p >= ids.shape[1]:
        b, p = b + 1, p - ids.shape[1]
    if b < stop and p < ids.shape[1]:
        prefetch(weight, ids[b, p], ids[b, p] + 1)


@lean
def _forward(
    queries: np.ndarray,
    weight: np.ndarray,
    ids: np.ndarray,
    normalize: bool,
    dots: np.ndarray,
    norms: np.ndarray,
    start: int,
    stop: int,
) -> None:
    for b in range(start, stop):
        for p in range(ids.shape[1]):
            _fetch(weight, ids, b, p + AHEAD, stop)
            if normalize:
                dots[b, p], square = dot_and_square(queries[b], weight[ids[b, p]])
                norms[b, p] = np.sqrt(square)
                dots[b, p] /= max(norms[b, p], _NORMALIZE_EPS)
            else:
                dots[b, p] = dot(queries[b], weight[ids[b, p]])


@lean
def _query_gradient(arrays: tuple[np.ndarray, ...], normalize: bool, out: np.ndarray, start: int, stop: int) -> None:
    _, weight, ids, _, norms, grad = arrays
    for b in range(start, stop):
        total = out[b]
        total[:] = 0.0
        for p in range(ids.shape[1]):
            _fetch(weight, ids, b, p + AHEAD, stop)
            row, factor = weight[ids[b, p]], grad[b, p]
            if normalize:
                factor /= max(norms[b, p], _NORMALIZE_EPS)
            for j in range(total.shape[0]):
                total[j] += factor * row[j]


@lean
def _through_length(grad: np.ndarray, radial: float, row: np.ndarray, norm: float) -> None:
    """Makes the gradient of u = v/|v| that of v, the row; radial is grad.u.

    d/dv of q.v/|v| is (q - u (u.q)) / |v|; below eps the length is a constant.
    """
    scale = 1 / max(norm, _NORMALIZE_EPS)
    along = radial * scale if norm >= _NORMALIZE_EPS else 0 * radial
    for j in range(grad.shape[0]):
        grad[j] = (grad[j] - along * row[j]) * scale


@lean
def _row_gradients(
    arrays: tuple[np.ndarray, ...],
    normalize: bool,
    places: tuple[np.ndarray, ...],
    rows: np.ndarray,
    start: int,
    stop: int,
) -> None:
    (queries, weight, ids, dots, norms, grad), (classes, order, starts, ends) = arrays, places
    width = ids.shape[1]
    for k in range(start, stop):
        if normalize and k + AHEAD < stop:
            prefetch(weight, classes[k + AHEAD], classes[k + AHEAD] + 1)
        total = rows[k]
        total[:] = 0.0
        radial = total[0]
        for i in range(starts[k], ends[k]):
            place = order[i]
            b, p = divmod(place, width)
            query, factor = queries[b], grad[b, p]
            radial += factor * dots[b, p]
            for j in range(total.shape[0]):
                total[j] += factor * query[j]
        if normalize:
            b, p = divmod(order[starts[k]], width)
            _through_length(total, radial, weight[classes[k]], norms[b, p])


@lean
def _summed(
    arrays: tuple[np.ndarray, ...],
    normalize: bool,
    places: tuple[np.ndarray, ...],
    rows: np.ndarray,
    start: int,
    stop: int,
) -> None:
    (weight, grad), (classes, order, starts, ends) = arrays, places
    for k in range(start, stop):
        total = rows[k]
        total[:] = 0.0
        for i in range(starts[k], ends[k]):
            place = order[i]
            for j in range(total.shape[0]):
                total[j] += grad[place, j]
        if normalize:
            row = weight[classes[k]]
            norm = np.sqrt(dot(row, row))
            _through_length(total, dot(total, row) / max(norm, _NORMALIZE_EPS), row, norm)
