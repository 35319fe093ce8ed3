"""Samplers that look neither at the query nor at the embeddings: uniform, log-uniform and unigram."""

import math
from abc import abstractmethod
from typing import final

import numpy as np
import torch
from torch import Tensor

from ..vectors import compiled
from .base import Sampler
from .rows import ClassRows

# Rounds of redrawing excluded classes from the alias table before the rest are drawn by inverting the CDF.
_REDRAWS = 4


class _StaticSampler(Sampler):
    """A fixed q over classes 0..n-1; excluding a set E leaves q_i / (1 - sum of q over E)."""

    def __init__(self, num_classes: int, stratified: bool) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes: expected at least 1, got {num_classes}")
        super().__init__(num_classes, stratified)

    @abstractmethod
    def _mass(self, ids: Tensor) -> Tensor:
        """q, float64, of classes."""

    @abstractmethod
    def _cdf(self, ids: Tensor) -> Tensor:
        """Sum of q, float64, over the classes before ids."""

    @abstractmethod
    def _inverse_cdf(self, u: Tensor) -> Tensor:
        """The class i with _cdf(i) <= u < _cdf(i + 1), up to rounding."""

    @abstractmethod
    def _pick(self, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None) -> Tensor:
        """ids (B, m) that follow q without `exclude`."""

    def _rebuild(self, weight: ClassRows, bias: Tensor) -> None:
        pass

    def _update(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        pass

    def _draw(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, shared: bool
    ) -> tuple[Tensor, Tensor]:
        ids = self._pick(exclude, uniforms, generator)
        return ids, self._log_prob(hidden, ids, exclude, shared)

    def _log_prob(self, hidden: Tensor, ids: Tensor, exclude: Tensor, shared: bool) -> Tensor:
        log_q = self._mass(ids).log() - torch.log1p(-self._excluded_mass(exclude).sum(1, keepdim=True))
        return log_q.masked_fill_(_is_excluded(ids, exclude), -torch.inf)

    def _excluded_mass(self, exclude: Tensor) -> Tensor:
        return self._mass(exclude.clamp(min=0)).masked_fill(exclude < 0, 0.0)

    def _invert_around(self, exclude: Tensor, u: Tensor) -> Tensor:
        """Invert the CDF with excluded intervals cut out: each that starts at or below u moves u up by its length."""
        exclude = exclude.sort(dim=1).values
        mass, start = self._excluded_mass(exclude), self._cdf(exclude.clamp(min=0))
        u = u * (1 - mass.sum(1, keepdim=True))
        for i in range(exclude.shape[1]):
            u = torch.where(u >= start[:, i : i + 1], u + mass[:, i : i + 1], u)
        ids = self._inverse_cdf(u).clamp_(0, self.num_classes - 1)
        # Rounding at an edge may still leave a draw on an excluded class: it moves to the next one that is not.
        while bool((hit := _is_excluded(ids, exclude)).any()):
            ids = torch.where(hit, (ids + 1) % self.num_classes, ids)
        return ids


def _is_excluded(ids: Tensor, exclude: Tensor) -> Tensor:
    return (ids.unsqueeze(-1) == exclude.unsqueeze(1)).any(-1)


@final
class UniformSampler(_StaticSampler):
    """q_i = 1/n."""

    def __init__(self, num_classes: int, *, stratified: bool = True) -> None:
        super().__init__(num_classes, stratified)

    def _mass(self, ids: Tensor) -> Tensor:
        return torch.full(ids.shape, 1 / self.num_classes, dtype=torch.float64, device=ids.device)

    def _cdf(self, ids: Tensor) -> Tensor:
        return ids.double() / self.num_classes

    def _inverse_cdf(self, u: Tensor) -> Tensor:
        return (u * self.num_classes).long()

    def _pick(self, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None) -> Tensor:
        return self._invert_around(exclude, uniforms)


@final
class LogUniformSampler(_StaticSampler):
    """q_i proportional to log((k + 2) / (k + 1)), k = first + i: Zipf's law, the most frequent class being number 0.

    With `first` = 0 the sum is log(n + 1); another is for a range of the classes, the first of which has that number.
    """

    def __init__(self, num_classes: int, *, first: int = 0, stratified: bool = True) -> None:
        super().__init__(num_classes, stratified)
        if first < 0:
            raise ValueError(f"first: expected at least 0, got {first}")
        self.first = first
        self._total = math.log1p(num_classes / (first + 1))

    def _mass(self, ids: Tensor) -> Tensor:
        return torch.log1p(1 / (ids.double() + (self.first + 1))) / self._total

    def _cdf(self, ids: Tensor) -> Tensor:
        return torch.log1p(ids.double() / (self.first + 1)) / self._total

    def _inverse_cdf(self, u: Tensor) -> Tensor:
        return (torch.expm1(u * self._total) * (self.first + 1)).long()

    def _pick(self, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None) -> Tensor:
        return self._invert_around(exclude, uniforms)


@final
class UnigramSampler(_StaticSampler):
    """q_i proportional to max(count_i, min_count)^power, by Walker's alias table: O(1) a draw.

    `power` is the distortion of word2vec (0.75 there). `min_count` keeps q positive for classes that were never seen;
    without it they would be missing from E[Z'].
    """

    probability: Tensor
    cumulative: Tensor
    keep: Tensor
    alias: Tensor

    def __init__(self, counts: Tensor, *, power: float = 1.0, min_count: float = 1.0, stratified: bool = True) -> None:
        counts = torch.as_tensor(counts)
        if counts.dim() != 1 or not len(counts):
            raise ValueError(f"counts: expected shape (num_classes,), got {tuple(counts.shape)}")
        if not bool(torch.isfinite(counts).all()) or bool((counts < 0).any()):
            raise ValueError("counts: expected finite numbers of at least 0, got a negative, NaN or inf")
        if not math.isfinite(power):
            raise ValueError(f"power: expected a finite number, got {power}")
        if not min_count > 0:
            raise ValueError(f"min_count: expected a positive number, got {min_count}")
        super().__init__(len(counts), stratified)
        q = counts.double().clamp(min=min_count) ** power
        q /= q.sum()
        keep, alias = _alias_table(q.cpu().numpy())
        self.register_buffer("probability", q)
        self.register_buffer("cumulative", torch.cat([q.new_zeros(1), q.cumsum(0)]))
        self.register_buffer("keep", torch.from_numpy(keep).to(q.device))
        self.register_buffer("alias", torch.from_numpy(alias).to(q.device))

    def _mass(self, ids: Tensor) -> Tensor:
        return self.probability[ids].double()

    def _cdf(self, ids: Tensor) -> Tensor:
        return self.cumulative[ids].double()

    def _inverse_cdf(self, u: Tensor) -> Tensor:
        return torch.searchsorted(self.cumulative, u.to(self.cumulative.dtype), right=True) - 1

    def _from_table(self, u: Tensor) -> Tensor:
        scaled = u * self.num_classes
        bucket = scaled.long().clamp_(max=self.num_classes - 1)
        return torch.where(scaled - bucket < self.keep[bucket], bucket, self.alias[bucket])

    def _pick(self, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None) -> Tensor:
        ids = self._from_table(uniforms)
        for _ in range(_REDRAWS):
            hit = _is_excluded(ids, exclude)
            again = int(hit.sum())
            if not again:
                return ids
            ids[hit] = self._from_table(torch.rand(again, dtype=torch.float64, generator=generator, device=ids.device))
        fresh = torch.rand(ids.shape, dtype=torch.float64, generator=generator, device=ids.device)
        return torch.where(_is_excluded(ids, exclude), self._invert_around(exclude, fresh), ids)


@compiled
def _alias_table(probability: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's table by Vose's method: n P(i) = keep[i] + the sum of 1 - keep[j] over all j with alias[j] = i."""
    n = probability.shape[0]
    keep = probability * n / probability.sum()
    alias = np.arange(n)
    small, large = np.empty(n, np.int64), np.empty(n, np.int64)
    num_small, num_large = 0, 0
    for i in range(n):
        if keep[i] < 1.0:
            small[num_small] = i
            num_small += 1
        else:
            large[num_large] = i
            num_large += 1
    while num_small and num_large:
        num_small -= 1
        i, j = small[num_small], large[num_large - 1]
        alias[i] = j
        keep[j] -= 1.0 - keep[i]
        if keep[j] < 1.0:
            num_large -= 1
            small[num_small] = j
            num_small += 1
    # What is left differs from 1 by rounding alone.
    for i in range(num_small):
        keep[small[i]] = 1.0
    for i in range(num_large):
        keep[large[i]] = 1.0
    return keep, alias
