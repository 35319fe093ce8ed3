"""Theorems 1 and 2 and Corollary 1 of the paper, on the class embeddings and held-out queries of a trained model.

The model is the full softmax's of figure 3 or table 3, at its last checkpoint. Draws are independent, not stratified,
as the theorems have them, and all samplers are measured against the plain softmax.
"""

import math
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..diagnostics import Diagnosis, GradientBias, diagnose, diagnose_logits, gradient_bias
from ..features import RandomFourier
from ..head import SoftmaxHead, default_sampler
from ..samplers import KernelSampler, make_sampler
from . import commands
from .measurements import MissingRunError, trained_run
from .outputs import FullSoftmax
from .places import Places
from .tasks import make_task

# Standard errors by which a measured bias must be outside a bound to count.
_SURE = 5.0
_FLOOR = 0.2
_QUERIES_A_TIME = 64


@final
@dataclass(frozen=True)
class Sizes:
    scale: str
    contexts: int
    draws: int
    negatives: tuple[int, ...]
    features: tuple[int, ...]
    tree_features: tuple[int, ...]


SIZES = {
    "small": Sizes("small", 60, 300, (10, 30, 100, 300, 1000), (128, 512, 2048, 8192), (32, 128, 512, 2048)),
    "paper": Sizes(
        "paper", 300, 2000, (10, 30, 100, 300, 1000), (128, 512, 2048, 8192, 32768), (32, 128, 512, 2048, 8192)
    ),
    "tiny": Sizes("tiny", 6, 20, (2, 4), (4, 16), (4, 16)),
}
_SAMPLERS: dict[str, dict[str, Any]] = {
    "Uniform": {"name": "uniform"},
    "Unigram": {"name": "unigram"},
    "Quadratic": {"name": "exact", "quadratic": 100.0},
    "Rff, D = 1024": {"name": "rff", "num_features": 1024, "nu": 4.0, "block_size": 1, "leaf": "kernel"},
    "MIDX": {"name": "midx"},
    "default": {},  # the head's own
    "EXP": {"name": "exact"},
}


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """Class embeddings (n, d), queries (B, d) of unit length with labels (B, P), and as many queries seen before."""

    weight: Tensor
    counts: Tensor
    tau: float
    hidden: Tensor
    target: Tensor
    seen: Tensor
    seen_target: Tensor
    labels: str
    step: int

    def positives(self) -> Tensor:
        """Which classes are labels of a query, (B, n)."""
        n = len(self.weight)
        marks = torch.zeros(len(self.target), n + 1, dtype=torch.bool)
        return marks.scatter_(1, torch.where(self.target < 0, n, self.target), True)[:, :n]

    def head(self, options: dict[str, Any], tau: float | None = None) -> SoftmaxHead:
        """A head with these embeddings, whose sampler has met the queries seen before and draws independently."""
        tau = self.tau if tau is None else tau
        n, dim = self.weight.shape
        options = options or default_sampler(n)
        sampler = make_sampler(num_classes=n, dim=dim, tau=tau, counts=self.counts, **options)
        head = SoftmaxHead(dim, n, sampler, 1, tau, labels=self.labels)  # type: ignore[arg-type]
        head.weight.data.copy_(self.weight)
        sampler.stratified = False
        with torch.no_grad():
            for queries, target in zip(
                self.seen.split(_QUERIES_A_TIME), self.seen_target.split(_QUERIES_A_TIME), strict=True
            ):
                head(queries, target)
        head.rebuild()
        return head.eval()


def theorem1(dataset: str, sizes: Sizes, places: Places) -> dict[str, Any]:
    """The bounds of Theorem 1 beside the measured bias, for every sampler as m grows."""
    torch.manual_seed(0)
    problem = _problem(dataset, sizes, places)
    rows = []
    for label, options in _SAMPLERS.items():
        head = problem.head(options)
        mean_gradient = _mean_gradient(problem)
        for num in (m for m in sizes.negatives if m < head.num_classes):
            head.num_negatives = num
            found = diagnose(head, problem.hidden, problem.target)
            bias = gradient_bias(head, problem.hidden, problem.target, num_draws=sizes.draws)
            rows.append({"sampler": label, "num_negatives": num, **_bounds(head, found, bias, mean_gradient)})
            print(f"  {label:14s} m {num:5d}  relative bias {rows[-1]['relative_bias']:.3g}", flush=True)
    return {**_about("theorem1", dataset, sizes, problem), "sure": _SURE, "rows": rows}


def _bounds(head: SoftmaxHead, found: Diagnosis, bias: GradientBias, mean_gradient: Tensor) -> dict[str, float]:
    """Medians over the contexts, and the share of all coordinates that are surely outside a bound."""
    m = head.num_negatives
    largest = head.tau * float(F.normalize(head.weight.detach(), dim=1).abs().max())
    upper = found.ub1.unsqueeze(1) * mean_gradient + (2 * largest / m * found.ub2).unsqueeze(1)
    slack = _SURE * bias.stderr
    squares = (bias.bias.square() - bias.stderr.square()).mean(1).clamp(min=0)
    return {
        "chi2": float(found.chi2.median()),
        "relative_bias": bias.overall,
        "noise": _noise(bias),
        "bias": float(squares.sqrt().median()),
        "bias_largest": float(bias.bias.abs().amax(1).median()),
        "noise_largest": float((bias.stderr.amax(1)).median()),
        "lower_printed": float(found.lb.median()),
        "upper_printed": float(upper.amax(1).median()),
        "upper_corrected": float((2 * largest / m * found.ub2_corrected).median()),
        "bound_always": float(found.bias_bound.median()),
        "below_lower_printed": _share(bias.bias + slack < found.lb.unsqueeze(1)),
        "above_upper_printed": _share(bias.bias - slack > upper),
        "outside_always": _share(bias.bias.abs() - slack > found.bias_bound.unsqueeze(1)),
    }


def theorem2(dataset: str, sizes: Sizes, places: Places) -> dict[str, Any]:
    """How far e^{o_i} / q_i is from the e^{(tau - nu) h.c_i} of Theorem 2, as D grows and as nu moves from tau.

    Up to a factor that is the same for all classes the two differ by kernel / (phi(h).phi(c_i)), so the theorem's gamma
    is the largest relative error of the features. chi2 is that of q with negative estimates raised to a floor, and
    without features (D without end), where nu alone decides.
    """
    problem = _problem(dataset, sizes, places)
    rows = []
    for nu in (1.0, 2.0, 4.0, problem.tau):
        rows.append({"nu": nu, "num_features": None, **_ratios(problem, nu, None)})
        for num in sizes.features:
            rows.append({"nu": nu, "num_features": num, **_ratios(problem, nu, num)})
            print(f"  nu {nu:.3g}  D {num:6d}  median error {rows[-1]['error_median']:.3g}", flush=True)
    return {**_about("theorem2", dataset, sizes, problem), "floor": _FLOOR, "rows": rows}


@torch.no_grad()
def _ratios(problem: Problem, nu: float, num_features: int | None) -> dict[str, Any]:
    cosines = problem.hidden.double() @ problem.weight.double().T
    kernel = torch.exp(nu * (cosines - 1))
    estimate = kernel
    if num_features is not None:
        dim = problem.weight.shape[1]
        phi = RandomFourier(dim, num_features, nu, generator=Generator().manual_seed(0))
        of_h = phi(problem.hidden)
        estimate = torch.cat([of_h @ phi(some).T for some in problem.weight.split(1000)], dim=1).double()
    error = (estimate / kernel - 1).abs().flatten()
    least = 0.0 if num_features is None else _FLOOR * math.exp(-nu)
    floored = estimate.clamp(min=least).masked_fill(problem.positives(), 0.0)
    found = diagnose_logits(
        problem.tau * cosines,
        (floored / floored.sum(1, keepdim=True)).log(),
        problem.target,
        num_negatives=100,
        max_grad=problem.tau,
        labels=problem.labels,
    )
    return {
        "error_median": float(error.median()),
        "error_99": float(error.kthvalue(max(1, int(0.99 * len(error)))).values),
        "error_largest": float(error.max()),
        "negative_share": _share(estimate < 0),
        "chi2": float(found.chi2.median()),
        "log_spread": float(found.log_spread.median()),
        "condition": None if num_features is None else _condition(nu, num_features, problem.weight.shape[1]),
    }


def _condition(nu: float, num_features: int, dim: int) -> float:
    """The gamma / rho that Theorem 2 needs for its e^{2 nu} <= gamma / (rho sqrt(d)) sqrt(D) / log D; it is of use
    below 1/2, for a ratio of at least 1 - 2 gamma."""
    return math.exp(2 * nu) * math.sqrt(dim) * math.log(num_features) / math.sqrt(num_features)


def corollary1(dataset: str, sizes: Sizes, places: Places) -> dict[str, Any]:
    """The bias of RF-softmax by the paper's tree as D grows, m = 100, with nu = tau and with nu below it.

    The model's tau is one case; the same embeddings at a tau of 2 are another, where the features' noise is small.
    """
    torch.manual_seed(0)
    problem = _problem(dataset, sizes, places)
    rows = []
    for tau, nu in ((problem.tau, problem.tau), (problem.tau, 4.0), (2.0, 2.0)):
        cases: list[tuple[int | None, dict[str, Any]]] = [(None, {"name": "exact"})] if nu == tau else []
        tree = {"name": "rff", "nu": nu, "block_size": 1, "leaf": "kernel"}
        cases += [(num, {**tree, "num_features": num}) for num in sizes.tree_features]
        for num, options in cases:
            head = problem.head(options, tau)
            assert not isinstance(head.sampler, KernelSampler) or head.sampler.tree.block_size == 1
            head.num_negatives = min(100, head.num_classes - 1)
            bias = gradient_bias(head, problem.hidden, problem.target, num_draws=sizes.draws)
            naive = float((bias.bias.square().sum() / bias.gradient.square().sum()).sqrt())
            rows.append({"tau": tau, "nu": nu, "num_features": num, "relative_bias": bias.overall})
            rows[-1] |= {"relative_bias_naive": naive, "noise": _noise(bias)}
            print(f"  tau {tau:.3g} nu {nu:.3g} D {num}: relative bias {bias.overall:.3g}", flush=True)
    return {**_about("corollary1", dataset, sizes, problem), "rows": rows}


def _problem(dataset: str, sizes: Sizes, places: Places) -> Problem:
    planned = trained_run(dataset, sizes.scale)
    directory = places.runs / planned.name
    if places.results.training(dataset, planned.config) is None or not directory.exists():
        item = "figure3" if planned.config.task == "text" else "table3"
        command = f"rfsoftmax reproduce {item} --only {planned.name}"
        raise MissingRunError(f"expected the finished run {directory}, got none; do first: {command}")
    trained = commands.load(directory, "last")
    assert isinstance(trained.model.head, FullSoftmax)
    hidden, target = commands.contexts(trained, make_task(trained.config), 40 * sizes.contexts)
    chosen = torch.randperm(len(hidden), generator=Generator().manual_seed(0))
    hidden, target = F.normalize(hidden[chosen], dim=1), target[chosen]
    measured, seen = slice(None, sizes.contexts), slice(sizes.contexts, None)
    return Problem(
        weight=F.normalize(trained.model.head.exact.weight.detach(), dim=1),
        counts=torch.from_numpy(trained.classes.counts),
        tau=trained.config.tau,
        hidden=hidden[measured],
        target=target[measured],
        seen=hidden[seen],
        seen_target=target[seen],
        labels=trained.config.labels,
        step=int(trained.path.name.removeprefix("step-")),
    )


def _mean_gradient(problem: Problem) -> Tensor:
    """g of Theorem 1 in units where Z_t = 1: the mean of grad o_j = tau c_j over the softmax of the negatives."""
    logits = problem.tau * problem.hidden.double() @ problem.weight.double().T
    p = logits.masked_fill(problem.positives(), -torch.inf).softmax(1)
    return problem.tau * p @ problem.weight.double()


def _about(kind: str, dataset: str, sizes: Sizes, problem: Problem) -> dict[str, Any]:
    n, dim = problem.weight.shape
    counts = {"num_classes": n, "dim": dim, "contexts": len(problem.hidden), "draws": sizes.draws}
    return {"kind": kind, "dataset": dataset, "tau": problem.tau, "step": problem.step, **counts}


def _noise(bias: GradientBias) -> float:
    """The relative bias that the draws' noise alone would show, before it is taken off."""
    return float((bias.stderr.square().sum() / bias.gradient.square().sum()).sqrt())


def _share(of: Tensor) -> float:
    return float(of.double().mean())
