"""Negatives of each query's own, of groups of like queries, or of the whole batch: which is worth its time?

On models trained with the full softmax (Penn Treebank, TIBKAT and Gowalla, whose items are about equally frequent): for
each mode and m the noise of the loss, chi2 / m with chi2 averaged over a held-out batch (exactly), and the time of a
whole step of the output layer (draw, loss, backward, SparseAdam, update), all in turns, after some hundred steps on the
held-out batches. Noise times milliseconds is the price of a step: noise falls as 1/m, so with twice the time a mode
halves it. `full` is the full softmax with fused Adam, which has no noise: streamed, and plain where no example has
several labels.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_step import LR, fused_adam
from checkpoints import RECIPES, Checkpoint, load
from measure import interleaved, write_rows
from torch import nn

import rfsoftmax as rf
from rfsoftmax.diagnostics import diagnose

Batches = list[tuple[Any, Any]]
# Queries of a step: those of a language model are many.
BATCH = {"ptb": 700, "wikitext-2": 700}
MODES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "per example": ("per_example", (25, 100)),
    "64 groups": (64, (100, 400)),
    "16 groups": (16, (100, 400, 1600)),
    "4 groups": (4, (100, 400, 1600)),
    "shared": ("shared", (100, 400, 1600, 6400)),
}


def head_of(point: Checkpoint, negatives: Any, batch: int) -> rf.SoftmaxHead:
    """A head with the checkpoint's classes, whose default sampler has seen half of the contexts."""
    torch.manual_seed(0)
    num_classes, dim = point.weight.shape
    head = rf.SoftmaxHead(dim, num_classes, negatives=negatives, labels="pick_one")
    head.weight.data.copy_(point.weight)
    seen = len(point.hidden) // 2
    with torch.no_grad():
        for hidden, target in zip(point.hidden[:seen].split(batch), point.target[:seen].split(batch), strict=True):
            head(hidden, target)
    head.rebuild()
    return head


def step_of(loss: Callable[..., Any], optimizer: torch.optim.Optimizer, batches: Batches) -> Callable[[], None]:
    turns = itertools.cycle(batches)

    def step() -> None:
        hidden, target = next(turns)
        optimizer.zero_grad()
        loss(hidden.detach().requires_grad_(), target).backward()
        optimizer.step()

    return step


def full_step(point: Checkpoint, batches: Batches, *, plain: bool) -> Callable[[], None]:
    weight = nn.Parameter(point.weight.clone())

    def streamed(hidden: Any, target: Any) -> Any:
        queries = F.normalize(hidden, dim=1)
        return rf.full_softmax_loss(queries, weight, target, tau=rf.DEFAULT_TAU, normalize=True, labels="pick_one")

    def at_once(hidden: Any, target: Any) -> Any:
        logits = rf.DEFAULT_TAU * F.normalize(hidden, dim=1) @ F.normalize(weight, dim=1).T
        return F.cross_entropy(logits, target.view(len(target)))

    return step_of(at_once if plain else streamed, fused_adam([weight]), batches)


def measure(name: str, point: Checkpoint, options: argparse.Namespace) -> list[dict[str, Any]]:
    size = min(options.batch or BATCH.get(name, 256), len(point.hidden) // 2)
    unseen = len(point.hidden) // 2
    batches = list(zip(point.hidden[unseen:].split(size), point.target[unseen:].split(size), strict=True))
    batches = [batch for batch in batches if len(batch[0]) == size]
    works = {"full": full_step(point, batches, plain=False)}
    if point.target.numel() == len(point.target):
        works["full, plain"] = full_step(point, batches, plain=True)
    rows: list[dict[str, Any]] = [
        {"mode": name, "negatives": 0, "chi2_mean": 0.0, "chi2_median": 0.0} for name in works
    ]
    for mode, (negatives, numbers) in MODES.items():
        head = head_of(point, negatives, size)
        chi2 = diagnose(head, *batches[-1]).chi2
        print(f"  {mode:12s} chi2 {float(chi2.mean()):.3g} (median {float(chi2.median()):.3g})", flush=True)
        for m in (m for m in numbers if m < head.num_classes):
            own = head_of(point, negatives, size)
            own.num_negatives = m
            step = works[f"{mode}, {m}"] = step_of(own, rf.SparseAdam(list(own.parameters()), lr=LR), batches)
            for _ in range(options.warm_up):
                step()
            found = {"chi2_mean": float(chi2.mean()), "chi2_median": float(chi2.median())}
            rows.append({"mode": mode, "negatives": m, **{key: float(f"{value:.4g}") for key, value in found.items()}})
    seconds = interleaved(works, options.repeats)
    full = min(seconds[work] for work in works if work.startswith("full"))
    for row, work in zip(rows, works, strict=True):
        milliseconds, noise = 1e3 * seconds[work], row["chi2_mean"] / max(1, row["negatives"])
        row |= {"milliseconds": round(milliseconds, 2), "times_full": round(full / seconds[work], 2)}
        row |= {"noise": float(f"{noise:.3g}"), "noise_x_milliseconds": float(f"{noise * milliseconds:.3g}")}
        row |= {"batch": size, "dim": point.weight.shape[1], "lr": LR, "warm_up": options.warm_up}
        row |= {"repeats": options.repeats}
        print(f"  {work:20s} {row['milliseconds']:8.2f} ms {row['times_full']:7.2f} x full, noise {row['noise']:.3g}")
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    sets = list(dict.fromkeys(row["data"] for row in rows))
    figure = Figure(figsize=(5 * len(sets), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, name in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets, strict=True):
        for mode in MODES:
            some = [row for row in rows if (row["data"], row["mode"]) == (name, mode)]
            times, noises = [row["milliseconds"] for row in some], [row["noise"] for row in some]
            axis.plot(times, noises, marker="o", label=mode)
            axis.annotate(mode, (times[-1], noises[-1]), fontsize=8)
        of_full = [row["milliseconds"] for row in rows if row["data"] == name and row["mode"].startswith("full")]
        full = min(of_full)
        axis.axvline(full, color="grey", linestyle="--")
        axis.set(xscale="log", yscale="log", xlabel="ms a step (dashed: full softmax)", ylabel="chi2 / m", title=name)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with ptb/, tibkat-gnd/ and gowalla/")
    parser.add_argument("--sets", nargs="+", choices=list(RECIPES), default=["ptb", "tibkat", "gowalla"])
    parser.add_argument("--cache", type=Path, default=Path(".cache/quality"), help="for trained models")
    parser.add_argument("--batch", type=int, default=0, help="queries of a step; 0 for 700 of text and 256 of others")
    parser.add_argument("--warm-up", type=int, default=200, help="steps of each head before it is timed")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved repetitions; the median counts")
    parser.add_argument("--output", type=Path, default=Path("results/bench_modes.csv"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.sets:
        point = list(load(name, options.data, options.cache).values())[-1]
        print(f"{name}: n = {len(point.weight):,}, step {point.step}, loss {point.loss:.3f}", flush=True)
        rows += [{"data": name, "num_classes": len(point.weight), **row} for row in measure(name, point, options)]
        write_rows(options.output, rows)
    plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
