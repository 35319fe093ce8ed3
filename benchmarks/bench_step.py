"""A whole training step of the output layer: draw, loss, backward, optimizer, update of the sampler; n = 10^4 ... 10^7.

Ours, with per-example and with shared negatives and SparseAdam, beside what one would otherwise run: the full softmax
(plain; streamed; by torch's own linear_cross_entropy in chunks; torch's adaptive softmax) and shared uniform or
log-uniform negatives with a dense gradient, all with torch's fused Adam; uniform ones also with Adam as it comes, and
with a sparse gradient and torch's SparseAdam. Queries are random, and frequencies of targets follow Zipf's law, in many
batches that come in turn. All works of a group take turns in one process; the baselines only up to
`--largest-baseline`.

Ours is timed after some hundred steps of training: until Adam's averages have grown rows move so little that the
sampler needs hardly any update.

With `--profile`, in place of all that: the milliseconds of ours in each part of a step, and the share of the step that
the loss itself needs (gathers, logits, backward, optimizer), as against sampler and checks.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import interleaved, write_rows
from parts import parts_of_steps
from torch import Tensor, nn

import rfsoftmax as rf
from rfsoftmax import threads

TAU = rf.DEFAULT_TAU
MODES: tuple[Any, ...] = ("per_example", "shared")
# With so many negatives sampled and exact loss of a batch may differ by so much: by chance, and as log Z' is biased.
CHECKED, CLOSE = 2000, 0.1
NUM_BATCHES = 256
LR = 1e-3
# Where the clusters of the adaptive softmax begin.
CUTOFFS = (1_000, 10_000, 100_000, 1_000_000)
# Seconds of a turn: a method at n = 10^4 comes after one that fills all caches with a million rows.
BURST = 0.2


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Step:
    """A training step: the gradient of a loss of (hidden, target), and what an optimizer makes of it."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer) -> None:
        self.loss = loss
        self.optimizer = optimizer

    def __call__(self, hidden: Tensor, target: Tensor) -> None:
        self.loss(hidden.detach().requires_grad_(), target).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()  # here, so that gradients of works that wait take no memory


class Batches:
    """Queries (B, d) and targets (B,), so many of them over and over."""

    def __init__(self, num_classes: int, dim: int, batch: int, num: int = NUM_BATCHES) -> None:
        g = torch.Generator().manual_seed(2)  # another stream than the embeddings: no query is one of them
        targets = (num_classes ** torch.rand(num, batch, generator=g, dtype=torch.float64)).long() - 1
        self.all = itertools.cycle(zip(torch.randn(num, batch, dim, generator=g), targets, strict=True))

    def run(self, step: Step) -> Any:
        return step(*next(self.all))


def class_weight(num_classes: int, dim: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(1)) / dim**0.5)


def our_head(num_classes: int, dim: int, m: int, mode: Any) -> rf.SoftmaxHead:
    torch.manual_seed(0)
    head = rf.SoftmaxHead(dim, num_classes, num_negatives=m, negatives=mode)
    head.rebuild()
    return head


def step_of(head: rf.SoftmaxHead) -> Step:
    return Step(head, rf.SparseAdam(list(head.parameters()), lr=LR))


def ours(num_classes: int, dim: int, m: int, mode: Any) -> Step:
    head = our_head(num_classes, dim, m, mode)
    check(head, Batches(num_classes, dim, 64, 1))
    return step_of(head)


def trained(step: Step, batches: Batches, steps: int) -> Step:
    """The step, after so many of it."""
    for _ in range(steps):
        batches.run(step)
    return step


def fused_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LR, fused=True)


def plain_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As it is without options."""
    return torch.optim.Adam(parameters, lr=LR)


def sparse_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(parameters, lr=LR)


def check(head: rf.SoftmaxHead, batches: Batches) -> None:
    """The sampled loss must be about the exact one, and that must be torch's."""
    hidden, target = next(batches.all)
    m, head.num_negatives = head.num_negatives, min(CHECKED, head.num_classes - 1)
    with torch.no_grad():
        sampled, exact = float(head.train()(hidden, target)), float(head.eval()(hidden, target))
        if head.num_classes <= 100_000:
            logits = TAU * F.normalize(hidden, dim=1) @ F.normalize(head.weight, dim=1).T
            torch.testing.assert_close(torch.tensor(exact), F.cross_entropy(logits, target), rtol=1e-4, atol=1e-4)
    head.train().num_negatives = m
    if abs(sampled - exact) > CLOSE:
        raise AssertionError(f"sampled loss: expected about {exact}, got {sampled}")


def full(num_classes: int, dim: int, m: int) -> Step:
    weight = class_weight(num_classes, dim)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return rf.full_softmax_loss(F.normalize(hidden, dim=1), weight, target, tau=TAU, normalize=True)

    return Step(loss, fused_adam([weight]))


def plain_full(num_classes: int, dim: int, m: int) -> Step:
    """As anyone would write it: all logits at once."""
    weight = class_weight(num_classes, dim)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(TAU * F.normalize(hidden, dim=1) @ F.normalize(weight, dim=1).T, target)

    return Step(loss, fused_adam([weight]))


def torch_full(num_classes: int, dim: int, m: int) -> Step:
    """Torch's own, in chunks of the batch; without options it would be the plain one."""
    weight, options = class_weight(num_classes, dim), nn.LinearCrossEntropyOptions()

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        of_torch: Callable[..., Tensor] = F.linear_cross_entropy
        return of_torch(TAU * F.normalize(hidden, dim=1), F.normalize(weight, dim=1), target, options=options)

    return Step(loss, fused_adam([weight]))


def adaptive(num_classes: int, dim: int, m: int) -> Step:
    cutoffs = [cutoff for cutoff in CUTOFFS if cutoff < num_classes] or [num_classes // 10]
    layer = nn.AdaptiveLogSoftmaxWithLoss(dim, num_classes, cutoffs, div_value=2.0)
    return Step(lambda hidden, target: layer(hidden, target).loss, fused_adam(layer.parameters()))


def recipe(num_classes: int, dim: int, m: int, sampler: str, adam: Optimizer = fused_adam) -> Step:
    """What people write today: one set of negatives for the batch, corrected by log q, and a dense gradient."""
    weight, chosen = class_weight(num_classes, dim), rf.make_sampler(sampler, num_classes=num_classes, dim=dim)
    sparse = adam is sparse_adam

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        samples = chosen.sample(hidden, m, shared=True)
        queries = TAU * F.normalize(hidden, dim=1)
        rows = F.normalize(F.embedding(torch.cat([target, samples.ids[0]]), weight, sparse=sparse), dim=1)
        of_target = (queries * rows[: len(target)]).sum(1)
        of_negatives = queries @ rows[len(target) :].T
        of_negatives = of_negatives.masked_fill(target[:, None] == samples.ids, -torch.inf)
        return rf.sampled_softmax_loss(of_target, of_negatives, samples.log_q)

    return Step(loss, adam([weight]))


def baselines() -> dict[str, Callable[[int, int, int], Step]]:
    found: dict[str, Callable[[int, int, int], Step]] = {
        "full softmax, plain": plain_full,
        "full softmax, streamed": full,
        "full softmax, linear_cross_entropy": torch_full,
        "adaptive softmax": adaptive,
        "recipe, uniform": lambda n, d, m: recipe(n, d, m, "uniform"),
        "recipe, log-uniform": lambda n, d, m: recipe(n, d, m, "log_uniform"),
        "recipe, uniform, Adam not fused": lambda n, d, m: recipe(n, d, m, "uniform", plain_adam),
        "recipe, uniform, sparse gradient": lambda n, d, m: recipe(n, d, m, "uniform", sparse_adam),
    }
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        del found["full softmax, linear_cross_entropy"]
    return found


def measure(dim: int, mode: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    works: dict[tuple[str, int], Callable[[], Any]] = {}
    for n in options.num_classes:
        batches = Batches(n, dim, options.batch)
        made = {f"ours, {mode}": lambda n, d, m: ours(n, d, m, mode)}
        made |= baselines() if n <= options.largest_baseline else {}
        exact = []
        for name, make in made.items():
            print(f"  building {name}, n = {n:,}", flush=True)
            step = make(n, dim, options.negatives)
            if name.startswith("ours"):
                trained(step, batches, options.warm_up)
            elif name.startswith("full"):
                with torch.no_grad():
                    exact.append(step.loss(*next(Batches(n, dim, options.batch, 1).all)))
                torch.testing.assert_close(exact[-1], exact[0], rtol=1e-4, atol=1e-4, msg=f"{name} differs from plain")
            works[name, n] = lambda step=step, batches=batches: batches.run(step)  # type: ignore[misc]
    seconds = interleaved({f"{name}|{n}": work for (name, n), work in works.items()}, options.repeats, BURST)
    rows = []
    for name, n in works:
        mine = seconds[f"ours, {mode}|{n}"]
        rows.append(
            {
                "method": name,
                "num_classes": n,
                "dim": dim,
                "batch": options.batch,
                "negatives": options.negatives,
                "milliseconds": round(1e3 * seconds[f"{name}|{n}"], 3),
                "times_ours": round(seconds[f"{name}|{n}"] / mine, 2),
                "beside": mode,
                "lr": LR,
                "warm_up": options.warm_up,
                "repeats": options.repeats,
            }
        )
        print(f"  {name:36s} n = {n:>10,} {rows[-1]['milliseconds']:>10} ms  {rows[-1]['times_ours']:>8} x ours")
    return rows


def profile(dim: int, mode: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for n in options.num_classes:
        head = our_head(n, dim, options.negatives, mode)
        batches = Batches(n, dim, options.batch)
        step = trained(step_of(head), batches, options.warm_up)
        found = parts_of_steps(head, step, lambda: batches.run(step), options.profile_steps)  # noqa: B023
        settings = {"dim": dim, "batch": options.batch, "negatives": options.negatives, "lr": LR}
        settings |= {"warm_up": options.warm_up, "steps": options.profile_steps}
        rows.append({"method": f"ours, {mode}", "num_classes": n, **settings, **found})
        parts = ", ".join(f"{name.removesuffix('_ms')} {value:.2f}" for name, value in found.items() if "_ms" in name)
        print(f"  n = {n:>10,}: {found['share_of_loss']:.0%} for the loss; ms: {parts}", flush=True)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dims = list(dict.fromkeys(row["dim"] for row in rows))
    figure = Figure(figsize=(6 * len(dims), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, dim in zip(figure.subplots(1, len(dims), squeeze=False)[0], dims, strict=True):
        for name in dict.fromkeys(row["method"] for row in rows):
            some = {
                row["num_classes"]: row["milliseconds"] for row in rows if (row["method"], row["dim"]) == (name, dim)
            }
            style = {"linewidth": 2.5} if name.startswith("ours") else {"linestyle": "--"}
            axis.plot(list(some), list(some.values()), marker="o", label=name, **style)
            axis.annotate(name, (list(some)[-1], list(some.values())[-1]), fontsize=7, ha="right", va="bottom")
        axis.set(xscale="log", yscale="log", xlabel="classes", ylabel="ms a step", title=f"d = {dim}")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--num-classes", type=int, nargs="+", default=sizes)
    parser.add_argument("--largest-baseline", type=int, default=1_000_000, help="above it only ours is timed")
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--negatives", type=int, default=128, help="m")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--warm-up",
        type=int,
        default=400,
        help="steps of ours before it is timed; from the 136th on (d = 64) a row moves enough when first touched, and "
        "between the 336th and the 1,360th there is no rebuild, whose share bench_update.py tells",
    )
    parser.add_argument("--repeats", type=int, default=9, help="interleaved repetitions; the median counts")
    parser.add_argument("--profile", action="store_true", help="tell where the time of a step of ours goes instead")
    parser.add_argument("--profile-steps", type=int, default=30, help="timed ones; medians count")
    parser.add_argument(
        "--own-threads", action="store_true", help="a pool beside torch's threads, to see what it costs"
    )
    parser.add_argument("--output", type=Path, help="by default results/bench_step.csv, or bench_step_profile.csv")
    options = parser.parse_args()
    if options.own_threads:
        threads._entry = lambda process: 0  # type: ignore[assignment]
    options.output = options.output or Path(f"results/bench_step{'_profile' if options.profile else ''}.csv")
    rows: list[dict[str, Any]] = []
    for dim, mode in itertools.product(options.dim, options.modes):
        print(f"d = {dim}, {mode} negatives", flush=True)
        rows += (profile if options.profile else measure)(dim, mode, options)
        write_rows(options.output, rows)
    if not options.profile:
        plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
