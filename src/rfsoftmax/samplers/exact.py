"""EXP of the paper: negatives from the softmax itself, at O(nd) a query."""

import math
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from .base import DEFAULT_TAU, Sampler, check_dim, check_tau
from .rows import ClassRows

# Logits held at once, over all rows of the batch.
_CHUNK_ELEMENTS = 1 << 24


@final
class ExactSampler(Sampler):
    """q_i proportional to exp(o_i), o_i = tau h.c_i + b_i, or exp(|o_i|) if `absolute`: q without gradient bias.

    Streamed over classes: a first pass finds the mass of each chunk of classes, a second inverts the CDF inside the
    chunks. So neither memory nor `torch.multinomial`'s limit of 2^24 bounds n. Shared draws follow the mean of the
    rows' softmax distributions.

    With `quadratic` q_i is proportional to quadratic (h.c_i)^2 + 1 instead, whatever the bias: what `KernelSampler`
    draws from with the map `Quadratic(alpha=quadratic)`, but at O(nd) a query and without its d^2 features.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        *,
        tau: float = DEFAULT_TAU,
        absolute: bool = False,
        quadratic: float | None = None,
        stratified: bool = True,
    ) -> None:
        super().__init__(0, stratified)
        check_tau(tau)
        if quadratic is not None and not 0 < quadratic < math.inf:
            raise ValueError(f"quadratic: expected a positive finite number, got {quadratic}")
        self.tau = tau
        self.absolute = absolute
        self.quadratic = quadratic
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.register_buffer("bias", torch.empty(0), persistent=False)

    def _rebuild(self, weight: ClassRows, bias: Tensor) -> None:
        if self.num_classes:
            check_dim("weight", weight, self.weight.shape[1])
        self.num_classes = len(weight)
        some = weight[:1]
        self.weight = some.new_empty(weight.shape, dtype=torch.promote_types(some.dtype, torch.float32))
        for part, rows in weight.chunks():
            self.weight[part] = rows
        self.bias = bias.detach().to(self.weight.dtype, copy=True)

    def _update(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        check_dim("rows", rows, self.weight.shape[1])
        self.weight[ids] = rows.to(self.weight.dtype)
        if bias is not None:
            self.bias[ids] = bias.to(self.bias.dtype)

    def _logit_kind(self) -> tuple[float | None, bool | None]:
        return (self.tau, self.absolute) if self.quadratic is None else (None, None)

    def _chunks(self, hidden: Tensor, exclude: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first class, logits (B, chunk)) over all classes, -inf where excluded."""
        check_dim("hidden", hidden, self.weight.shape[1])
        hidden = hidden.to(self.weight.dtype) * self.tau
        size = max(1, _CHUNK_ELEMENTS // len(hidden))
        for start in range(0, self.num_classes, size):
            logits = self._logits(hidden, slice(start, start + size))
            inside = (exclude >= start) & (exclude < start + logits.shape[1])
            row, column = inside.nonzero(as_tuple=True)
            logits[row, exclude[row, column] - start] = -torch.inf
            yield start, logits

    def _logits(self, hidden: Tensor, some: slice) -> Tensor:
        """The logarithm of what q is proportional to, (B, chunk), for hidden (B, d) times tau."""
        if self.quadratic is not None:
            return (hidden @ self.weight[some].T).square_().mul_(self.quadratic / self.tau**2).log1p_()
        logits = torch.addmm(self.bias[some], hidden, self.weight[some].T)
        return logits.abs_() if self.absolute else logits

    def _log_probabilities(self, hidden: Tensor, exclude: Tensor, shared: bool) -> Iterator[tuple[int, Tensor]]:
        """(first class, log q (B, chunk)), one row if shared: the chunks again, now normalised."""
        exclude = exclude.expand(len(hidden), -1)
        fits = len(hidden) * self.num_classes <= _CHUNK_ELEMENTS
        chunks = list(self._chunks(hidden, exclude)) if fits else None
        peaks, masses = zip(
            *(_peak_and_mass(logits) for _, logits in chunks or self._chunks(hidden, exclude)), strict=True
        )
        # The peak first, then the log of what is left of Z: large logits lose no digits to a large log Z.
        peak = torch.stack(peaks).amax(0)
        log_mass = sum(mass * (top - peak).exp() for top, mass in zip(peaks, masses, strict=True)).log()
        for start, logits in chunks or self._chunks(hidden, exclude):
            log_q = logits.sub_(peak).sub_(log_mass)
            yield start, log_q.logsumexp(0, keepdim=True) - math.log(len(hidden)) if shared else log_q

    def _draw(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, shared: bool
    ) -> tuple[Tensor, Tensor]:
        ids = torch.zeros_like(uniforms, dtype=torch.int64)
        log_q = torch.full_like(uniforms, -torch.inf)
        before = uniforms.new_zeros(len(uniforms), 1)
        for start, chunk in self._log_probabilities(hidden, exclude, shared):
            cdf = chunk.exp().cumsum(1, dtype=torch.float64).add_(before)
            end = cdf[:, -1:].contiguous()
            # A uniform belongs to the last chunk with mass that starts at or below it, even if rounding ends it below.
            inside = torch.minimum(uniforms, torch.nextafter(end, before))
            place = torch.searchsorted(cdf, inside, right=True)
            here = (uniforms >= before) & (end > before)
            place = place.clamp_(max=chunk.shape[1] - 1)
            ids = torch.where(here, place + start, ids)
            log_q = torch.where(here, chunk.gather(1, place).double(), log_q)
            before = end
        return ids, log_q

    def _log_prob(self, hidden: Tensor, ids: Tensor, exclude: Tensor, shared: bool) -> Tensor:
        log_q = torch.full(ids.shape, -torch.inf, dtype=torch.float64, device=ids.device)
        for start, chunk in self._log_probabilities(hidden, exclude, shared):
            inside = (ids >= start) & (ids < start + chunk.shape[1])
            here = chunk.gather(1, (ids - start).clamp(0, chunk.shape[1] - 1)).double()
            log_q = torch.where(inside, here, log_q)
        return log_q


def _peak_and_mass(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit (B, 1), finite even if all are -inf, and the sum of exp(logit - largest) (B, 1)."""
    peak = logits.amax(1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    return peak, (logits - peak).exp_().sum(1, keepdim=True)
