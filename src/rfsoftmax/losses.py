"""Losses as pure functions: sampled softmax, noise-contrastive estimation, the exact softmax by streaming.

bfloat16 and float16 are computed in float32, under autocast too, and come out as float32; float64 stays.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_NORMALIZE_EPS = 1e-12  # the default of F.normalize
_CHUNK_ELEMENTS = 2**22
_MIN_CHUNK_SIZE = 256
_REDUCTIONS = ("mean", "sum", "none")
_LABELS = ("pick_all", "pick_one")


def sampled_softmax_loss(
    target_logit: Tensor, negative_logits: Tensor, log_q: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """-o_t + log Z', Z' = e^{o_t} + sum_i e^{o_i} / (m q_i): the paper's eq:adjusted_logits, eq:sampled_loss.

    In plain PyTorch, with o_t (B,) and o, log_q (B, m):

        adjusted = torch.cat([o_t[:, None], o - log_q - math.log(m)], dim=1)
        F.cross_entropy(adjusted, torch.zeros(B, dtype=torch.int64))

    target_logit is (B,), or (B, P) for P targets that each meet their row's negatives; the loss has the same
    shape. negative_logits is (B, m) or (1, m); log_q broadcasts to (B, m). A negative logit of -inf is masked
    (an accidental hit): it counts in m, so that Z' stays unbiased, and adds nothing.
    """
    _check_choice("reduction", reduction, _REDUCTIONS)
    _check_shape("target_logit", target_logit, target_logit.ndim in (1, 2), "(B,) or (B, P)")
    log_rest = torch.logsumexp(_adjusted_logits(target_logit, negative_logits, log_q), dim=1)
    log_rest = log_rest if target_logit.ndim == 1 else log_rest[:, None]
    return reduce(_softmax_loss(_at_least_float32(target_logit), log_rest), reduction)


def nce_loss(
    target_logit: Tensor, negative_logits: Tensor, target_log_q: Tensor, log_q: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """softplus(-(o_t - log m q_t)) + sum_i softplus(o_i - log m q_i): is a class the target, or a draw of q?

    Noise-contrastive estimation (Mnih & Kavukcuoglu 2013), for logits that can learn to sum to Z = 1 by
    themselves; unit vectors at a fixed tau cannot. In plain PyTorch, with o_t, log_q_t (B,), o, log_q (B, m):

        adjusted = torch.cat([(o_t - log_q_t)[:, None], o - log_q], dim=1) - math.log(m)
        is_target = F.one_hot(torch.zeros(B, dtype=torch.int64), m + 1).to(o)
        F.binary_cross_entropy_with_logits(adjusted, is_target, reduction="none").sum(dim=1)

    negative_logits is (B, m) or (1, m), -inf a masked negative; log_q broadcasts to (B, m), target_log_q to (B,).
    """
    _check_choice("reduction", reduction, _REDUCTIONS)
    _check_shape("target_logit", target_logit, target_logit.ndim == 1, "(B,)")
    _check_float("target_log_q", target_log_q)
    _check_broadcast("target_log_q", target_log_q, tuple(target_logit.shape))
    negatives = _adjusted_logits(target_logit, negative_logits, log_q)
    positive = _at_least_float32(target_logit) - target_log_q - math.log(negative_logits.shape[1])
    return reduce(-F.logsigmoid(positive) - F.logsigmoid(-negatives).sum(dim=1), reduction)


def full_softmax_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    tau: float = 1.0,
    normalize: bool = False,
    absolute: bool = False,
    ignore_index: int = -100,
    labels: str = "pick_all",
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """-o_t + log sum_i e^{o_i} over all n classes, the paper's eq:neg-log, without ever holding B x n logits.

    In plain PyTorch, for target (B,), hidden (B, d), weight (n, d):

        logits = tau * hidden @ (F.normalize(weight) if normalize else weight).T + bias
        logits = logits.abs() if absolute else logits
        F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)

    A target (B, P) lists each row's positives, distinct, padded with -1 (ignore_index is for (B,) only). A
    positive p costs -o_p + log(e^{o_p} + sum of e^{o_i} over the classes that are no positives of its row);
    `labels` combines these as `reduce_labels` does, and "mean" is over the rows that have a positive.
    """
    _check_choice("reduction", reduction, _REDUCTIONS)
    _check_choice("labels", labels, _LABELS)
    _check_embeddings(hidden, weight, bias, chunk_size)
    padding = ignore_index if target.ndim == 1 else -1
    target = _class_ids("target", target, hidden, weight, padding)
    mask = target != padding
    target = target.where(mask, -1)
    # One cast for both terms, whose gradients then meet before they are rounded back.
    queries = tau * hidden.to(_working_dtype(hidden, weight))
    # The target first: backward then adds its few rows in place to the dense gradient of the log-sum-exp.
    kind: dict[str, Any] = {"bias": bias, "normalize": normalize, "absolute": absolute}
    target_logit = gathered_logits(queries, weight, target.clamp(min=0), **kind)
    log_rest = streamed_logsumexp(queries, weight, exclude=target, chunk_size=chunk_size, **kind)
    losses = _softmax_loss(target_logit, log_rest[:, None])
    return reduce(reduce_labels(losses, mask, labels), reduction, valid=mask.any(dim=1))


def streamed_logsumexp(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    exclude: Tensor | None = None,
    tau: float = 1.0,
    normalize: bool = False,
    absolute: bool = False,
    chunk_size: int | None = None,
) -> Tensor:
    """log sum_i e^{o_i} over the classes not excluded, o_i = tau h.c_i + b_i: the log of the paper's Z, or its Z_t.

    hidden (B, d), weight (n, d), bias (n,) or None -> (B,). c_i is weight_i, of unit length if `normalize` (hidden
    is taken as it is); `absolute` takes |o_i|, the loss of Quadratic. In plain PyTorch:

        logits = tau * hidden @ (F.normalize(weight) if normalize else weight).T + bias
        logits[torch.arange(B), exclude] = -torch.inf
        torch.logsumexp(logits, dim=1)

    exclude is (B,) or (B, P) class ids, -1 for none, repeats allowed. With every class excluded the value is
    -inf and the gradient 0. Forward and backward each read the classes once, chunk_size at a time, and hold
    nothing larger than a chunk of logits beside the dense gradient of weight.
    """
    _check_embeddings(hidden, weight, bias, chunk_size)
    if exclude is None:
        exclude = torch.empty(len(hidden), 0, dtype=torch.int64, device=hidden.device)
    exclude = _class_ids("exclude", exclude, hidden, weight, -1)
    queries = tau * hidden.to(_working_dtype(hidden, weight))
    chunk_size = chunk_size or _default_chunk_size(hidden)
    lse: Tensor = _StreamedLogSumExp.apply(queries, weight, bias, exclude, normalize, absolute, chunk_size)
    return lse


def logit_chunks(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    tau: float = 1.0,
    normalize: bool = False,
    absolute: bool = False,
    chunk_size: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """(start, logits (B, up to chunk_size)) of the classes from start on; see `streamed_logsumexp`."""
    _check_embeddings(hidden, weight, bias, chunk_size)
    queries = tau * hidden.to(_working_dtype(hidden, weight))
    chunks = _class_chunks(weight, bias, chunk_size or _default_chunk_size(hidden))
    return ((start, _logits(queries, rows, added, normalize, absolute)) for start, rows, added in chunks)


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
    """Logits (B, P) of each row's own classes, ids (B, P); `sparse` as in F.embedding. See `streamed_logsumexp`."""
    queries = tau * hidden.to(_working_dtype(hidden, weight))
    vectors = gathered_rows(weight, ids, dtype=queries.dtype, normalize=normalize, sparse=sparse)
    # Not a batched product: its backward, run under autocast, would be in half precision.
    logits = (vectors * queries[:, None]).sum(dim=-1)
    if bias is not None:
        logits = logits + _gathered(bias, ids, sparse)
    return logits.abs() if absolute else logits


def gathered_rows(weight: Tensor, ids: Tensor, *, dtype: torch.dtype, normalize: bool, sparse: bool) -> Tensor:
    """The rows (*, d) of weight (n, d) that ids (*) name, in dtype, of unit length if `normalize`."""
    return _class_vectors(F.embedding(ids, weight, sparse=sparse), dtype, normalize)


def shared_logits(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    tau: float = 1.0,
    normalize: bool = False,
    absolute: bool = False,
    sparse: bool = True,
    sizes: list[int] | None = None,
    gather: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Logits (B, m) of classes that rows share, by matrix products; else as `gathered_logits`.

    ids is (m,), the same for all rows; or (G, m), a set for the first sizes[0] rows, one for the sizes[1] after, ...
    `gather` stands for `gathered_rows`.
    """
    queries = tau * hidden.to(_working_dtype(hidden, weight))
    vectors = (gather or gathered_rows)(weight, ids, dtype=queries.dtype, normalize=normalize, sparse=sparse)
    with _no_autocast(queries):
        if sizes is None:
            logits = queries @ vectors.T
        else:
            logits = torch.cat([q @ v.T for q, v in zip(queries.split(sizes), vectors, strict=True)])
    if bias is not None:
        logits = logits + repeated(_gathered(bias, ids, sparse), sizes)
    return logits.abs() if absolute else logits


def repeated(x: Tensor, sizes: list[int] | None) -> Tensor:
    """Each of the G rows of x sizes[g] times, one after another; x itself without sizes."""
    if sizes is None:
        return x
    return x.repeat_interleave(torch.tensor(sizes, device=x.device), dim=0, output_size=sum(sizes))


def reduce_labels(losses: Tensor, mask: Tensor, how: str) -> Tensor:
    """A row's loss from those of its labels: losses (B, P), mask (B, P) with the true ones -> (B,).

    "pick_all" is their sum; "pick_one" their mean, the expectation of picking one uniformly (Reddi et al. 2019,
    under the names of Menon et al. 2019). A row without a label gives 0.
    """
    _check_choice("how", how, _LABELS)
    _check_shape("losses", losses, losses.ndim == 2, "(B, P)")
    fits = mask.shape == losses.shape and mask.dtype == torch.bool
    _check_shape("mask", mask, fits, f"{tuple(losses.shape)} of torch.bool")
    total = losses.where(mask, 0.0).sum(dim=1)
    return total if how == "pick_all" else total / mask.sum(dim=1).clamp(min=1)


def reduce(loss: Tensor, reduction: str, *, valid: Tensor | None = None) -> Tensor:
    """`reduction` as in F.cross_entropy. What is not valid must be 0 already; the mean does not count it."""
    _check_choice("reduction", reduction, _REDUCTIONS)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.mean() if valid is None else loss.sum() / valid.sum()


class _StreamedLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        exclude: Tensor,
        normalize: bool,
        absolute: bool,
        chunk_size: int,
    ) -> Tensor:
        # A finite first maximum: -inf - -inf never meets in a row whose classes are all excluded.
        top = queries.new_full((len(queries),), torch.finfo(queries.dtype).min)
        total = torch.zeros_like(top)
        for start, rows, added in _class_chunks(weight, bias, chunk_size):
            logits = _drop_(_logits(queries, rows, added, normalize, absolute), exclude, start)
            old_top, top = top, torch.maximum(top, logits.amax(dim=1))
            total = total * (old_top - top).exp() + logits.sub_(top[:, None]).exp_().sum(dim=1)
        lse = top + total.log()
        ctx.save_for_backward(queries, weight, bias, exclude, lse)
        ctx.normalize, ctx.absolute, ctx.chunk_size = normalize, absolute, chunk_size
        return lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, weight, bias, exclude, lse = ctx.saved_tensors
        grad_queries = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        with _no_autocast(queries):
            for start, rows, added in _class_chunks(weight, bias, ctx.chunk_size):
                vectors = _class_vectors(rows, queries.dtype, ctx.normalize)
                logits = queries @ vectors.T
                if added is not None:
                    logits += added
                share = (logits.abs() if ctx.absolute else logits) - lse[:, None]
                grad_dots = _drop_(share, exclude, start).exp_().mul_(grad[:, None])
                if ctx.absolute:
                    grad_dots.mul_(logits.sign_())
                if grad_bias is not None:
                    grad_bias[start : start + len(rows)] = grad_dots.sum(dim=0)
                if grad_queries is not None:
                    grad_queries.addmm_(grad_dots, vectors)
                if grad_weight is not None:
                    grad_rows = grad_dots.T @ queries
                    if ctx.normalize:
                        grad_rows = _normalize_backward(grad_rows, rows, vectors)
                    grad_weight[start : start + len(rows)] = grad_rows
        return grad_queries, grad_weight, grad_bias, None, None, None, None


def _normalize_backward(grad: Tensor, rows: Tensor, vectors: Tensor) -> Tensor:
    norm = rows.to(grad.dtype).norm(dim=1, keepdim=True)
    radial = (vectors * grad).sum(dim=1, keepdim=True) * (norm >= _NORMALIZE_EPS)
    return (grad - vectors * radial) / norm.clamp(min=_NORMALIZE_EPS)


def _drop_(logits: Tensor, exclude: Tensor, start: int) -> Tensor:
    """Sets the excluded classes to -inf in the chunk that begins at start; ids outside it change nothing."""
    local = exclude - start
    inside = (local >= 0) & (local < logits.shape[1])
    bound = torch.where(inside, -torch.inf, torch.inf).to(logits.dtype)
    return logits.scatter_reduce_(1, local.clamp(0, logits.shape[1] - 1), bound, reduce="amin")


def _softmax_loss(target_logit: Tensor, log_rest: Tensor) -> Tensor:
    """-o + log(e^o + e^rest) = softplus(rest - o): nothing cancels when o is large, and 0 for a rest of -inf."""
    # Past the threshold softplus is the identity, to float64. logsigmoid wakes all threads for however few numbers.
    return F.softplus(log_rest - target_logit, threshold=50.0)


def _adjusted_logits(target_logit: Tensor, negative_logits: Tensor, log_q: Tensor) -> Tensor:
    batch, shape = len(target_logit), tuple(negative_logits.shape)
    fits = len(shape) == 2 and shape[0] in (1, batch) and shape[1] > 0 and batch > 0
    if not fits or log_q.shape != shape or not _floating(target_logit, negative_logits, log_q):
        _check_adjustment(target_logit, negative_logits, log_q)
    adjusted = (_at_least_float32(negative_logits) - log_q).sub_(math.log(shape[1]))
    # A masked negative stays masked even where its own log_q is -inf.
    return adjusted.masked_fill(negative_logits == -torch.inf, -torch.inf)


def _floating(*tensors: Tensor) -> bool:
    return all(x.is_floating_point() for x in tensors)


def _check_adjustment(target_logit: Tensor, negative_logits: Tensor, log_q: Tensor) -> None:
    _check_float("target_logit", target_logit)
    _check_float("negative_logits", negative_logits)
    _check_float("log_q", log_q)
    batch = len(target_logit)
    _check_shape("target_logit", target_logit, batch > 0, "with B >= 1")
    shape = tuple(negative_logits.shape)
    fits = len(shape) == 2 and shape[0] in (1, batch) and shape[1] > 0
    _check_shape("negative_logits", negative_logits, fits, f"(B, m) or (1, m) with B = {batch}, m >= 1")
    _check_broadcast("log_q", log_q, (batch, shape[1]))


def _logits(queries: Tensor, rows: Tensor, bias: Tensor | None, normalize: bool, absolute: bool) -> Tensor:
    with _no_autocast(queries):
        logits = queries @ _class_vectors(rows, queries.dtype, normalize).T
    if bias is not None:
        logits = logits + bias
    return logits.abs() if absolute else logits


def _gathered(bias: Tensor, ids: Tensor, sparse: bool) -> Tensor:
    """bias[ids], with a sparse gradient if so asked."""
    return torch.gather(bias, 0, ids.flatten(), sparse_grad=sparse).view(ids.shape)


def _class_vectors(rows: Tensor, dtype: torch.dtype, normalize: bool) -> Tensor:
    rows = rows.to(dtype)
    return F.normalize(rows, dim=-1, eps=_NORMALIZE_EPS) if normalize else rows


def _class_chunks(weight: Tensor, bias: Tensor | None, size: int) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    for start in range(0, len(weight), size):
        yield start, weight[start : start + size], None if bias is None else bias[start : start + size]


def _default_chunk_size(hidden: Tensor) -> int:
    # A chunk costs B x chunk logits and, normalised or upcast, chunk x d of the weight; bound the larger.
    return max(_MIN_CHUNK_SIZE, _CHUNK_ELEMENTS // max(hidden.shape))


def _working_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


def _no_autocast(x: Tensor) -> AbstractContextManager[object]:
    on = torch.is_autocast_enabled(x.device.type)  # the context itself costs more than a small product
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()


def _require(fits: bool, name: str, expected: str, got: object) -> None:
    if not fits:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    _require(False, name, " or ".join(map(repr, choices)), repr(value))


def _check_shape(name: str, x: Tensor, fits: bool, expected: str) -> None:
    if not fits:
        _require(False, name, f"shape {expected}", f"{tuple(x.shape)} of {x.dtype}")


def _check_float(name: str, x: Tensor) -> None:
    _require(x.is_floating_point(), name, "a floating dtype", x.dtype)


def _check_broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    fits = x.ndim <= len(shape) and all(size in (1, full) for size, full in pairs)
    _check_shape(name, x, fits, f"broadcastable to {shape}")


def _check_embeddings(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int | None) -> None:
    _check_float("hidden", hidden)
    _check_float("weight", weight)
    _check_shape("hidden", hidden, hidden.ndim == 2 and len(hidden) > 0, "(B, d) with B >= 1")
    fits = weight.ndim == 2 and len(weight) > 0 and weight.shape[1] == hidden.shape[1]
    _check_shape("weight", weight, fits, f"(n, d) with n >= 1, d = {hidden.shape[1]}")
    if bias is not None:
        _check_float("bias", bias)
        _check_shape("bias", bias, bias.shape == weight.shape[:1], f"(n,) with n = {len(weight)}")
    _require(chunk_size is None or chunk_size > 0, "chunk_size", "at least 1", chunk_size)


def _class_ids(name: str, ids: Tensor, hidden: Tensor, weight: Tensor, padding: int) -> Tensor:
    """ids as (B, P) int64, checked."""
    _require(ids.dtype in (torch.int64, torch.int32), name, "dtype torch.int64 or torch.int32", ids.dtype)
    batch, num_classes = len(hidden), len(weight)
    _check_shape(name, ids, ids.ndim in (1, 2) and len(ids) == batch, f"(B,) or (B, P) with B = {batch}")
    for stray in ids[((ids < 0) | (ids >= num_classes)) & (ids != padding)].tolist():
        _require(False, name, f"classes in [0, {num_classes}) or {padding}", stray)
    return ids.long() if ids.ndim == 2 else ids.long()[:, None]
