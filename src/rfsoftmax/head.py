"""SoftmaxHead: class embeddings, a sampler and a loss in place of `nn.Linear` and `nn.CrossEntropyLoss`."""

import math
import warnings
from typing import Any, Literal, NamedTuple, final, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from . import logit_kernels, losses
from .groups import like_queries, restored
from .memory import in_huge_pages
from .samplers import DEFAULT_TAU, InBatchSampler, Sampler, Samples, make_sampler
from .samplers.anchor import AnchoredSampler
from .samplers.base import check_ids, check_matrix, check_tau
from .targets import Target, as_labels

Negatives = Literal["per_example", "shared"] | int
Loss = Literal["softmax", "absolute", "nce"]
Labels = Literal["pick_all", "pick_one"]
Reduction = Literal["mean", "sum", "none"]

# Classes from which on the tree's nodes come from memory: fewer features then save time, at little chi2.
_MANY_CLASSES = 100_000
# Rows that a visit keeps to see whether the weight has moved.
_NUM_WITNESSES = 64
# Visits kept apart, or `update_every` if that is more.
_MAX_VISITS = 16
# Negatives of a forward below which the sampler looks at all of them.
_LEAST_FOLLOWED = 1024
# How far logits may move on average before the sampler looks: more, and it is to look more often.
_FAR = 1.0
# Forwards until the first rebuild: enough to show the sampler where the queries lie.
_FIRST_ROUND = 16


class _Visit(NamedTuple):
    """The rows that a forward touched, and some of its targets' rows as they were then."""

    ids: Tensor
    witnesses: Tensor
    before: Tensor


@final
class SoftmaxHead(nn.Module):
    """The loss of classifying `hidden` among n classes, o_i = tau h.c_i + b_i, by sampled softmax at a cost free of n.

    In train() the loss is -o_t + log Z' over m sampled negatives, in eval() the exact -o_t + log Z, streamed over the
    classes. In plain PyTorch, up to the sampling:

        F.cross_entropy(tau * F.normalize(hidden) @ F.normalize(weight).T, target)

    - `sampler`: a `Sampler`, or a name for `make_sampler`; by default an anchored `KernelSampler` with 128 orthogonal
      frequencies (64 from 100,000 classes on), exact leaves of 64 classes and a nu that is chosen at each rebuild.
    - `bias` adds a learned b_i, 0 at first, to a class's logit. Samplers with an anchor follow it exactly.
    - `normalize` gives h and c_i unit length, as the paper does. tau is then the inverse temperature.
    - `negatives`: "per_example" draws m for each row; "shared" one set of m for the whole batch, which makes the logits
      one matrix product, with the row's own positives masked; a number G a set for each of G groups of like rows,
      which lies in between, in cost and in how well the set suits a row.
    - `loss`: "softmax", "absolute" (logits |o_i|, for the quadratic kernel) or "nce" (noise-contrastive estimation).
    - `labels`: for multi-label targets, "pick_all" sums the losses of a row's positives, "pick_one" trains on one
      drawn at random. All positives are kept out of the negatives.
    - `sparse`: the gradient of `weight` holds only the rows touched; take SparseAdam, SGD or Adagrad.

    The sampler follows the weight without a hook in the optimizer. A forward touches rows (targets and negatives) and
    only they get a gradient; before a later draw, once the weight has changed, the sampler is given those rows anew
    (of thousands of negatives a part, if it has a `follow_every`).
    `update_every` forwards are collected first. Every `rebuild_every` forwards (by default n / 100, at least 1,000) it
    is built afresh, and more often in the beginning (after 16, 80, 336, ...). This also takes in rows that moved
    without being touched: by momentum, weight decay, ties to other layers or an assignment. Call `rebuild()` to have it
    at once. A sampler that lags behind is rougher, never wrong.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        sampler: Sampler | str | None = None,
        num_negatives: int | None = None,
        tau: float = DEFAULT_TAU,
        *,
        bias: bool = False,
        normalize: bool = True,
        negatives: Negatives = "per_example",
        sparse: bool = True,
        loss: Loss = "softmax",
        labels: Labels = "pick_all",
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        update_every: int = 1,
        rebuild_every: int | None = None,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim: expected at least 1, got {dim}")
        num_negatives = checked_num_negatives(num_negatives, num_classes)
        check_tau(tau)
        _check_negatives(negatives)
        _check_choice("loss", loss, Loss)
        _check_choice("labels", labels, Labels)
        _check_choice("reduction", reduction, Reduction)
        if bias and loss == "absolute":
            raise ValueError("bias: expected False with loss='absolute', whose logits are |tau h.c_i|, got True")
        if update_every < 1:
            raise ValueError(f"update_every: expected at least 1, got {update_every}")
        if rebuild_every is not None and rebuild_every < 1:
            raise ValueError(f"rebuild_every: expected at least 1, got {rebuild_every}")
        self.dim = dim
        self.num_classes = num_classes
        self.num_negatives = num_negatives
        self.tau = tau
        self.normalize = normalize
        self.negatives = negatives
        self.sparse = sparse
        self.loss = loss
        self.labels = labels
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.update_every = update_every
        self.rebuild_every = rebuild_every or max(1000, num_classes // 100)
        weight = in_huge_pages(torch.empty(num_classes, dim))
        self.weight = nn.Parameter(weight.normal_().div_(math.sqrt(dim)))
        self.bias = nn.Parameter(torch.zeros(num_classes)) if bias else None
        if sampler is None or isinstance(sampler, str):
            options: dict[str, Any] = {"name": sampler} if sampler else default_sampler(num_classes)
            sampler = make_sampler(**options, num_classes=num_classes, dim=dim, tau=tau, absolute=loss == "absolute")
        self.sampler = checked_sampler(sampler, num_classes, dim, tau, loss == "absolute")
        # What the sampler has not seen yet: forwards whose rows may have moved since.
        self._visits: list[_Visit] = []
        self._forwards = 0  # since the last rebuild
        self._all_forwards = 0
        self._following = 1  # of so many queries the negatives of one are looked at
        self._stale = True

    def forward(self, hidden: Tensor, target: Target, *, generator: Generator | None = None) -> Tensor:
        """The loss of hidden (..., d) and target: classes (...), padded (B, P), or a pair (indices, offsets).

        Reduced as in `F.cross_entropy`; "none" gives a loss of shape (...). Rows whose target is `ignore_index`, or has
        no label, count for nothing.
        """
        batch_shape = hidden.shape[:-1]
        queries = self._queries(hidden)
        labels = as_labels(target, batch_shape, self.num_classes, self.ignore_index)
        kept = (labels >= 0).any(1)
        if not bool(kept.all()):
            queries, labels = queries[kept], labels[kept]
        if not len(labels):
            # No row, but a graph to go backward through.
            loss = losses.gathered_logits(queries, self.weight, labels, sparse=self.sparse).sum(1)
        elif self.training:
            loss = self._sampled_loss(queries, labels, generator)
        else:
            loss = losses.full_softmax_loss(
                queries, self.weight, labels, labels=self.labels, reduction="none", **self._logit_kind
            )
        if self.reduction == "none":
            return loss.new_zeros(len(kept)).masked_scatter(kept, loss).view(batch_shape)
        return losses.reduce(loss, self.reduction)

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Exact log p of classes ids (..., ) or (..., P) given hidden (..., d), in the shape of ids."""
        queries = self._queries(hidden)
        check_ids("ids", ids, self.num_classes)
        if ids.shape[: hidden.dim() - 1] != hidden.shape[:-1] or ids.dim() > hidden.dim():
            need = f"{tuple(hidden.shape[:-1])} or with one more dimension"
            raise ValueError(f"ids: expected shape {need}, got {tuple(ids.shape)}")
        logits = losses.gathered_logits(queries, self.weight, ids.reshape(len(queries), -1), **self._logit_kind)
        log_z = losses.streamed_logsumexp(queries, self.weight, **self._logit_kind)
        return (logits - log_z.unsqueeze(1)).view(ids.shape)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits and their classes, both (..., k), of hidden (..., d), streamed over the classes."""
        if not 1 <= k <= self.num_classes:
            raise ValueError(f"k: expected 1 to {self.num_classes}, got {k}")
        queries = self._queries(hidden)
        scores, ids = (
            queries.new_empty(len(queries), 0),
            torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device),
        )
        for start, logits in losses.logit_chunks(queries, self.weight, **self._logit_kind):
            some, places = logits.topk(min(k, logits.shape[1]), dim=1)
            scores, ids = torch.cat([scores, some], 1), torch.cat([ids, places + start], 1)
            scores, best = scores.topk(min(k, scores.shape[1]), dim=1)
            ids = ids.gather(1, best)
        return scores.view(*hidden.shape[:-1], k), ids.view(*hidden.shape[:-1], k)

    def rebuild(self) -> None:
        """Build the sampler from the weight as it is now."""
        # The sampler's state outlives this call: tensors made in inference mode could not be updated outside it.
        with torch.inference_mode(False), torch.no_grad():
            self.sampler.rebuild(self.weight, self.bias, self.normalize)
        self._forwards = 0
        # What still waits for its step will need an update after it; no older than a round, lest they pile up.
        self._visits = self._visits[self._num_moved() :][-self.rebuild_every :]
        self._stale = False

    def extra_repr(self) -> str:
        mode = f"num_negatives={self.num_negatives}, negatives={self.negatives!r}, loss={self.loss!r}"
        return f"dim={self.dim}, num_classes={self.num_classes}, tau={self.tau:g}, normalize={self.normalize}, {mode}"

    @property
    def _logit_kind(self) -> dict[str, Any]:
        return {
            "bias": self.bias,
            "tau": self.tau,
            "normalize": self.normalize,
            "absolute": self.loss == "absolute",
        }

    def _queries(self, hidden: Tensor) -> Tensor:
        """hidden as (N, d), checked, in float32 or better, of unit length if so asked."""
        if hidden.dim() < 1 or hidden.shape[-1] != self.dim:
            raise ValueError(f"hidden: expected shape (..., {self.dim}), got {tuple(hidden.shape)}")
        rows = hidden.reshape(-1, self.dim)
        check_matrix("hidden", rows)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return F.normalize(rows, dim=1) if self.normalize else rows

    def _sampled_loss(self, queries: Tensor, labels: Tensor, generator: Generator | None) -> Tensor:
        """(N,) losses over sampled negatives, for labels (N, P) with at least one in each row."""
        self._freshen()
        order, sizes = self._sets(queries.detach())
        return restored(self._loss_of_sets(queries[order], labels[order], sizes, generator), order)

    def _sets(self, queries: Tensor) -> tuple[Tensor | slice, list[int] | None]:
        """An order of queries (N, d), and how many in it share a set of negatives; None if each has its own."""
        if self.negatives == "per_example":
            return slice(None), None
        if self.negatives == "shared":
            return slice(None), [len(queries)]
        return like_queries(queries, self.negatives)

    def _loss_of_sets(
        self, queries: Tensor, labels: Tensor, sizes: list[int] | None, generator: Generator | None
    ) -> Tensor:
        """The losses (N,) where each row has negatives of its own, or, with sizes, so many one after another a set."""
        targets = labels if self.labels == "pick_all" else _pick_one(labels, generator)
        if self.loss == "nce" and targets.shape[1] > 1:
            raise ValueError("target: expected one class a row with loss='nce' and labels='pick_all', got several")
        samples = self._draw(queries, labels, sizes, generator)
        self._touch(samples.ids, labels)
        target_logits, negative_logits = self._logits(queries, labels, targets, samples.ids, sizes)
        log_q = losses.repeated(samples.log_q, sizes)
        if self.loss == "nce":
            target_log_q = self._target_log_q(queries.detach(), targets, sizes)
            return losses.nce_loss(target_logits[:, 0], negative_logits, target_log_q, log_q, reduction="none")
        loss = losses.sampled_softmax_loss(target_logits, negative_logits, log_q, reduction="none")
        return losses.reduce_labels(loss, targets >= 0, "pick_all")

    def _target_log_q(self, queries: Tensor, targets: Tensor, sizes: list[int] | None) -> Tensor:
        """log q (N,) of targets (N, 1) under the distribution that their negatives are from."""
        if sizes is None:
            return self.sampler.log_prob(queries, targets).view(-1)
        sets = zip(queries.split(sizes), targets.split(sizes), strict=True)
        return torch.cat([self.sampler.log_prob(some, own.T, shared=True).view(-1) for some, own in sets])

    def _logits(
        self, queries: Tensor, labels: Tensor, targets: Tensor, ids: Tensor, sizes: list[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Logits (N, P) of targets and (N, m) of the negatives ids, where a shared one that is a label has -inf."""
        kind = {**self._logit_kind, "sparse": self.sparse}
        # Padding stands for another label of its row: what nothing touches gets no gradient, not even one of 0.
        targets = torch.where(targets < 0, targets.amax(1, keepdim=True), targets)
        gathered = logit_kernels if logit_kernels.suits(queries, self.weight) else losses
        if sizes is None:
            both = gathered.gathered_logits(queries, self.weight, torch.cat([targets, ids], 1), **kind)
            target_logits, negative_logits = both.split([targets.shape[1], ids.shape[1]], 1)
            return target_logits, negative_logits
        target_logits = gathered.gathered_logits(queries, self.weight, targets, **kind)
        gather = gathered.gathered_rows
        negative_logits = losses.shared_logits(queries, self.weight, ids, sizes=sizes, gather=gather, **kind)
        if self.loss == "nce":
            return target_logits, negative_logits
        hits = (labels.unsqueeze(-1) == losses.repeated(ids, sizes).unsqueeze(1)).any(1)
        return target_logits, negative_logits.masked_fill(hits, -torch.inf)

    def _draw(self, queries: Tensor, labels: Tensor, sizes: list[int] | None, generator: Generator | None) -> Samples:
        if sizes is not None or self.loss == "nce":
            # No label is kept out of a shared set, nor of NCE's noise, whose odds are against q over all classes.
            for part in self.sampler.modules():
                if isinstance(part, InBatchSampler) and part.training:
                    part.observe(labels)
            labels = labels[: None if sizes is None else 1, :0]
        elif labels.shape[1] >= self.num_classes and bool(((labels >= 0).sum(1) >= self.num_classes).any()):
            raise ValueError(f"target: expected a class left for a negative in each row, got all {self.num_classes}")
        return self.sampler._sample(queries.detach(), self.num_negatives, labels, generator, sizes)

    def _freshen(self) -> None:
        """Let the sampler see the rows that changed since its last look."""
        if self._stale or not self.sampler.num_classes:
            forwards = self._forwards
            self.rebuild()
            self._forwards = forwards  # a loaded head goes on counting where the saved one was
        before = self._all_forwards - self._forwards
        if self._forwards >= min(self.rebuild_every, _FIRST_ROUND + 3 * before):
            self.rebuild()
        elif len(self._visits) >= self.update_every and (num_moved := self._num_moved()):
            with torch.inference_mode(False), torch.no_grad():
                ids = torch.cat([visit.ids.to(self.weight.device) for visit in self._visits[:num_moved]])
                shift = self.sampler._follow(ids, self.weight, self.bias, self.normalize)
            del self._visits[:num_moved]
            if shift > _FAR:
                self._following = max(1, self._following // 2)
            elif shift < _FAR / 2:
                self._following = min(2 * self._following, self.sampler.follow_every)

    def _num_moved(self) -> int:
        """How many visits, from the first on, have had an optimizer's step after them.

        Seen by the values: fused optimizers and those that write to `.data` leave the weight's version as it is. A
        visit that still waits for its step, as in gradient accumulation, is not to be forgotten.
        """
        for num, (_, witnesses, before) in reversed(list(enumerate(self._visits, 1))):
            if not torch.equal(self._witnessed(witnesses.to(self.weight.device)), before.to(self.weight)):
                return num
        return 0

    def _witnessed(self, ids: Tensor) -> Tensor:
        rows = self.weight.detach().index_select(0, ids)
        return rows if self.bias is None else torch.cat([rows, self.bias.detach()[ids].unsqueeze(1)], 1)

    def _touch(self, ids: Tensor, labels: Tensor) -> None:
        """Take note of the negatives ids (B, m), or as many as the sampler is to look at, and of the labels (B, P)."""
        every = min(self._following, 1 + ids.numel() // _LEAST_FOLLOWED)
        ids = ids[self._all_forwards % every :: every]
        self._forwards += 1
        self._all_forwards += 1
        trained = self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if trained and torch.is_grad_enabled():
            positives = labels[:, 0] if labels.shape[1] == 1 else labels[labels >= 0]
            witnesses = positives[:_NUM_WITNESSES]
            visit = _Visit(torch.cat([ids.flatten(), positives]), witnesses, self._witnessed(witnesses))
            if len(self._visits) >= max(_MAX_VISITS, self.update_every):
                # Forwards without a step, or many to a step: they count as moved as soon as this one has.
                visit = visit._replace(ids=torch.cat([*(each.ids for each in self._visits), visit.ids]).unique())
                self._visits.clear()
            self._visits.append(visit)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self._forwards, self._all_forwards, self._following])

    def set_extra_state(self, state: Tensor) -> None:
        self._forwards, self._all_forwards, self._following = (int(count) for count in state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """As torch does; but with a tensor of another shape, which torch will report, all others stay as they are."""
        own = {name: value for name, value in self.state_dict(prefix=prefix).items() if name in state_dict}
        misfit = next((name for name, value in own.items() if not _fits(value, state_dict[name])), None)
        if misfit is not None:
            state_dict.update({name: value for name, value in own.items() if name != misfit})
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._stale = self._stale or misfit is None


def default_sampler(num_classes: int) -> dict[str, Any]:
    """The name and options for `make_sampler` of the best sampler by measurement (docs/samplers.md)."""
    return {
        "name": "orf",
        "num_features": 128 if num_classes < _MANY_CLASSES else 64,
        "anchor": True,
        "nu": "auto",
        "tolerance": 0.1,
        "byte_rows": True,
        "draws_per_block": 4,
        "follow_every": 32,
    }


def checked_num_negatives(num_negatives: int | None, num_classes: int) -> int:
    """num_negatives, or its default, if it is one for so many classes."""
    if num_classes < 2:
        raise ValueError(f"num_classes: expected at least 2, got {num_classes}")
    if num_negatives is None:
        return min(100, num_classes - 1)
    if not 1 <= num_negatives < num_classes:
        need = f"1 to {num_classes - 1}, fewer than the classes (else use the full softmax)"
        raise ValueError(f"num_negatives: expected {need}, got {num_negatives}")
    return num_negatives


def checked_sampler(sampler: Sampler, num_classes: int, dim: int, tau: float, absolute: bool) -> Sampler:
    """The sampler, if it is one for so many classes of this dim; with a warning if it is one for other logits."""
    if not isinstance(sampler, Sampler):
        raise TypeError(f"sampler: expected a Sampler or the name of one, got {type(sampler).__name__}")
    if sampler.num_classes not in (0, num_classes):
        raise ValueError(f"sampler: expected one for {num_classes} classes, got one for {sampler.num_classes}")
    if isinstance(sampler, AnchoredSampler) and sampler.dim != dim:
        raise ValueError(f"sampler: expected one of dim {dim}, got one of dim {sampler.dim}")
    for part in sampler.modules():
        if isinstance(part, Sampler) and (misfit := _misfit(part, tau, absolute)):
            warnings.warn(misfit, stacklevel=3)
            break
    return sampler


def _misfit(sampler: Sampler, tau: float, absolute: bool) -> str:
    """What to say of a sampler for other logits than those with this tau and `absolute`; nothing of the right one."""
    own_tau, own_absolute = sampler._logit_kind()
    if own_tau is not None and not math.isclose(own_tau, tau, rel_tol=1e-3):
        need, found = f"tau={tau!r}", f"tau={own_tau!r}"
    elif own_absolute not in (None, absolute):
        need, found = f"absolute={absolute}", f"absolute={own_absolute}"
    else:
        return ""
    return f"sampler: expected {need} as in the head, else its draws are poor: make_sampler(..., {need}); got {found}"


def _pick_one(labels: Tensor, generator: Generator | None) -> Tensor:
    """One of the labels of each row, (N, 1), all equally likely."""
    return labels.gather(1, torch.multinomial((labels >= 0).float(), 1, generator=generator))


def _fits(own: Any, saved: Any) -> bool:
    """Whether torch will load it. Tensors that a sampler makes at its first rebuild are empty before and fit any."""
    if not isinstance(own, Tensor) or not isinstance(saved, Tensor):
        return True
    return own.shape == saved.shape or not own.numel() or not saved.numel()


def _check_negatives(negatives: Negatives) -> None:
    is_number = isinstance(negatives, int) and not isinstance(negatives, bool) and negatives >= 1
    if negatives not in ("per_example", "shared") and not is_number:
        raise ValueError(f"negatives: expected 'per_example', 'shared' or a number of groups, got {negatives!r}")


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}: expected one of {get_args(choices)}, got {value!r}")
