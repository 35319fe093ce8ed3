"""Which head to use: every candidate runs for a moment on this machine, beside the full softmax."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import losses
from .diagnostics import diagnose_logits
from .groups import like_queries, restored
from .head import Negatives, SoftmaxHead, default_sampler
from .optimizers import SparseAdam
from .samplers import DEFAULT_TAU, KernelSampler, Sampler, make_sampler
from .targets import Target, as_labels

# More classes than these are not timed: a few seconds are to be enough. Times are then scaled up.
_MAX_FULL, _MAX_SAMPLED = 20_000, 100_000
_MAX_CONTEXTS = 64
_REPEATS = 5
# The relative error of Z', sqrt(chi2 / m), above which an option is taken only if no other is below.
_GOOD_ERROR = 0.1
# What is not this many times faster than the full softmax is not worth its noise.
_WORTH = 1.2


@final
@dataclass(frozen=True)
class Option:
    """A way to compute the loss: what makes it, what it costs and how close it comes."""

    name: str
    code: str
    milliseconds: float  # of a step of the output layer: forward, backward, optimizer, update of the sampler
    measured_with: int  # classes; from fewer than there are, the time is scaled up
    chi2: float | None  # median over the probe; 0 for the full softmax, None without a probe
    error: float | None  # sqrt(chi2 / m), the relative error of Z'
    remark: str = ""

    @property
    def enough(self) -> int | None:
        """The least m whose error is within 10%."""
        return None if self.chi2 is None else max(1, math.ceil(self.chi2 / _GOOD_ERROR**2))


@final
@dataclass(frozen=True)
class Advice:
    """All options, the full softmax first, and the one to take. Print it."""

    num_classes: int
    options: tuple[Option, ...]
    best: Option
    why: str

    def __str__(self) -> str:
        lines = [f"{'':36s} {'ms a step':>10s} {'chi2':>8s} {'error of Z':>11s} {'m for 10%':>10s}"]
        for option in self.options:
            numbers = ["-" if value is None else format(value, ".3g") for value in (option.chi2, option.error)]
            remarks = [option.remark] if option.remark else []
            if option.measured_with < self.num_classes:
                remarks.append(f"time scaled up from n = {option.measured_with:,}")
            enough = "-" if option.enough is None or option is self.options[0] else f"{option.enough:,}"
            row = f"{option.name:36s} {option.milliseconds:10.2f} {numbers[0]:>8s} {numbers[1]:>11s} {enough:>10s}"
            lines.append(f"{row}   {'; '.join(remarks)}".rstrip())
        return "\n".join([*lines, self.why, f"    {self.best.code}"])


class _Candidate(NamedTuple):
    name: str
    sampler: str
    options: dict[str, Any]
    negatives: Negatives
    growth: Callable[[float], float]  # how its time grows with n


def advise(
    dim: int,
    num_classes: int,
    batch_size: int,
    *,
    num_negatives: int | None = None,
    tau: float = DEFAULT_TAU,
    device: torch.device | str = "cpu",
) -> Advice:
    """What to use for batches of (batch_size, dim) queries, by the time of a step on this machine.

    The embeddings are random, so this says nothing of how close a sampler comes to your softmax: for that give a
    trained head and some of its queries to `advise_head`.
    """
    for name, value, least in (("dim", dim, 1), ("num_classes", num_classes, 2), ("batch_size", batch_size, 1)):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    head = SoftmaxHead(dim, min(num_classes, _MAX_SAMPLED), "uniform", tau=tau).to(device)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch_size, dim, generator=generator).to(device)
    target = torch.randint(head.num_classes, (batch_size, 1), generator=generator).to(device)
    m = _num_negatives(head, num_negatives)
    options = _timed(head, num_classes, hidden, target, m)
    return _decide(num_classes, options)


def advise_head(head: SoftmaxHead, hidden: Tensor, target: Target, *, num_negatives: int | None = None) -> Advice:
    """As `advise`, for a trained head and a batch of its queries, hidden (..., d), with their target.

    Half of the rows are shown to the samplers; chi2 is exact on the others, at most 64 of them. The head stays as it
    is. Give it a few hundred rows that are like those of training.
    """
    queries = head._queries(hidden.detach())
    labels = as_labels(target, hidden.shape[:-1], head.num_classes, head.ignore_index)
    kept = (labels >= 0).any(1)
    if int(kept.sum()) < 2:
        raise ValueError(f"target: expected at least 2 rows with a class, got {int(kept.sum())}")
    queries, labels = queries[kept], labels[kept]
    m = _num_negatives(head, num_negatives)
    options = _timed(head, head.num_classes, queries, labels, m)
    probed = [
        _probe(head, option, candidate, queries, labels, m) for option, candidate in _pairs(options, head.num_classes)
    ]
    return _decide(head.num_classes, [replace(options[0], chi2=0.0, error=0.0), *probed])


def _num_negatives(head: SoftmaxHead, num_negatives: int | None) -> int:
    m = head.num_negatives if num_negatives is None else num_negatives
    if not 1 <= m < head.num_classes:
        raise ValueError(f"num_negatives: expected 1 to {head.num_classes - 1}, got {m}")
    return m


def _candidates(num_classes: int) -> list[_Candidate]:
    kernel = default_sampler(num_classes)
    name, num = kernel.pop("name"), kernel["num_features"]
    few, small = {**kernel, "num_features": 32}, {**kernel, "block_size": 16}

    def flat(_: float) -> float:
        return 1.0

    return [
        _Candidate(f"the default (D {num}, blocks of 64)", name, kernel, "per_example", math.log),
        _Candidate("anchored orf, D 32", name, few, "per_example", math.log),
        _Candidate(f"anchored orf, D {num}, blocks of 16", name, small, "per_example", math.log),
        _Candidate("moment", "moment", {}, "per_example", math.sqrt),
        _Candidate("the default, 16 groups of queries", name, kernel, 16, math.log),
        _Candidate("the default, shared negatives", name, kernel, "shared", math.log),
        _Candidate("uniform", "uniform", {}, "per_example", flat),
        _Candidate("uniform, shared negatives", "uniform", {}, "shared", flat),
    ]


def _pairs(options: list[Option], num_classes: int) -> list[tuple[Option, _Candidate]]:
    return list(zip(options[1:], _candidates(num_classes), strict=True))


def _timed(head: SoftmaxHead, num_classes: int, hidden: Tensor, labels: Tensor, m: int) -> list[Option]:
    """The options with their times, on the head's first classes."""
    num_full, num_sampled = (min(head.num_classes, most) for most in (_MAX_FULL, _MAX_SAMPLED))
    steps = [_full_step(head, num_full, hidden, labels)]
    steps += [_sampled_step(head, num_sampled, candidate, hidden, labels, m) for candidate in _candidates(num_classes)]
    times = _interleaved(steps)
    full = Option(
        "full softmax",
        _full_code(head),
        times[0] * num_classes / num_full,
        num_full,
        None,
        None,
    )
    options = [full]
    for candidate, milliseconds in zip(_candidates(num_classes), times[1:], strict=True):
        grown = milliseconds * candidate.growth(num_classes) / candidate.growth(num_sampled)
        code = _code(head, num_classes, candidate, m)
        options.append(Option(candidate.name, code, grown, num_sampled, None, None))
    return options


def _interleaved(steps: list[Callable[[], None]]) -> list[float]:
    """Median milliseconds of each, in turns, after a turn to warm up."""
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(1 + _REPEATS):
        for step, its in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            if turn:
                its.append(1e3 * (time.perf_counter() - start))
    return [median(its) for its in times]


def _full_step(head: SoftmaxHead, num_classes: int, hidden: Tensor, labels: Tensor) -> Callable[[], None]:
    weight = nn.Parameter(head.weight.detach()[:num_classes].clone())
    bias = None if head.bias is None else head.bias.detach()[:num_classes]
    optimizer = torch.optim.Adam([weight], lr=1e-4)
    labels = torch.where(labels < 0, -1, labels % num_classes)[:, :1]
    kind = {**head._logit_kind, "bias": bias}

    def step() -> None:
        optimizer.zero_grad()
        losses.full_softmax_loss(hidden, weight, labels, **kind).backward()
        optimizer.step()

    return step


def _sampled_step(
    head: SoftmaxHead, num_classes: int, candidate: _Candidate, hidden: Tensor, labels: Tensor, m: int
) -> Callable[[], None]:
    sampler = _sampler(head, num_classes, candidate)
    copy = SoftmaxHead(
        head.dim,
        num_classes,
        sampler,
        min(m, num_classes - 1),
        head.tau,
        bias=head.bias is not None,
        normalize=head.normalize,
        negatives=candidate.negatives,
        loss=head.loss,
        labels=head.labels,
    ).to(head.weight.device)
    copy.weight.data.copy_(head.weight.detach()[:num_classes])
    # A high rate: every row moves by more than a sampler's tolerance, and the time is that of the most work.
    optimizer = SparseAdam(list(copy.parameters()), lr=1e-2)
    labels = torch.where(labels < 0, -1, labels % num_classes)

    def step() -> None:
        optimizer.zero_grad()
        copy(hidden, labels).backward()
        optimizer.step()

    return step


def _sampler(head: SoftmaxHead, num_classes: int, candidate: _Candidate) -> Sampler:
    absolute = head.loss == "absolute"
    options = {**candidate.options, "num_classes": num_classes, "dim": head.dim, "tau": head.tau, "absolute": absolute}
    return make_sampler(candidate.sampler, **options).to(head.weight.device)


@torch.no_grad()
def _probe(head: SoftmaxHead, option: Option, candidate: _Candidate, queries: Tensor, labels: Tensor, m: int) -> Option:
    """The option with its chi2 on the second half of the queries, its sampler having seen the first."""
    sampler, half = _sampler(head, head.num_classes, candidate), len(queries) // 2
    weight = F.normalize(head.weight, dim=1) if head.normalize else head.weight.detach()
    bias = None if head.bias is None else head.bias.detach()
    sampler.rebuild(weight, bias)
    for some in queries[:half].split(max(1, half // 8)):
        sampler.sample(some, 1)
    sampler.rebuild(weight, bias)
    sampler.eval()
    found = []
    log_qs = _log_q_of_rows(sampler, candidate.negatives, queries[half:], labels[half:])
    for row, row_labels, log_q in zip(queries[half:].split(1), labels[half:].split(1), log_qs, strict=False):
        chunks = losses.logit_chunks(row.double(), head.weight, **head._logit_kind)
        logits = torch.cat([some for _, some in chunks], 1)
        found.append(float(diagnose_logits(logits, log_q, row_labels, num_negatives=m, max_grad=0.0).chi2))
    chi2, remark = median(found), ""
    if isinstance(sampler, KernelSampler) and sampler.calibration is not None:
        gain = sampler.calibration.chi2_of_double / max(sampler.calibration.chi2, 1e-12)
        remark = f"nu {sampler.calibration.nu:.3g}; twice the D: {gain:.0%} of its chi2"
    return replace(option, chi2=chi2, error=math.sqrt(max(chi2, 0.0) / m), remark=remark)


def _log_q_of_rows(sampler: Sampler, negatives: Negatives, queries: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """log q of all classes, (1, n), of each of the first rows; a set of negatives is one for all queries like it."""
    classes = torch.arange(sampler.num_classes, device=queries.device).unsqueeze(0)
    if negatives == "per_example":
        for row, row_labels in zip(queries[:_MAX_CONTEXTS].split(1), labels.split(1), strict=False):
            yield sampler.log_prob(row, classes, row_labels)
        return
    order, sizes = like_queries(queries, 1 if negatives == "shared" else int(negatives))
    of_sets = [sampler.log_prob(some, classes, shared=True) for some in queries[order].split(sizes)]
    sets = restored(losses.repeated(torch.arange(len(sizes)), sizes), order.cpu())
    yield from (of_sets[k] for k in sets[:_MAX_CONTEXTS].tolist())


def _full_code(head: SoftmaxHead) -> str:
    given = ["F.normalize(hidden, dim=-1)" if head.normalize else "hidden", "weight", "target", f"tau={head.tau!r}"]
    given += ["bias=bias"] * (head.bias is not None) + ["normalize=True"] * head.normalize
    given += ["absolute=True"] * (head.loss == "absolute")
    given += [f"labels={head.labels!r}"] * (head.labels != "pick_all")
    return f"rf.full_softmax_loss({', '.join(given)})"


def _code(head: SoftmaxHead, num_classes: int, candidate: _Candidate, m: int) -> str:
    given = [str(head.dim), f"{num_classes:_}"]
    if candidate.name.startswith("anchored"):
        logits = {"tau": head.tau} if head.tau != DEFAULT_TAU else {}
        logits |= {"absolute": True} if head.loss == "absolute" else {}
        options = "".join(f", {key}={value!r}" for key, value in {**candidate.options, **logits}.items())
        made = f"rf.make_sampler({candidate.sampler!r}, num_classes={num_classes:_}, dim={head.dim}{options})"
        given.append(f"sampler={made}")
    elif not candidate.name.startswith("the default"):
        given.append(repr(candidate.sampler))
    given.append(f"num_negatives={m}")
    if candidate.negatives != "per_example":
        given.append(f"negatives={candidate.negatives!r}")
    defaults = {"tau": DEFAULT_TAU, "normalize": True, "loss": "softmax", "labels": "pick_all"}
    given += [f"{name}={getattr(head, name)!r}" for name, value in defaults.items() if getattr(head, name) != value]
    return f"rf.SoftmaxHead({', '.join(given + ['bias=True'] * (head.bias is not None))})"


def _decide(num_classes: int, options: list[Option]) -> Advice:
    full, *sampled = options
    faster = [option for option in sampled if option.milliseconds * _WORTH < full.milliseconds]
    if not faster:
        fastest = min(sampled, key=lambda option: option.milliseconds)
        why = (
            f"Use the full softmax: {full.milliseconds:.2f} ms a step, and the fastest of the others, {fastest.name}, "
            f"takes {fastest.milliseconds:.2f} ms."
        )
        return Advice(num_classes, tuple(options), full, why)
    if all(option.chi2 is None for option in sampled):
        # Of these the first come closest to a softmax, by what we have measured on trained models.
        best = next(option for option in sampled if option in faster)
        reason = "the closest to a softmax, on the models that we have measured, of those that are faster than it"
    else:
        good = [option for option in faster if option.error is not None and option.error <= _GOOD_ERROR]
        best = min(good or faster, key=lambda option: option.milliseconds * (1.0 if good else option.chi2 or 0.0))
        reason = f"the fastest whose Z' is within {_GOOD_ERROR:.0%}" if good else "the least chi2 x time"
        reason += f" (m = {best.enough:,} would be enough for that)"
    ratio = full.milliseconds / best.milliseconds
    return Advice(
        num_classes, tuple(options), best, f"Use {best.name}: {reason}; {ratio:.1f} times the full softmax's speed."
    )
