"""The anchor: the mean of the queries seen, the weights it gives the classes and the order these put them in."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..memory import in_huge_pages, room
from ..tree import Tree
from .base import Sampler, check_dim, check_tau
from .rows import ClassRows, index_dtype, slices

# Queries kept in `recent`, and how many of them a batch replaces.
RECENT, RECENT_PER_BATCH = 64, 8


class AnchoredSampler(Sampler):
    """A sampler that splits o_i = tau h.c_i + b_i at an anchor h_bar into tau h_bar.c_i + b_i + tau (h - h_bar).c_i.

    The first part needs no approximation: it is the log of a class weight a_i = exp(tau h_bar.c_i + b_i). `_observe`
    follows the mean of the queries. `_arrange`, at a rebuild, moves the anchor there and puts the classes in the order
    of their weights, heaviest first, so that blocks of them are alike; in between both stay. A state_dict holds both,
    and the first rebuild after loading one keeps them, so q is then as it was saved.

    Without `anchored` the anchor stays 0, a weight is e^{b_i} and the classes keep the order of their ids.
    """

    anchor: Tensor  # (d,)
    query_mean: Tensor  # (d,)
    batches_seen: Tensor  # () int64
    recent: Tensor  # (RECENT, d): some queries of the last batches, if the sampler has a use for them
    bias: Tensor  # (n,): b_i, in the order of positions
    # Half of the bytes of int64 below 2^31 classes: `_positions` and `_classes` look up in int64.
    order: Tensor  # (n,) int32: the class at each position
    position: Tensor  # (n + 1,) int32: the position of each class; the last sends -1, no class, to -1, no position

    def __init__(
        self,
        dim: int,
        tau: float,
        stratified: bool,
        anchored: bool = True,
        keeps_recent: bool = False,
    ) -> None:
        super().__init__(0, stratified)
        check_tau(tau)
        self.dim = dim
        self.tau = tau
        self.anchored = anchored
        self.keep_order = False
        self.register_buffer("anchor", torch.zeros(dim))
        self.register_buffer("query_mean", torch.zeros(dim))
        self.register_buffer("batches_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("recent", torch.zeros(RECENT if keeps_recent else 0, dim), persistent=keeps_recent)
        self.register_buffer("bias", torch.empty(0), persistent=False)
        self.register_buffer("order", torch.empty(0, dtype=torch.int32))
        self.register_buffer("position", torch.empty(0, dtype=torch.int32), persistent=False)

    def _arrange(self, weight: ClassRows, bias: Tensor, tree: Tree) -> None:
        """Give the tree the rows of weight (n, d) in the order of positions, after moving anchor and order if they may.

        What is there from the last rebuild gives its memory.
        """
        check_dim("weight", weight, self.dim)
        n, bias = len(weight), bias.to(self.anchor)
        self.num_classes = 0  # a rebuild that is broken off leaves nothing to draw from
        if not self.keep_order or len(self.order) != n:
            # The memory of the old ones is for the sort.
            self.order, self.position = self.order.new_empty(0), self.position.new_empty(0)
            order = self._by_weight(weight, bias) if self.anchored else torch.arange(n, device=bias.device)
            self.order = in_huge_pages(torch.empty(n, dtype=index_dtype(n), device=order.device)).copy_(order)
            del order
        self.keep_order = False
        tree.make_room(n, self.dim, self.anchor)
        self.position = room((n + 1,), self.order, self.position)
        self.position[-1] = -1
        self.bias = room((n,), self.anchor, self.bias)
        for part in slices(n, self.dim):
            ids = self.order[part].long()
            tree.put(part, weight[ids])
            self.bias[part] = bias.index_select(0, ids)
            places = torch.arange(part.start, part.stop, dtype=self.order.dtype, device=ids.device)
            self.position.scatter_(0, ids, places)

    def _by_weight(self, weight: ClassRows, bias: Tensor) -> Tensor:
        """The classes, heaviest first and equals by their number, as the moved anchor weighs them: the lower half of
        each number, if n has 32 bits."""
        self.anchor.copy_(self.query_mean)
        n, compact = len(weight), self.anchor.dtype == torch.float32 and self.anchor.device.type == "cpu"
        if not compact or n >= 2**31:
            log_weight = [self._log_weight(rows, bias[part]) for part, rows in weight.chunks()]
            return torch.cat(log_weight).argsort(descending=True, stable=True)
        # One number for weight and class, sorted in place: a third of the memory of argsort, and faster.
        keys = torch.arange(n)
        for part, rows in weight.chunks():
            keys[part] += falling_keys(self._log_weight(rows, bias[part])) << 32
        keys.numpy().sort()
        return keys

    def _positions(self, ids: Tensor) -> Tensor:
        """The position of each of ids, -1 for -1, in their shape."""
        return self.position[ids].long()

    def _classes(self, positions: Tensor) -> Tensor:
        return self.order[positions].long()

    def _log_weight(self, rows: Tensor, bias: Tensor) -> Tensor:
        """log a_i (k,) of rows (k, d) with bias (k,)."""
        return torch.addmv(bias, rows.to(bias), self.anchor, alpha=self.tau)

    def _logit_kind(self) -> tuple[float | None, bool | None]:
        return self.tau, None

    def _observe(self, hidden: Tensor) -> None:
        """In training, move the mean of queries: that of all at first, of about the last hundred batches later."""
        if not self.training or not (self.anchored or len(self.recent)):
            return
        check_dim("hidden", hidden, self.dim)
        seen, hidden = int(self.batches_seen), hidden.to(self.query_mean)
        if len(self.recent):
            first = seen * RECENT_PER_BATCH % RECENT
            kept = self.recent[first : first + RECENT_PER_BATCH]
            torch.index_select(hidden, 0, _spaced(len(hidden), hidden.device), out=kept)
        if self.anchored:
            self.query_mean.lerp_(hidden.mean(0), max(1 / (seen + 1), 0.01))
        self.batches_seen.add_(1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the saved order at its own length. Sums are not saved: the next rebuild keeps order and anchor."""
        saved = state_dict.get(prefix + "order")
        if saved is not None:
            self.order = torch.empty(len(saved), dtype=index_dtype(len(saved)), device=self.order.device)
            self.keep_order = True
            self.num_classes = 0
        super()._load_from_state_dict(state_dict, prefix, *rest)


@functools.lru_cache(maxsize=16)
def _spaced(size: int, device: torch.device) -> Tensor:
    """The places, as far apart as they can be, of the queries in a batch that are kept."""
    return torch.linspace(0, size - 1, RECENT_PER_BATCH, device=device).long()


def falling_keys(x: Tensor) -> Tensor:
    """int64 keys (k,), in 32 bits, that fall as x (k,), float32, rises; equal for equals, also for 0.0 and -0.0."""
    bits = (0.0 - x).view(torch.int32)
    # The bits of a float rise with it from 0 up, and fall below.
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
