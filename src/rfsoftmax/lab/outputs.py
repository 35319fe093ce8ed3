"""The output layer of a model by the name of its method: `SoftmaxHead`, the full softmax or torch's adaptive one.

All of them take hidden (..., d) and a target to a mean loss, in eval() the exact one, and have `log_prob` and `topk`.
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from ..head import SoftmaxHead, default_sampler
from ..samplers import Sampler, make_sampler
from ..sharded import ShardedSoftmaxHead
from ..targets import Target, as_labels
from .catalogue import UNSAMPLED
from .config import Config
from .sampler_options import check as check_options

# Logits held at once, of all classes.
_MAX_ELEMENTS = 2**24


@final
class FullSoftmax(nn.Module):
    """`full_softmax_loss` over the class embeddings of a `SoftmaxHead`, in training too."""

    def __init__(
        self, dim: int, num_classes: int, tau: float, *, bias: bool, labels: Any, normalize: bool = True
    ) -> None:
        super().__init__()
        # Of the head only the exact half is used, in eval(): its sampler never draws.
        self.exact = SoftmaxHead(
            dim, num_classes, "uniform", 1, tau, bias=bias, normalize=normalize, sparse=False, labels=labels
        )

    def forward(self, hidden: Tensor, target: Target) -> Tensor:
        loss: Tensor = self.exact.eval()(hidden, target)
        return loss

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.exact.log_prob(hidden, ids)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self.exact.topk(hidden, k)


@final
class AdaptiveSoftmax(nn.Module):
    """`nn.AdaptiveLogSoftmaxWithLoss` (Grave et al., 2017) with the classes ranked by `counts` (n,).

    A tenth of the classes are in the head, those up to a half in a tail of half the dimension, the rest in one of a
    quarter. A row with several labels loses -log p of each, summed, or averaged for labels="pick_one".
    """

    order: Tensor  # (n,) int64: the class of each rank
    rank: Tensor  # (n,) int64: the rank of each class

    def __init__(self, dim: int, counts: Tensor, *, labels: str) -> None:
        super().__init__()
        n = len(counts)
        if dim < 4:
            raise ValueError(f"dim: expected at least 4 with method 'adaptive', got {dim}")
        self.labels = labels
        self.register_buffer("order", counts.argsort(descending=True, stable=True))
        self.register_buffer("rank", torch.empty_like(self.order).scatter_(0, self.order, torch.arange(n)))
        cutoffs = sorted({max(1, n // 10), max(1, n // 2)})
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(dim, n, cutoffs, div_value=2.0)

    def forward(self, hidden: Tensor, target: Target) -> Tensor:
        labels = as_labels(target, hidden.shape[:-1], len(self.order), -100)
        row, column = (labels >= 0).nonzero(as_tuple=True)
        queries = hidden.reshape(-1, hidden.shape[-1])
        loss = -self.softmax(queries[row], self.rank[labels[row, column]]).output
        sizes = torch.bincount(row, minlength=len(labels))
        if self.labels == "pick_one":
            loss = loss / sizes[row]
        return loss.sum() / (sizes > 0).sum()

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """log p of ids (..., P)."""
        return self.softmax.log_prob(hidden.flatten(0, -2)).gather(1, self.rank[ids].flatten(0, -2)).view(ids.shape)

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        step = max(1, _MAX_ELEMENTS // len(self.order))
        parts = [self.softmax.log_prob(some).topk(k, dim=1) for some in hidden.flatten(0, -2).split(step)]
        shape = (*hidden.shape[:-1], k)
        ids = self.order[torch.cat([part.indices for part in parts])]
        return torch.cat([part.values for part in parts]).view(shape), ids.view(shape)


Output = SoftmaxHead | ShardedSoftmaxHead | FullSoftmax | AdaptiveSoftmax


def make_output(config: Config, counts: Tensor) -> Output:
    """The layer of `config.method` for classes that occur counts (n,) times in the training data."""
    n, labels = len(counts), config.labels
    if config.method == "full":
        return FullSoftmax(config.dim, n, config.tau, bias=config.bias, labels=labels, normalize=config.normalize)
    if config.method == "adaptive":
        return AdaptiveSoftmax(config.dim, counts, labels=labels)
    loss = "nce" if config.method == "nce" else "absolute" if is_absolute(config) else "softmax"
    options: dict[str, Any] = {
        "num_negatives": config.num_negatives,
        "tau": config.tau,
        "bias": config.bias or loss == "nce",
        "normalize": config.normalize,
        "negatives": config.num_groups if config.negatives == "groups" else config.negatives,
        "sparse": n >= config.sparse_from,
        "loss": loss,
        "labels": labels,
    }
    head: SoftmaxHead | ShardedSoftmaxHead
    if config.shard_classes:
        head = ShardedSoftmaxHead(config.dim, n, lambda classes: sampler_of(config, counts, classes), **options)
        classes = head.classes
    else:
        head, classes = SoftmaxHead(config.dim, n, sampler_of(config, counts), **options), range(n)
    if loss == "nce" and head.bias is not None:
        # NCE takes Z for 1: so it is at first, when all cosines are near 0.
        share = counts.double().clamp(min=1)
        head.bias.data.copy_((share / share.sum()).log()[classes.start : classes.stop])
    return head


def check_method(config: Config) -> None:
    """Raise what `make_output` would of the sampler's options, before any data is read."""
    if config.method not in UNSAMPLED:
        sampler_of(config, torch.ones(2, dtype=torch.int64))


def is_absolute(config: Config) -> bool:
    """Whether the absolute softmax is trained: with the quadratic kernel, which cannot tell h.c from -h.c."""
    return config.method == "quadratic" or "quadratic" in config.sampler_options


def sampler_of(config: Config, counts: Tensor, classes: range | None = None) -> Sampler:
    """The sampler of `config.method` with its options, for all classes or a range of them."""
    if config.method in UNSAMPLED:
        raise ValueError(f"method: expected one that draws negatives, got {config.method!r}")
    check_options(config.method, config.sampler_options)
    options: dict[str, Any] = {"name": "unigram" if config.method == "nce" else config.method}
    if config.method == "default":
        options = default_sampler(len(counts))
    options |= config.sampler_options
    absolute = is_absolute(config)
    first = 0 if classes is None else classes.start
    counts = counts if classes is None else counts[first : classes.stop]
    size: dict[str, Any] = {"num_classes": len(counts), "counts": counts, "first": first}
    try:
        return make_sampler(**size, dim=config.dim, tau=config.tau, absolute=absolute, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"sampler_options: {error}") from error


def sampled_head(output: nn.Module) -> SoftmaxHead | None:
    """The head that draws, or this rank's part of it, if the layer is one."""
    output = output.shard if isinstance(output, ShardedSoftmaxHead) else output
    return output if isinstance(output, SoftmaxHead) else None
