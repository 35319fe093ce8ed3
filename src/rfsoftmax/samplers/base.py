"""What every sampler promises, and the checks and random numbers they share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..features import no_autocast
from ..uniforms import stratified_uniforms
from .rows import ClassRows

DEFAULT_TAU = 1 / 0.3**2


class Samples(NamedTuple):
    """Drawn classes `ids` (B, m), int64, and `log_q` (B, m), float32, the exact log probability of each draw."""

    ids: Tensor
    log_q: Tensor


class Sampler(nn.Module, ABC):
    """Draws negative classes; final classes fill in the four hooks `_rebuild`, `_update`, `_draw` and `_log_prob`.

    The law that all of them keep: draws follow exp(log_q), exp(log_prob) over all classes sums to 1, and excluded
    classes have probability 0. Embeddings may be stale or a distribution rough, but then `log_q` is that of the stale
    or rough distribution, so that Z' = e^{o_t} + sum_i e^{o_i} / (m q_i) stays unbiased.

    With `stratified` the m uniforms of a query are one from each of m equal strata, in an order that is uniformly
    random by rotation: every sample by itself still follows q, and the variance of Z' falls.

    The logits are o_i = tau h.c_i + b_i. A sampler that takes no account of the biases b_i says so.

    `num_classes` is 0 until the first `rebuild` for samplers that learn it there.
    """

    def __init__(self, num_classes: int, stratified: bool) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.stratified = stratified
        self.draws_per_block = 1  # more for samplers that have `_draw_several`
        self.follow_every = 1  # of so many queries' negatives a head has those of one looked at, if they are many

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Sampler":
        # Less precision is for the model around: sums and tables keep theirs, for log_q to be exact.
        def convert(t: Tensor) -> Tensor:
            converted = fn(t)
            return t.to(converted.device) if converted.itemsize < t.itemsize else converted

        super()._apply(convert, recurse)
        return self

    @torch.no_grad()
    def rebuild(self, weight: Tensor, bias: Tensor | None = None, normalize: bool = False) -> None:
        """Start afresh from all class embeddings, weight (n, d), and what the logits of the classes add, bias (n,).

        With `normalize` they are the rows of weight brought to unit length, without a copy of all of them at once.
        """
        check_matrix("weight", weight)
        if bias is None:
            bias = weight.new_zeros(1).expand(len(weight))  # one number in memory
        _check_bias(bias, weight)
        if self.num_classes and weight.shape[0] != self.num_classes:
            raise ValueError(f"weight: expected {self.num_classes} rows, one a class, got {weight.shape[0]}")
        with _lasting(weight.device):
            self._rebuild(ClassRows(weight, normalize), bias)

    @torch.no_grad()
    def update(self, ids: Tensor, rows: Tensor, bias: Tensor | None = None) -> None:
        """Take in that classes `ids` (k,), all different, now have embeddings `rows` (k, d) and biases `bias` (k,).

        Without `bias` they keep those that they have.
        """
        self._require_classes()
        check_matrix("rows", rows, empty=True)
        if bias is not None:
            _check_bias(bias, rows)
        check_ids("ids", ids, self.num_classes)
        if ids.dim() != 1 or len(ids) != len(rows):
            raise ValueError(f"ids: expected shape ({len(rows)},), one for each of rows, got {tuple(ids.shape)}")
        if len(ids.unique()) != len(ids):
            raise ValueError("ids: expected each class once, got some twice")
        if len(ids):
            with _lasting(rows.device):
                self._update_moved(ids.long(), rows, bias)

    def sample(
        self,
        hidden: Tensor,
        num: int,
        exclude: Tensor | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
    ) -> Samples:
        """Draw `num` classes for each row of hidden (B, d), with replacement, never one of `exclude`.

        `exclude` is (B,) or (B, P), with -1 for none. With `shared` one set of shape (1, num) is drawn for the whole
        batch, from one distribution that stands for the mixture of the rows' own; nothing can be excluded from it.
        """
        if num < 1:
            raise ValueError(f"num: expected at least 1, got {num}")
        excluded = self._check(hidden, exclude, shared)
        return self._sample(hidden, num, excluded, generator, [len(hidden)] if shared else None)

    @torch.no_grad()
    def _sample(
        self, hidden: Tensor, num: int, exclude: Tensor, generator: torch.Generator | None, sizes: list[int] | None
    ) -> Samples:
        """`sample` without its checks; exclude is (B, E) int64, -1 for none, no class twice.

        With `sizes`, which sum to B, so many rows of hidden after another share a set: ids and log_q are (sets, num),
        and exclude is (1, 0).
        """
        rows, each = len(hidden) if sizes is None else len(sizes), 1
        if self.stratified:
            each = 1 if sizes is not None else self.draws_per_block
            uniforms = stratified_uniforms(rows, -(-num // each), generator, hidden.device)
        else:
            uniforms = torch.rand(rows, num, dtype=torch.float64, generator=generator, device=hidden.device)
            uniforms, places = uniforms.sort(dim=1)
        with no_autocast(hidden.device):
            self._observe(hidden)
            if sizes is not None:
                ids, log_q = self._draw_sets(hidden, exclude, uniforms, generator, sizes)
            elif each > 1:
                ids, log_q = (drawn[:, :num] for drawn in self._draw_several(hidden, exclude, uniforms, each))
            else:
                ids, log_q = self._draw(hidden, exclude, uniforms, generator, False)
        if not self.stratified:
            source = places.argsort(dim=1)
            ids, log_q = ids.gather(1, source), log_q.gather(1, source)
        return Samples(ids.contiguous(), log_q.float())

    @torch.no_grad()
    def log_prob(self, hidden: Tensor, ids: Tensor, exclude: Tensor | None = None, shared: bool = False) -> Tensor:
        """log q of classes ids (B,) or (B, P), or (1, P) if shared, in the same shape; -inf for excluded ones."""
        excluded = self._check(hidden, exclude, shared)
        check_ids("ids", ids, self.num_classes)
        rows = 1 if shared else len(hidden)
        if ids.dim() not in (1, 2) or len(ids) != rows:
            raise ValueError(f"ids: expected shape ({rows},) or ({rows}, P), got {tuple(ids.shape)}")
        with no_autocast(hidden.device):
            log_q = self._log_prob(hidden, ids.long().reshape(rows, -1), excluded, shared)
        return log_q.float().view(ids.shape)

    def _follow(self, ids: Tensor, weight: Tensor, bias: Tensor | None, normalize: bool) -> float:
        """`update` for those rows of weight (n, d) and bias (n,) that ids (k,) name, repeats allowed, and that moved.

        As in `rebuild`, with `normalize` it is the rows brought to unit length that count. Returns how far logits may
        have moved on average, inf if that is not known.
        """
        ids = ids.unique()
        rows = ClassRows(weight, normalize)[ids]
        if not torch.isfinite(rows.sum()) and bool((bad := ~torch.isfinite(rows).all(1)).any()):
            raise ValueError(f"weight: expected finite values, got NaN or inf in row {int(ids[bad][0])}")
        if bias is not None:
            bias = bias[ids]
            if bool((bad := ~torch.isfinite(bias)).any()):
                raise ValueError(f"bias: expected finite values, got NaN or inf for class {int(ids[bad][0])}")
        with no_autocast(rows.device):
            self._update_moved(ids, rows, bias)
        return math.inf

    def _logit_kind(self) -> tuple[float | None, bool | None]:
        """tau and `absolute` of the logits that q is to be close to; None for one that q does not depend on."""
        return None, None

    def _observe(self, hidden: Tensor) -> None:
        """Take note of a batch of queries (B, d), before a draw for them."""

    def _update_moved(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        moved = self._moved(ids, rows, bias)
        if len(ids := ids[moved]):
            self._update(ids, rows[moved], None if bias is None else bias[moved])

    def _moved(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor | slice:
        """Which of the rows (k, d) of ids (k,) have moved so far that `_update` is to see them."""
        return slice(None)

    @abstractmethod
    def _rebuild(self, weight: ClassRows, bias: Tensor) -> None: ...

    @abstractmethod
    def _update(self, ids: Tensor, rows: Tensor, bias: Tensor | None) -> None:
        """None for biases that stay."""

    @abstractmethod
    def _draw(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, shared: bool
    ) -> tuple[Tensor, Tensor]:
        """ids and log q, both (B, m), for uniforms (B, m); exclude is (B, E), -1 for none, none twice.

        A row of uniforms ascends from its least one on, round its end: sorted, up to where it begins.
        """

    def _draw_several(self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, each: int) -> tuple[Tensor, Tensor]:
        """ids and log q, both (B, each w), for uniforms (B, w): `each` draws one after another share a uniform, and yet
        every one of them by itself follows q."""
        raise NotImplementedError

    def _draw_sets(
        self, hidden: Tensor, exclude: Tensor, uniforms: Tensor, generator: torch.Generator | None, sizes: list[int]
    ) -> tuple[Tensor, Tensor]:
        """ids and log q, both (G, m), for uniforms (G, m): of each set what `_draw` gives, shared by its rows."""
        sets = zip(hidden.split(sizes), uniforms.split(1), strict=True)
        drawn = [self._draw(some, exclude, u, generator, True) for some, u in sets]
        return torch.cat([ids for ids, _ in drawn]), torch.cat([log_q for _, log_q in drawn])

    @abstractmethod
    def _log_prob(self, hidden: Tensor, ids: Tensor, exclude: Tensor, shared: bool) -> Tensor:
        """log q (B, P) of ids (B, P)."""

    def _require_classes(self) -> None:
        if not self.num_classes:
            raise RuntimeError(f"{type(self).__name__} knows no classes yet: call rebuild(weight) first")

    def _check(self, hidden: Tensor, exclude: Tensor | None, shared: bool) -> Tensor:
        self._require_classes()
        check_matrix("hidden", hidden)
        if exclude is None:
            return torch.empty(1 if shared else len(hidden), 0, dtype=torch.int64, device=hidden.device)
        if shared:
            raise ValueError("exclude: expected None with shared=True (mask accidental hits instead), got a tensor")
        check_ids("exclude", exclude, self.num_classes, lowest=-1)
        if exclude.dim() not in (1, 2) or len(exclude) != len(hidden):
            shape = tuple(exclude.shape)
            raise ValueError(f"exclude: expected shape ({len(hidden)},) or ({len(hidden)}, P), got {shape}")
        excluded = once_each(exclude.long().reshape(len(hidden), -1))
        if excluded.shape[1] >= self.num_classes and (excluded >= 0).sum(1).max() >= self.num_classes:
            raise ValueError(f"exclude: expected at least one of {self.num_classes} classes left to draw, got none")
        return excluded


@contextmanager
def _lasting(device: torch.device) -> Iterator[None]:
    """For state that outlives the call: tensors made in inference mode could not be updated outside it."""
    with torch.inference_mode(False), torch.no_grad(), no_autocast(device):
        yield


def once_each(ids: Tensor) -> Tensor:
    """ids (B, P) with all but one of equal entries in a row set to -1."""
    if ids.shape[1] < 2:
        return ids
    ids = ids.sort(dim=1).values
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return ids.masked_fill(repeated, -1)


def check_ids(name: str, ids: Tensor, num_classes: int, lowest: int = 0) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: expected int64 class ids, got {ids.dtype}")
    if ids.numel():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < lowest or high >= num_classes:
            wrong = low if low < lowest else high
            raise ValueError(f"{name}: expected class ids in [{lowest}, {num_classes}), got {wrong}")


def _check_bias(bias: Tensor, rows: Tensor) -> None:
    if bias.shape != rows.shape[:1] or not bias.is_floating_point():
        need = f"floating shape ({len(rows)},), one a row"
        raise ValueError(f"bias: expected {need}, got {tuple(bias.shape)} of {bias.dtype}")
    if not math.isfinite(bias.detach().sum()) and not bool(torch.isfinite(bias).all()):
        row = int((~torch.isfinite(bias)).nonzero()[0])
        raise ValueError(f"bias: expected finite values, got {float(bias[row])} for row {row}")


def check_tau(tau: float) -> None:
    if not 0 < tau < math.inf:
        raise ValueError(f"tau: expected a positive finite number, got {tau}")


def check_dim(name: str, matrix: Tensor | ClassRows, dim: int) -> None:
    if matrix.shape[1] != dim:
        raise ValueError(f"{name}: expected shape (rows, {dim}), got {tuple(matrix.shape)}")


def check_matrix(name: str, matrix: Tensor, empty: bool = False) -> None:
    if not matrix.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {matrix.dtype}")
    if matrix.dim() != 2 or not (empty or len(matrix)):
        raise ValueError(f"{name}: expected shape (rows, dim) with at least one row, got {tuple(matrix.shape)}")
    # One pass without a mask: a sum is finite unless a term is not (or all is near overflow: then look closely).
    if not math.isfinite(matrix.detach().sum()) and not torch.isfinite(matrix).all():
        row = int((~torch.isfinite(matrix).all(1)).nonzero()[0])
        raise ValueError(f"{name}: expected finite values, got NaN or inf in row {row}")
