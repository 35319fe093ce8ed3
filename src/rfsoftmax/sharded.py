"""ShardedSoftmaxHead: the head with its classes split over the processes of `torch.distributed`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from . import losses
from .groups import restored
from .head import (
    Labels,
    Loss,
    Negatives,
    Reduction,
    SoftmaxHead,
    _check_choice,
    _pick_one,
    checked_num_negatives,
    checked_sampler,
    default_sampler,
)
from .ranks import Ranks, deliver, gather, total
from .samplers import DEFAULT_TAU, Sampler, make_sampler
from .samplers.base import check_ids
from .shards import allocate, class_range, part, whole
from .targets import Target, as_labels

Allocation = Literal["mass", "even"]

# Of the mean of the ranks' shares, what the last step counts for, once there are enough of them.
_NEWEST = 0.05


class _Batch(NamedTuple):
    """The rows of all ranks, one rank after another, in ids of all classes, -1 for none."""

    queries: Tensor  # (N, d), with a gradient
    labels: Tensor  # (N, P)
    targets: Tensor  # (N, T): those of the labels to learn
    sizes: list[int]  # rows of each rank


@final
class ShardedSoftmaxHead(nn.Module):
    """`SoftmaxHead` over the ranks of a process group: R of them have n / R classes each, and what belongs to these.

    Every rank calls every method, each with a batch of its own, of any size. Rank r holds ceil(n / R) classes, the last
    one what is left, as `classes` tells: embeddings, optimizer state and sampler. Queries and labels go to all ranks,
    each draws m_r negatives from its classes, with log q over these, and for each query

        Z' = e^{o_t} + sum_r sum_i e^{o_i} / (m_r q_{r,i})

    is unbiased, a stratified estimate. The logs of a rank's sums go to the rank of the query, which alone adds them up,
    by a log-sum-exp. Nothing that is sent depends on n.

    The arguments are those of `SoftmaxHead`, and

    - `sampler`: a name for `make_sampler`, or None; a `Sampler` of this rank's classes; or what makes one of their
      range, such as `lambda classes: rf.make_sampler("unigram", num_classes=len(classes), dim=d,
      counts=counts[classes.start : classes.stop])`.
    - `num_negatives` is m, the sum of the m_r; each rank draws at least one.
    - `allocation`: "mass" gives rank r draws by its share of Z', averaged over the steps before, which lowers the
      variance of Z'; "even" as many as the others, so that all have the same work. log q is exact for both.
    - `process_group`: by default all processes; without `torch.distributed` this one alone.

    The loss is for an encoder in `DistributedDataParallel`, with the head beside it and not in it. "mean" and "sum" are
    over the rows of all ranks, and all ranks return the same number; weight and bias get its gradient, and hidden gets
    R times its gradient, as DDP takes the mean over ranks: the encoder then has the gradient that it would have in a
    single process with all rows. With "none" a rank returns the losses of its rows, and what counts is the mean over
    ranks of what they make of them.

    Random numbers: each rank has a stream of its own, from torch's seed and its rank, for its embeddings, its sampler
    and its draws; a `generator` given to `forward` must differ between ranks.

    A state_dict holds weight and bias as DTensors, so `torch.distributed.checkpoint` loads them on another number of
    ranks; a whole weight (n, d), such as a `SoftmaxHead` has, can be loaded too. Samplers start afresh after it.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        sampler: Sampler | str | Callable[[range], Sampler] | None = None,
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
        allocation: Allocation = "mass",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        num_negatives = checked_num_negatives(num_negatives, num_classes)
        _check_choice("allocation", allocation, Allocation)
        self.ranks = Ranks(process_group)
        self.classes = class_range(num_classes, self.ranks)
        self.dim = dim
        self.num_classes = num_classes
        self.num_negatives = num_negatives
        self.sparse = sparse
        self.loss = loss
        self.labels = labels
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.allocation = allocation
        # All rebuild at once: a rank that did so alone would keep the others waiting.
        if rebuild_every is None:
            rebuild_every = max(1000, -(-num_classes // self.ranks.num) // 100)
        own = len(self.classes)
        # One rank alone takes all random numbers from torch, as SoftmaxHead does.
        self._seed = int(torch.randint(2**62, ())) + self.ranks.rank if self.ranks.num > 1 else None
        with _seeded(self._seed):
            self.shard = SoftmaxHead(
                dim,
                max(2, own),  # a head of its own has no less; a shard may
                "uniform",
                1,
                tau,
                bias=bias,
                normalize=normalize,
                negatives=negatives,
                sparse=sparse,
                loss=loss,
                labels=labels,
                reduction=reduction,
                update_every=update_every,
                rebuild_every=rebuild_every,
            )
            named = default_sampler(num_classes) if sampler is None else sampler
            made = _made_sampler(named, self.classes, dim, tau, loss == "absolute")
        self.shard.sampler = checked_sampler(made, own, dim, tau, loss == "absolute")
        self.shard.num_classes = own
        if own == 1:
            self.shard.weight = nn.Parameter(self.shard.weight.detach()[:1])
            self.shard.bias = None if self.shard.bias is None else nn.Parameter(self.shard.bias.detach()[:1])
        self._generator: Generator | None = None
        self._shares = torch.full((self.ranks.num,), 1 / self.ranks.num, dtype=torch.float64)
        self._num_shares = 0
        self.register_state_dict_post_hook(_give_state)
        self.register_load_state_dict_pre_hook(_take_state)

    @property
    def weight(self) -> nn.Parameter:
        """The embeddings (len(classes), d) of this rank's classes."""
        return self.shard.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The biases (len(classes),) of this rank's classes."""
        return self.shard.bias

    @property
    def tau(self) -> float:
        return self.shard.tau

    @property
    def normalize(self) -> bool:
        return self.shard.normalize

    @property
    def negatives(self) -> Negatives:
        return self.shard.negatives

    @property
    def sampler(self) -> Sampler:
        """The sampler of this rank's classes, which it numbers from 0."""
        return self.shard.sampler

    def forward(self, hidden: Tensor, target: Target, *, generator: Generator | None = None) -> Tensor:
        """The loss of all ranks' hidden (..., d) and target, in the forms that `SoftmaxHead.forward` takes."""
        queries = self._queries(hidden)
        labels = as_labels(target, hidden.shape[:-1], self.num_classes, self.ignore_index)
        kept = (labels >= 0).any(1)
        if not bool(kept.all()):
            queries, labels = queries[kept], labels[kept]
        generator = generator or self._own_generator(queries.device)
        picks = self.training and self.labels == "pick_one"
        batch, shares = self._gather(queries, labels, _picked(labels, generator) if picks else None)
        if not len(batch.labels):
            # No row, but a graph to go backward through.
            loss = losses.gathered_logits(batch.queries, self.weight, batch.labels, sparse=self.sparse).sum(1)
        elif self.training:
            loss = self._sampled_loss(batch, allocate(self.num_negatives, shares)[self.ranks.rank], generator)
        else:
            loss = self._exact_loss(batch)
        if self.reduction == "none":
            return loss.new_zeros(len(kept)).masked_scatter(kept, loss).view(hidden.shape[:-1])
        summed = total(loss.sum(), self.ranks)
        return summed / sum(batch.sizes) if self.reduction == "mean" else summed

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Exact log p of classes ids (..., ) or (..., P) given hidden (..., d), in the shape of ids."""
        queries = self._queries(hidden)
        check_ids("ids", ids, self.num_classes)
        if ids.shape[: hidden.dim() - 1] != hidden.shape[:-1] or ids.dim() > hidden.dim():
            need = f"{tuple(hidden.shape[:-1])} or with one more dimension"
            raise ValueError(f"ids: expected shape {need}, got {tuple(ids.shape)}")
        wanted = ids.reshape(len(queries), -1) if len(queries) else ids.new_empty(0, 1)
        batch, _ = self._gather(queries, wanted.long())
        if not len(batch.labels):
            return queries.new_zeros(ids.shape)
        log_z = losses.streamed_logsumexp(batch.queries, self.weight, **self.shard._logit_kind)
        log_zs, logits = self._delivered(batch, log_z, self._own_logits(batch))
        return (logits - log_zs.logsumexp(0).unsqueeze(1))[:, : wanted.shape[1]].reshape(ids.shape)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits and their classes, both (..., k), of hidden (..., d); k is the same on all ranks."""
        if not 1 <= k <= self.num_classes:
            raise ValueError(f"k: expected 1 to {self.num_classes}, got {k}")
        sizes = [int(size) for size, *_ in self._headers(len(self._queries(hidden)), 1)]
        rows, some = self.ranks.gather(hidden.reshape(-1, self.dim), sizes), min(k, len(self.classes))
        scores, ids = self.shard.topk(rows, some) if len(rows) else (rows.new_empty(0, some).float(),) * 2
        scores = deliver(F.pad(scores, (0, k - some), value=-torch.inf), self.ranks, sizes)
        ids = deliver(F.pad(ids.long() + self.classes.start, (0, k - some), value=-1), self.ranks, sizes)
        best, places = scores.transpose(0, 1).flatten(1).topk(k, dim=1)
        shape = (*hidden.shape[:-1], k)
        return best.view(shape), ids.transpose(0, 1).flatten(1).gather(1, places).view(shape)

    def rebuild(self) -> None:
        """Build the sampler of this rank from its weight as it is now."""
        self.shard.rebuild()

    def extra_repr(self) -> str:
        where = f"classes={self.classes.start}..{self.classes.stop - 1}, rank={self.ranks.rank} of {self.ranks.num}"
        return f"dim={self.dim}, num_classes={self.num_classes}, {where}, num_negatives={self.num_negatives}"

    def _queries(self, hidden: Tensor) -> Tensor:
        """As `SoftmaxHead` makes them; a rank may also have none."""
        if hidden.numel() or hidden.shape[-1:] != (self.dim,):
            return self.shard._queries(hidden)
        return hidden.reshape(0, self.dim).to(torch.promote_types(hidden.dtype, torch.float32))

    def _headers(self, rows: int, width: int) -> list[list[float]]:
        """What each rank says before it sends its rows: their number, that of its labels and the shares it saw."""
        own = torch.cat([torch.tensor([rows, width], dtype=torch.float64), self._shares])
        headers: list[list[float]] = self.ranks.gather(own.to(self.weight.device)[None], [1] * self.ranks.num).tolist()
        return headers

    def _gather(self, queries: Tensor, labels: Tensor, targets: Tensor | None = None) -> tuple[_Batch, list[float]]:
        """The rows of all ranks, and the ranks' shares of Z'; the targets are the labels if not given as (own, 1)."""
        headers = self._headers(len(queries), labels.shape[1])
        sizes, width = [int(rows) for rows, *_ in headers], max(int(columns) for _, columns, *_ in headers)
        labels = F.pad(labels, (0, width - labels.shape[1]), value=-1)
        both = self.ranks.gather(labels if targets is None else torch.cat([labels, targets], 1), sizes)
        everything = gather(queries, self.ranks, sizes)
        batch = _Batch(everything, both[:, :width], both if targets is None else both[:, width:], sizes)
        shares = [sum(seen) for seen in zip(*(shares for _, _, *shares in headers), strict=True)]
        return batch, shares if self.allocation == "mass" else [1.0] * self.ranks.num

    def _sampled_loss(self, batch: _Batch, num: int, generator: Generator | None) -> Tensor:
        """Losses (own,) of this rank's rows, over `num` negatives of this rank's classes and those of the others."""
        shard, labels, targets = self.shard, self._local(batch.labels), self._local(batch.targets)
        if self.loss == "nce" and targets.shape[1] > 1:
            raise ValueError("target: expected one class a row with loss='nce' and labels='pick_all', got several")
        if bool(((batch.labels >= 0).sum(1) >= self.num_classes).any()):
            raise ValueError(f"target: expected a class left for a negative in each row, got all {self.num_classes}")
        shard._freshen()
        shard.num_negatives = num
        order, sizes = shard._sets(batch.queries.detach())
        queries, labels, targets = batch.queries[order], labels[order], targets[order]
        # A row that has all of this rank's classes for labels draws in vain: what it draws counts for nothing.
        vain = ((labels >= 0).sum(1) >= len(self.classes)).unsqueeze(1)
        samples = shard._draw(queries, _narrowed(labels.masked_fill(vain, -1)), sizes, generator)
        # Where the target is another rank's, a negative stands for it, so that no more rows are touched.
        touched = torch.where(targets < 0, losses.repeated(samples.ids, sizes)[:, :1], targets)
        shard._touch(samples.ids, touched)
        target_logits, negative_logits = shard._logits(queries, labels, touched, samples.ids, sizes)
        log_q = losses.repeated(samples.log_q, sizes)
        if self.loss == "nce":
            odds = target_logits - shard._target_log_q(queries.detach(), touched, sizes).unsqueeze(1)
            parts = _nce_parts(odds, negative_logits, log_q, targets >= 0)
            noise, positive = self._delivered(batch, *(restored(x, order) for x in parts))
            return noise.sum(0) - F.logsigmoid(positive[:, 0])
        target_logits = target_logits.where(targets >= 0, 0.0)
        negative_logits = negative_logits.masked_fill(vain, -torch.inf)
        log_rest = losses._adjusted_logits(target_logits, negative_logits, log_q).logsumexp(1)
        log_rests, logits = self._delivered(batch, restored(log_rest, order), restored(target_logits, order))
        self._share(log_rests.detach())
        return self._softmax_loss(batch, log_rests, logits, "pick_all")

    def _exact_loss(self, batch: _Batch) -> Tensor:
        exclude = self._local(batch.labels)
        # The target first: backward then adds its few rows in place to the dense gradient of the log-sum-exp.
        target_logits = self._own_logits(batch)
        log_rest = losses.streamed_logsumexp(batch.queries, self.weight, exclude=exclude, **self.shard._logit_kind)
        return self._softmax_loss(batch, *self._delivered(batch, log_rest, target_logits), self.labels)

    def _softmax_loss(self, batch: _Batch, log_rests: Tensor, logits: Tensor, labels: str) -> Tensor:
        """-o_t + log(e^{o_t} + sum_r e^{rest_r}) of this rank's rows, for the rests of all ranks (R, own)."""
        loss = losses._softmax_loss(logits, log_rests.logsumexp(0).unsqueeze(1))
        return losses.reduce_labels(loss, self._own(batch.targets, batch.sizes) >= 0, labels)

    def _delivered(self, batch: _Batch, sums: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """For this rank's rows the sums (R, own) of each rank, and the logits (own, T), which one rank has each."""
        received = deliver(torch.cat([sums.unsqueeze(1), logits], 1), self.ranks, batch.sizes)
        return received[..., 0], received[..., 1:].sum(0)

    def _own_logits(self, batch: _Batch) -> Tensor:
        """Logits (N, T) of the targets that are of this rank's classes, and 0 for the others."""
        targets = self._local(batch.targets)
        logits = losses.gathered_logits(batch.queries, self.weight, targets.clamp(min=0), **self.shard._logit_kind)
        return logits.where(targets >= 0, 0.0)

    def _local(self, ids: Tensor) -> Tensor:
        """ids as this rank numbers its classes; -1 for those of others."""
        return torch.where((ids >= self.classes.start) & (ids < self.classes.stop), ids - self.classes.start, -1)

    def _own(self, rows: Tensor, sizes: list[int]) -> Tensor:
        first = sum(sizes[: self.ranks.rank])
        return rows[first : first + sizes[self.ranks.rank]]

    def _share(self, log_rests: Tensor) -> None:
        """Move the mean of the ranks' shares of Z' - e^{o_t} by those of this rank's rows, (R, own) logs."""
        shares = log_rests.double().softmax(0).nan_to_num(nan=1 / self.ranks.num)
        if shares.shape[1]:
            self._num_shares += 1
            self._shares.lerp_(shares.mean(1).to(self._shares), max(1 / self._num_shares, _NEWEST))

    def _own_generator(self, device: torch.device) -> Generator | None:
        """The stream of this rank's draws; one rank alone takes torch's."""
        if self._seed is not None and (self._generator is None or self._generator.device != device):
            self._generator = Generator(device).manual_seed(2**62 + self._seed)  # not the one of the embeddings
        return self._generator


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """torch's random numbers from another seed, for a while."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        yield


def _made_sampler(given: Any, classes: range, dim: int, tau: float, absolute: bool) -> Sampler:
    if isinstance(given, str | dict):
        options: dict[str, Any] = {"name": given} if isinstance(given, str) else given
        size: dict[str, Any] = {"num_classes": len(classes), "first": classes.start}
        return make_sampler(**options, **size, dim=dim, tau=tau, absolute=absolute)
    made: Any = given if isinstance(given, nn.Module) else given(classes)
    return made


def _nce_parts(odds: Tensor, negative_logits: Tensor, log_q: Tensor, is_own: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank's draws add to the losses (N,), and o_t - log m q_t (N, 1) of its own targets, 0 for the others'.

    Of m draws m_r are this rank's, so that m q_i is m_r q_{r,i}; odds (N, 1) are o_t - log q_{r,t}.
    """
    negatives = losses._adjusted_logits(odds, negative_logits, log_q)
    return -F.logsigmoid(-negatives).sum(1), (odds - math.log(negatives.shape[1])).where(is_own, 0.0)


def _picked(labels: Tensor, generator: Generator | None) -> Tensor:
    return _pick_one(labels, generator) if len(labels) else labels[:, :1]


def _narrowed(labels: Tensor) -> Tensor:
    """labels (N, P) in as few columns as the fullest row needs: most of a row's labels are of other ranks."""
    if labels.shape[1] == 1:
        return labels
    width = max(1, int((labels >= 0).sum(1).max()))
    return labels.topk(width, dim=1).values


def _give_state(head: "ShardedSoftmaxHead", state: dict[str, Any], prefix: str, _: Any) -> None:
    """What is of the classes, as parts of the tensors over all of them; the sampler is this rank's alone."""
    for name in [name for name in state if name.startswith(f"{prefix}shard.")]:
        value = state.pop(name)
        if (short := name.removeprefix(f"{prefix}shard.")) in ("weight", "bias"):
            state[prefix + short] = whole(value, head.num_classes, head.ranks)


def _take_state(head: "ShardedSoftmaxHead", state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Back to what the shard takes. It counts forwards from 0 again: its sampler has all to learn anew."""
    for name in ("weight", "bias"):
        if prefix + name in state:
            state[f"{prefix}shard.{name}"] = part(state.pop(prefix + name), head.classes, head.num_classes)
    for name in [name for name in state if name.startswith((f"{prefix}sampler.", f"{prefix}_extra_state"))]:
        del state[name]
    state |= {f"{prefix}shard.sampler.{name}": value for name, value in head.sampler.state_dict().items()}
    state[f"{prefix}shard._extra_state"] = torch.tensor([0, 0, 1])
