"""In-batch negatives: the classes that were targets of late, with the frequencies that they were seen at."""

from typing import final

import torch
from torch import Generator, Tensor

from .base import check_ids
from .static import _StaticSampler

# Probabilities are whole multiples of about 1 / _UNITS: whole numbers are exact in sums and under `.float()`.
_UNITS = 1 << 52


@final
class InBatchSampler(_StaticSampler):
    """q_i = e/n + (1 - e) f_i, with f_i the share of class i among the targets seen, e = `uniform_share`.

    Classic in-batch negatives are the targets of a batch's other rows: draws from the frequencies of the data, at no
    cost. Yi et al. (RecSys 2019) correct their bias by subtracting from each logit log q_j, estimated from the stream
    of batches. What is drawn from is then not known, only estimated, and Z' is right as far as the estimate is.

    Here the estimate is itself drawn from: the stream of targets fills a table, negatives are draws from the table, and
    `log_q` is the log of what it holds, exact even where it is a poor image of the data. The price is to gather the
    rows of negatives that are not in the batch; shared draws, like in-batch negatives, are one set for all rows. The
    uniform share reaches classes that were no target yet, as in mixed negative sampling (Yang et al., 2020).

    Targets are seen by `observe`, and by draws in training, for which they are what is excluded (shared draws exclude
    nothing and see nothing). The table is renewed by `refresh`, and before a draw in training: when 1, 2, 4, ...
    batches were seen, then every `refresh_every`, O(n) each; else, and in eval(), q stays as it is. With each batch
    what was seen before counts less by `forget`, so f is of about the last 1 / forget batches. Yi et al. average the
    gaps between the batches with a class instead, which tells the same but for how often it occurs in one batch.

    Embeddings and queries play no part: rebuild and update change nothing. A draw is a search in the table, O(log n).
    A state_dict holds frequencies and table, so a loaded sampler goes on as the saved one would.
    """

    frequencies: Tensor  # (n,): of the targets up to the last refresh
    seen: Tensor  # (n,) int64: of those since
    batches_seen: Tensor  # () int64
    batches_counted: Tensor  # () int64: up to the last refresh
    cumulative: Tensor  # (n + 1,) int64: the table, q_i = (cumulative[i + 1] - cumulative[i]) / cumulative[n]

    def __init__(
        self,
        num_classes: int,
        *,
        uniform_share: float = 0.1,
        forget: float = 1e-4,
        refresh_every: int = 100,
        stratified: bool = True,
    ) -> None:
        super().__init__(num_classes, stratified)
        if not 0 < uniform_share <= 1:
            raise ValueError(f"uniform_share: expected a number in (0, 1], got {uniform_share}")
        if not 0 <= forget < 1:
            raise ValueError(f"forget: expected a number in [0, 1), got {forget}")
        if refresh_every < 1:
            raise ValueError(f"refresh_every: expected at least 1, got {refresh_every}")
        self.uniform_share = uniform_share
        self.forget = forget
        self.refresh_every = refresh_every
        self.register_buffer("frequencies", torch.zeros(num_classes, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(num_classes, dtype=torch.int64))
        self.register_buffer("batches_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("batches_counted", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cumulative", torch.zeros(num_classes + 1, dtype=torch.int64))
        self._fill_table()

    @torch.no_grad()
    def observe(self, target: Tensor) -> None:
        """Count a batch of targets, of any shape, -1 for none. The table stays until it is renewed."""
        check_ids("target", target, self.num_classes, lowest=-1)
        self._count(target)

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the table follow what was seen."""
        kept = (1 - self.forget) ** int(self.batches_seen - self.batches_counted)
        self.frequencies.mul_(kept).add_(self.seen)
        self.seen.zero_()
        self.batches_counted.copy_(self.batches_seen)
        self._fill_table()

    def _count(self, target: Tensor) -> None:
        target = target[target >= 0].long()
        if len(target):
            self.seen.index_add_(0, target, torch.ones_like(target))
            self.batches_seen += 1

    def _is_due(self) -> bool:
        counted = int(self.batches_counted)
        return int(self.batches_seen) - counted >= min(max(counted, 1), self.refresh_every)

    def _fill_table(self) -> None:
        q = torch.full_like(self.frequencies, 1 / self.num_classes, dtype=torch.float64)
        if bool(self.frequencies.any()):
            share = self.frequencies.double() / self.frequencies.double().sum()
            q.mul_(self.uniform_share).add_(share, alpha=1 - self.uniform_share)
        units = (q * _UNITS).long().clamp_(min=1)
        self.cumulative[1:] = units.cumsum(0)

    def _mass(self, ids: Tensor) -> Tensor:
        return (self.cumulative[ids + 1] - self.cumulative[ids]).double() / self.cumulative[-1]

    def _cdf(self, ids: Tensor) -> Tensor:
        return self.cumulative[ids].double() / self.cumulative[-1]

    def _inverse_cdf(self, u: Tensor) -> Tensor:
        return torch.searchsorted(self.cumulative, (u * self.cumulative[-1]).long(), right=True) - 1

    def _pick(self, exclude: Tensor, uniforms: Tensor, generator: Generator | None) -> Tensor:
        if self.training and self._is_due():
            self.refresh()
        ids = self._invert_around(exclude, uniforms)
        if self.training:
            self._count(exclude)
        return ids
