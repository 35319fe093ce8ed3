"""How close each sampler's q comes to the softmax, what that does to the gradient, and what a draw costs.

Trains models with the full softmax (Penn Treebank and WikiText-2, LSTM, d = 200; TIBKAT, extreme classification,
d = 128), keeps checkpoints of several points of training and measures all samplers on each:

- chi2 = sum_i p_i^2 / q_i - 1 over the negatives, exactly, on held-out contexts that the samplers have not seen;
- the relative gradient bias |E grad L' - grad L| / |grad L| over all contexts, by Monte Carlo;
- microseconds a draw, of m draws for each of a batch of queries, all samplers in turn.

`cost` measures draw plus update on random embeddings at n = 10,000 and n = 1,000,000.
"""

import argparse
import csv
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from checkpoints import RECIPES, Checkpoint, load
from measure import interleaved, write_rows
from torch import Tensor

import rfsoftmax as rf
from rfsoftmax.diagnostics import diagnose, gradient_bias

NEGATIVES = 100
TIMED_BATCH = 128
PAPER_NUS = (1.0, 2.0, 3.0, 4.0)


def methods() -> dict[str, tuple[str, dict[str, Any]]]:
    """Names for the table, each with the name and options for `make_sampler`; "default" is the head's own."""
    paper = {"num_features": 1024, "block_size": 1, "leaf": "kernel"}
    anchored = {"num_features": 128, "anchor": True, "nu": "auto"}
    return {
        "uniform": ("uniform", {}),
        "log-uniform": ("log_uniform", {}),
        "unigram": ("unigram", {}),
        "in-batch": ("in_batch", {}),
        "quadratic": ("quadratic", {"leaf": "kernel"}),
        **{f"rff of the paper, nu {nu:g}": ("rff", {"nu": nu, **paper}) for nu in PAPER_NUS},
        "rff of the paper, nu auto": ("rff", {"nu": "auto", **paper}),
        "rff, exact leaves of 64": ("rff", {"nu": "auto", "num_features": 1024}),
        "LSH": ("lsh", {}),
        "MIDX, 64 words": ("midx", {"num_codewords": 64}),
        "MIDX, 128 words": ("midx", {"num_codewords": 128}),
        "anchored, D 32": ("orf", {**anchored, "num_features": 32}),
        "default": ("default", {}),
        "anchored, D 512": ("orf", {**anchored, "num_features": 512}),
        "moment": ("moment", {}),
        "exact": ("exact", {}),
    }


def make_head(name: str, options: dict[str, Any], point: Checkpoint, negatives: int, seed: int) -> rf.SoftmaxHead:
    """A head with the checkpoint's classes, whose sampler has seen half of the contexts."""
    torch.manual_seed(seed)
    num_classes, dim = point.weight.shape
    sampler = None
    if name != "default":
        sampler = rf.make_sampler(name, num_classes=num_classes, dim=dim, counts=point.counts, **options)
    head = rf.SoftmaxHead(dim, num_classes, sampler, negatives, labels="pick_one")
    head.weight.data.copy_(point.weight)
    head.rebuild()
    with torch.no_grad():
        seen = len(point.hidden) // 2
        for hidden, target in zip(point.hidden[:seen].split(100), point.target[:seen].split(100), strict=True):
            head(hidden, target)
    head.rebuild()
    return head


def measure(
    point: Checkpoint, contexts: int, draws: int, negatives: int, repeats: int, seed: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    works: dict[str, Callable[[], Any]] = {}
    half = len(point.hidden) // 2
    hidden, target = point.hidden[half : half + contexts], point.target[half : half + contexts]
    queries = F.normalize(point.hidden[half : half + TIMED_BATCH], dim=1)
    exclude = point.target[half : half + TIMED_BATCH]
    few = max(2, contexts // 5)
    for label, (name, options) in methods().items():
        head = make_head(name, options, point, negatives, seed)
        chi2 = diagnose(head, hidden, target).chi2
        bias = gradient_bias(
            head, hidden[:few], target[:few], num_draws=draws, generator=torch.Generator().manual_seed(seed)
        )
        head.sampler.eval()
        works[label] = partial(head.sampler.sample, queries, negatives, exclude)
        rows.append(
            {
                "sampler": label,
                "chi2_median": _figures(float(chi2.median())),
                "chi2_mean": _figures(float(chi2.mean())),
                "gradient_bias": _figures(bias.overall),
            }
        )
        print(f"    {label:28s} chi2 {rows[-1]['chi2_median']:>10} (mean {rows[-1]['chi2_mean']:>10})", flush=True)
    seconds = interleaved(works, repeats)
    for row in rows:
        row["microseconds_a_draw"] = _figures(1e6 * seconds[row["sampler"]] / (len(queries) * negatives))
    return rows


def quality(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for name in options.sets:
        for mark, point in load(name, options.data, options.cache).items():
            print(f"{name}, {mark}: step {point.step}, loss {point.loss:.3f}", flush=True)
            about = {"data": name, "point": mark, "step": point.step, "classes": len(point.weight)}
            settings = {name: getattr(options, name) for name in ("contexts", "draws", "negatives", "repeats", "seed")}
            found = measure(point, **settings)
            rows += [{**about, **row, **settings} for row in found]
            write_rows(options.output / "bench_quality.csv", rows)
    print(table(rows))
    plot(rows, options.output / "bench_quality.png")


def cost(options: argparse.Namespace) -> None:
    """Draw and update, on random unit vectors, a batch of 64 with 100 negatives each; every drawn row has moved."""
    rows: list[dict[str, Any]] = []
    works: dict[str, Callable[[], Any]] = {}
    for num_classes in options.num_classes:
        torch.manual_seed(options.seed)
        weight = F.normalize(torch.randn(num_classes, options.dim), dim=1)
        moved = F.normalize(weight + 0.1 * torch.randn(options.dim) / math.sqrt(options.dim), dim=1)
        hidden = F.normalize(torch.randn(64, options.dim) + 1, dim=1)
        target = torch.randint(num_classes, (64,))
        chosen: dict[str, rf.Sampler | None] = {"default": None}
        if num_classes <= options.largest_paper:
            chosen["rff of the paper"] = rf.make_sampler(
                "rff", num_classes=num_classes, dim=options.dim, num_features=1024, block_size=1, leaf="kernel"
            )
        for label, sampler in chosen.items():
            print(f"  building {label}, n = {num_classes:,}", flush=True)
            head = rf.SoftmaxHead(options.dim, num_classes, sampler)
            head.sampler.rebuild(weight)
            head.sampler.sample(hidden, 1)
            head.sampler.rebuild(weight)
            works[f"{label}, n = {num_classes}"] = partial(
                draw_and_update, head.sampler, itertools.cycle([moved, weight]), hidden, target
            )
    seconds = interleaved(works, options.repeats)
    for label, time in seconds.items():
        rows.append({"work": label, "milliseconds": _figures(1e3 * time), "dim": options.dim, "seed": options.seed})
        print(f"{label:40s} {1e3 * time:8.2f} ms")
    write_rows(options.output / "bench_quality_cost.csv", rows)


def draw_and_update(sampler: rf.Sampler, weights: Iterator[Tensor], hidden: Tensor, target: Tensor) -> None:
    """The weights of the next call are those of the last, moved: by more than the default's tolerance."""
    samples = sampler.sample(hidden, NEGATIVES, target)
    ids = torch.cat([samples.ids.flatten(), target]).unique()
    sampler.update(ids, next(weights)[ids])


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row for each sampler, chi2 median / mean and gradient bias at each point."""
    points = list(dict.fromkeys((row["data"], row["point"]) for row in rows))
    cells = {(row["sampler"], row["data"], row["point"]): row for row in rows}
    lines = [
        "| sampler | " + " | ".join(f"{data}, {point}" for data, point in points) + " |",
        "|---" * (len(points) + 1) + "|",
    ]
    for sampler in dict.fromkeys(row["sampler"] for row in rows):
        found = [cells[sampler, data, point] for data, point in points]
        keys = ("chi2_median", "chi2_mean", "gradient_bias")
        texts = [" / ".join(_short(row[key]) for key in keys) for row in found]
        lines.append(f"| {sampler} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """chi2 and gradient bias against the time of a draw, at an early and a late point of each data set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["data"] for row in rows))
    size = (5.5 * len(names), 18)
    figure, axes = plt.subplots(4, len(names), figsize=size, squeeze=False, layout="constrained")
    for (column, name), (first, mark) in itertools.product(enumerate(names), enumerate(("early", "late"))):
        some = [row for row in rows if (row["data"], row["point"]) == (name, mark) and row["sampler"] != "exact"]
        tuned = [row for row in some if row["sampler"].startswith("rff of the paper")]
        worse = [row for row in tuned if row is not min(tuned, key=lambda row: row["chi2_median"])]
        for axis, key, label in (
            (axes[2 * first, column], "chi2_median", "median chi2"),
            (axes[2 * first + 1, column], "gradient_bias", "relative gradient bias (at the bottom: none to be seen)"),
        ):
            shown = [row for row in some if row not in worse]
            least = min(row[key] for row in shown if row[key] > 0) / 2
            for number, row in enumerate(sorted(shown, key=lambda row: row["microseconds_a_draw"])):
                colour = "tab:red" if row["sampler"] == "default" else "tab:blue"
                place = (row["microseconds_a_draw"], max(row[key], least))
                axis.plot(*place, "o", color=colour)
                offset = (5, 5 if number % 2 else -10)
                axis.annotate(row["sampler"], place, offset, fontsize=7, color=colour, textcoords="offset points")
            axis.set(xscale="log", yscale="log", xlabel="microseconds a draw", ylabel=label, title=f"{name}, {mark}")
            axis.grid(alpha=0.3)
            axis.margins(x=0.2)
    figure.savefig(path, dpi=100)


def draw(options: argparse.Namespace) -> None:
    """The table and the plot again, from the rows that are there."""
    with (options.output / "bench_quality.csv").open(newline="") as file:
        numbers = ("chi2_median", "chi2_mean", "gradient_bias", "microseconds_a_draw")
        rows = [{**row, **{name: float(row[name]) for name in numbers}} for row in csv.DictReader(file)]
    print(table(rows))
    plot(rows, options.output / "bench_quality.png")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}" if value > 1e-9 else "0"


def _figures(value: float) -> float:
    """Four figures are more than the noise leaves."""
    return float(f"{value:.4g}") if math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results"))
    parser.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("quality", help="chi2, gradient bias and time a draw on trained models")
    one.add_argument("--data", type=Path, required=True, help="directory with ptb, wikitext-2 and tibkat-gnd")
    one.add_argument("--cache", type=Path, default=Path(".cache/quality"), help="where checkpoints are kept")
    one.add_argument("--sets", nargs="+", choices=list(RECIPES), default=["ptb", "wikitext-2", "tibkat"])
    one.add_argument("--contexts", type=int, default=300, help="held-out contexts for chi2; a fifth for the gradient")
    one.add_argument("--draws", type=int, default=400, help="sets of negatives for the gradient bias")
    one.add_argument("--negatives", type=int, default=NEGATIVES, help="m, a query's draws")
    one.add_argument("--repeats", type=int, default=5, help="turns of the timing")
    one.set_defaults(run=quality)
    two = commands.add_parser("cost", help="draw plus update on random embeddings")
    two.add_argument("--num-classes", type=int, nargs="+", default=[10_000, 1_000_000])
    two.add_argument("--largest-paper", type=int, default=10_000, help="most classes for the paper's tree of 2n sums")
    two.add_argument("--dim", type=int, default=200)
    two.add_argument("--repeats", type=int, default=20)
    two.set_defaults(run=cost)
    three = commands.add_parser("draw", help="the table and the plot again, from bench_quality.csv")
    three.set_defaults(run=draw)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
