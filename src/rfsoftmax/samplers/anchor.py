"""The anchor: the mean of the queries seen, the weights it gives the classes and the order these put them in."""

from typing import Any

import torch
from torch import Tensor

from ..tree import CHUNK_ELEMENTS, room
from .base import Sampler, check_dim

# Queries kept in `recent`, and how many of them a batch replaces.
RECENT, RECENT_PER_BATCH = 64, 8


class AnchoredSampler(Sampler):
    """A sampler that splits o_i = tau h.c_i + b_i at an anchor h_bar into tau h_bar.c_i + b_i + tau (h - h_bar).c_i.

    The first part needs no approximation: it is the log of a class weight a_i = exp(tau h_bar.c_i + b_i). `_observe`
    follows the mean of the queries. `_arrange`, at a rebuild, moves the anchor there and puts the classes in the order
    of their weights, heaviest first, so that blocks of them are alike; in between both stay. A state_dict holds both,
    and the first rebuild after loading one keeps them, so q is then as it was saved.

    With `half_rows` the copy of the class embeddings is kept in bfloat16, which halves what a draw reads of it.
    Features and leaves are then those of the rounded rows, so that all stays consistent and q exact.

    Without `anchored` the anchor stays 0, a weight is e^{b_i} and the classes keep the order of their ids.
    """

    anchor: Tensor  # (d,)
    query_mean: Tensor  # (d,)
    batches_seen: Tensor  # () int64
    recent: Tensor  # (RECENT, d): some queries of the last batches, if the sampler has a use for them
    bias: Tensor  # (n,): b_i, in the order of positions
    order: Tensor  # (n,) int64: the class at each position
    position: Tensor  # (n + 1,) int64: the position of each class; the last sends -1, no class, to -1, no position

    def __init__(
        self,
        dim: int,
        tau: float,
        stratified: bool,
        anchored: bool = True,
        keeps_recent: bool = False,
        half_rows: bool = False,
    ) -> None:
        super().__init__(0, stratified)
        self.dim = dim
        self.tau = tau
        self.anchored = anchored
        self.half_rows = half_rows
        self.keep_order = False
        self.register_buffer("anchor", torch.zeros(dim))
        self.register_buffer("query_mean", torch.zeros(dim))
        self.register_buffer("batches_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("recent", torch.zeros(RECENT if keeps_recent else 0, dim), persistent=keeps_recent)
        self.register_buffer("bias", torch.empty(0), persistent=False)
        self.register_buffer("order", torch.empty(0, dtype=torch.int64))
        self.register_buffer("position", torch.empty(0, dtype=torch.int64), persistent=False)

    def _arrange(self, weight: Tensor, bias: Tensor) -> Tensor:
        """A copy of the rows of weight (n, d) in the order of positions, after moving anchor and order if they may."""
        check_dim("weight", weight, self.dim)
        rows, bias = weight.to(self.anchor), bias.to(self.anchor)
        ids = torch.arange(len(rows), device=rows.device)
        if not self.keep_order or len(self.order) != len(rows):
            self.order = ids
            if self.anchored:
                self.anchor.copy_(self.query_mean)
                self.order = self._log_weight(rows, bias).argsort(descending=True, stable=True)
        self.keep_order = False
        self.position = self.order.new_full((len(rows) + 1,), -1)
        self.position[self.order] = ids
        self.bias = bias[self.order]
        arranged = room(rows.shape, rows.new_empty(0, dtype=torch.bfloat16) if self.half_rows else rows)
        step = max(1, CHUNK_ELEMENTS // self.dim)
        for start in range(0, len(rows), step):
            arranged[start : start + step] = rows[self.order[start : start + step]]
        return arranged

    def _log_weight(self, rows: Tensor, bias: Tensor) -> Tensor:
        """log a_i (k,) of rows (k, d) with bias (k,)."""
        return torch.addmv(bias, rows.to(bias), self.anchor, alpha=self.tau)

    def _observe(self, hidden: Tensor) -> None:
        """In training, move the mean of queries: that of all at first, of about the last hundred batches later."""
        if not self.training or not (self.anchored or len(self.recent)):
            return
        seen, hidden = int(self.batches_seen), hidden.to(self.query_mean)
        if len(self.recent):
            first = seen * RECENT_PER_BATCH % RECENT
            some = torch.linspace(0, len(hidden) - 1, RECENT_PER_BATCH).long()
            self.recent[first : first + RECENT_PER_BATCH] = hidden[some]
        if self.anchored:
            self.query_mean.lerp_(hidden.mean(0), max(1 / (seen + 1), 0.01))
        self.batches_seen += 1

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the saved order at its own length. Sums are not saved: the next rebuild keeps order and anchor."""
        saved = state_dict.get(prefix + "order")
        if saved is not None:
            self.order = torch.empty_like(saved, device=self.order.device)
            self.keep_order = True
            self.num_classes = 0
        super()._load_from_state_dict(state_dict, prefix, *rest)
