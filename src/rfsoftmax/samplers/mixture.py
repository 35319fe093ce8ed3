"""A mixture of samplers: some negatives from each, and the exact log of the mixed q."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import cast, final

import torch
from torch import Tensor, nn

from ..tree import MAX_UNIFORM
from .base import Sampler
from .in_batch import InBatchSampler
from .rows import ClassRows


@final
class MixtureSampler(Sampler):
    """q = sum_k w_k q_k for `samplers` with `weights` w_k, scaled to sum to 1; all alike if not given.

    Each draw is from one of the samplers, by w, and log q of what it drew the log of the sum over all of them: not of
    the one that drew it, which would be a q for which Z' has a larger variance. A share of a sampler that gives every
    class its due, even the uniform one, bounds q from below and with it the weights 1/q of the others' blind spots.

    Of the sorted uniforms of a query those of a sampler are a run, which it gets scaled to (0, 1): m draws cost what m
    draws of the samplers do, in their proportions, and stratified ones stay so. To them comes `log_prob` of m classes
    for every sampler. The samplers' own `stratified` plays no part. Rebuild and update go to all of them.
    """

    def __init__(
        self, samplers: Sequence[Sampler], weights: Sequence[float] | None = None, *, stratified: bool = True
    ) -> None:
        samplers = list(samplers)
        weights = [1.0] * len(samplers) if weights is None else [float(weight) for weight in weights]
        if not samplers:
            raise ValueError("samplers: expected at least one, got none")
        if len(weights) != len(samplers):
            raise ValueError(f"weights: expected {len(samplers)}, one for each of samplers, got {len(weights)}")
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights: expected positive finite numbers, got {weights}")
        numbers = {sampler.num_classes for sampler in samplers} - {0}
        if len(numbers) > 1:
            raise ValueError(f"samplers: expected all for as many classes, got for {sorted(numbers)}")
        super().__init__(0, stratified)
        self.samplers = nn.ModuleList(samplers)
        self.weights = [weight / math.fsum(weights) for weight in weights]
        self.register_load_state_dict_post_hook(_recount)
        _recount(self)

    def _rebuild(self, weight: ClassRows, bias: Tensor) -> None:
        for sampler in self._parts():
            if sampler.num_classes not in (0, len(weight)):
                raise ValueError(f"weight: expected {sampler.num_classes} rows, one a class, got {len(weight)}")
        for sampler in self._parts():
            sampler._rebuild(weight, bias)
        self.num_classes = len(weight)

    def _update(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        for sampler in self._parts():
            sampler._update(ids, rows, bias)

    def _observe(self, hidden: Tensor) -> None:
        for sampler in self._parts():
            sampler._observe(hidden)

    def _draw(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, shared: bool
    ) -> tuple[Tensor, Tensor]:
        uniforms, places = uniforms.sort(dim=1)
        ids = torch.zeros_like(places)
        edges = [0.0, *accumulate(self.weights[:-1]), 1.0]
        for sampler, (low, high) in zip(self._parts(), pairwise(edges), strict=True):
            u, columns = _run(uniforms, low, high)
            if u.shape[1] or isinstance(sampler, InBatchSampler):  # which sees the targets here
                drawn = sampler._draw(hidden, exclude, u, generator, shared)[0]
                ids = _put(ids, columns, drawn)
        ids = torch.empty_like(ids).scatter_(1, places, ids)
        return ids, self._log_prob(hidden, ids, exclude, shared)

    def _log_prob(self, hidden: Tensor, ids: Tensor, exclude: Tensor, shared: bool) -> Tensor:
        parts = [
            sampler._log_prob(hidden, ids, exclude, shared).double() + math.log(weight)
            for sampler, weight in zip(self._parts(), self.weights, strict=True)
        ]
        return torch.stack(parts).logsumexp(0)

    def _parts(self) -> list[Sampler]:
        return cast(list[Sampler], list(self.samplers))


def _recount(mixture: nn.Module, *_: object) -> None:
    """A mixture has classes if all its samplers do: loading a state_dict leaves some without until a rebuild."""
    assert isinstance(mixture, MixtureSampler)
    mixture.num_classes = min(sampler.num_classes for sampler in mixture._parts())


def _run(uniforms: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Those of sorted uniforms (B, m) in [low, high), scaled to [0, 1), and their columns, both (B, longest run).

    Rows with a shorter run are filled up with what may be drawn and is not to be kept: its column is m.
    """
    num = uniforms.shape[1]
    ends = torch.tensor([[low, high]], dtype=uniforms.dtype, device=uniforms.device).expand(len(uniforms), -1)
    first, last = torch.searchsorted(uniforms, ends.contiguous()).split(1, dim=1)
    longest = int((last - first).max())
    columns = first + torch.arange(longest, device=uniforms.device)
    u = (uniforms.gather(1, columns.clamp(max=num - 1)) - low) / (high - low)
    return u.clamp_(0, MAX_UNIFORM), torch.where(columns < last, columns, num)


def _put(ids: Tensor, columns: Tensor, drawn: Tensor) -> Tensor:
    """ids (B, m) with drawn (B, r) in their columns (B, r), m for nowhere."""
    return nn.functional.pad(ids, (0, 1)).scatter_(1, columns, drawn)[:, :-1]
