"""What it costs to keep the sampler up with the weight: updates of k rows and rebuilds, against n and D.

Updates are of rows that all moved (no tolerance). Rebuilds are set against whole training steps: the share of the time
that they take at the default `rebuild_every`, per mode. Everything of one n and D takes turns in one process. In the
end the updated sampler must give the probabilities that one built from the same rows gives.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_step import MODES, Batches, step_of
from measure import interleaved, write_rows
from torch import Tensor

import rfsoftmax as rf
from rfsoftmax.head import default_sampler

# Updates add and subtract features in float32, so log q may drift from that of a rebuild by so much.
CLOSE = 0.01
# In a turn, so that all but the first of them update the rows of a step of their own mode.
STEPS = 10


class Updates:
    """k rows of a sampler that move there and back, and all of them each time."""

    def __init__(self, head: rf.SoftmaxHead, k: int) -> None:
        g = torch.Generator().manual_seed(k)
        self.sampler: Any = head.sampler
        self.ids = torch.randperm(head.num_classes, generator=g)[:k]
        before = F.normalize(head.weight.detach()[self.ids], dim=1)
        after = F.normalize(before + 0.3 * torch.randn(before.shape, generator=g) / head.dim**0.5, dim=1)
        self.all = itertools.cycle([after, before])

    def run(self) -> None:
        self.sampler.tolerance = 0.0
        self.sampler.update(self.ids, next(self.all))


def make_head(num_classes: int, num_features: int, options: argparse.Namespace) -> rf.SoftmaxHead:
    torch.manual_seed(0)
    chosen = {**default_sampler(num_classes), "num_features": num_features}
    sampler = rf.make_sampler(num_classes=num_classes, dim=options.dim, **chosen)
    return rf.SoftmaxHead(options.dim, num_classes, sampler, options.negatives)


def steps(head: rf.SoftmaxHead, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """STEPS training steps by mode, all of the same head: a second one would need twice the memory."""
    step, batches = step_of(head), Batches(head.num_classes, head.dim, options.batch)
    sampler: Any = head.sampler
    tolerance = sampler.tolerance

    def take(mode: Any) -> None:
        head.negatives, sampler.tolerance = mode, tolerance
        for _ in range(STEPS):
            batches.run(step)

    return {f"step, {mode}": lambda mode=mode: take(mode) for mode in options.modes}  # type: ignore[misc]


def check(head: rf.SoftmaxHead, updates: list[Updates]) -> None:
    """Updates of many rows must lead where a rebuild from the same rows does, with order and anchor as they are."""
    sampler: Any = head.sampler
    g = torch.Generator().manual_seed(3)
    hidden = F.normalize(torch.randn(8, head.dim, generator=g), dim=1)
    ids = torch.randint(head.num_classes, (8, 32), generator=g)
    sampler.tolerance = 0.0
    # Given, not normalised by either: to the last bit, as a number between two bytes may round to either of them. And
    # moved far: a row of bytes does not follow what moves by less than it was rounded by.
    rows = F.normalize(head.weight.detach(), dim=1)
    sampler.rebuild(rows)
    for some in updates:
        rows[some.ids] = rows[some.ids].roll(1, 0)
        sampler.update(some.ids, rows[some.ids])
    found = sampler.log_prob(hidden, ids)
    sampler.keep_order = True
    sampler.rebuild(rows)
    expected: Tensor = sampler.log_prob(hidden, ids)
    if (worst := float((found - expected).abs().max())) > CLOSE:
        raise AssertionError(f"log q after updates: expected that of a rebuild within {CLOSE}, got {worst} off")


def measure(num_classes: int, num_features: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    head = make_head(num_classes, num_features, options)
    head.rebuild()
    updates = {k: Updates(head, k) for k in options.rows if k <= num_classes}
    works: dict[str, Callable[[], Any]] = {**steps(head, options), "rebuild": head.rebuild}
    works |= {f"update {k}": some.run for k, some in updates.items()}
    seconds = interleaved(works, options.repeats)
    seconds |= {name: time / STEPS for name, time in seconds.items() if name.startswith("step")}
    check(head, list(updates.values()))
    settings = {"num_classes": num_classes, "dim": options.dim, "num_features": num_features}
    settings |= {"batch": options.batch, "negatives": options.negatives, "repeats": options.repeats}
    every = head.rebuild_every
    shares = {
        f"rebuild_share_{mode}": round(seconds["rebuild"] / (seconds["rebuild"] + every * seconds[f"step, {mode}"]), 4)
        for mode in options.modes
    }
    blank = dict.fromkeys(["rows", "microseconds_a_row", "rebuild_every", *shares], "")
    rows = []
    for name, time in seconds.items():
        k = num_classes if name == "rebuild" else int(name.removeprefix("update ")) if "update" in name else 0
        row = {"operation": name.split(" ")[0] if "update" in name else name, **settings, "milliseconds": 1e3 * time}
        row |= blank | ({"rows": k, "microseconds_a_row": round(1e6 * time / k, 4)} if k else {})
        row |= {"rebuild_every": every, **shares} if name == "rebuild" else {}
        rows.append(row)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for features, k in dict.fromkeys((r["num_features"], r["rows"]) for r in rows if r["operation"] == "update"):
        some = [r for r in rows if (r["operation"], r["num_features"], r["rows"]) == ("update", features, k)]
        points = [r["num_classes"] for r in some], [r["microseconds_a_row"] for r in some]
        left.plot(*points, marker="o", label=f"D = {features}, k = {k:,}")
    for features in dict.fromkeys(r["num_features"] for r in rows):
        some = [r for r in rows if (r["operation"], r["num_features"]) == ("rebuild", features)]
        points = [r["num_classes"] for r in some], [r["milliseconds"] / 1e3 for r in some]
        right.plot(*points, marker="o", label=f"D = {features}")
    left.set(xscale="log", yscale="log", xlabel="classes", ylabel="microseconds a row", title="update of k rows")
    right.set(xscale="log", yscale="log", xlabel="classes", ylabel="seconds", title="rebuild")
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--num-classes", type=int, nargs="+", default=sizes)
    parser.add_argument("--num-features", type=int, nargs="+", default=[128, 256, 1024], help="D")
    parser.add_argument("--rows", type=int, nargs="+", default=[100, 1000, 10_000, 33_000], help="k, where below n")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256, help="of the steps")
    parser.add_argument("--negatives", type=int, default=128, help="m of the steps")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repetitions; the median counts")
    parser.add_argument("--output", type=Path, default=Path("results/bench_update.csv"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for n, features in itertools.product(options.num_classes, options.num_features):
        print(f"n = {n:,}, D = {features}", flush=True)
        some = measure(n, features, options)
        for row in some:
            name = f"{row['operation']} of {row['rows']:,} rows" if row["rows"] else row["operation"]
            each = f"{row['microseconds_a_row']:10.2f} us a row" if row["rows"] else ""
            shares = [f"{row[f'rebuild_share_{mode}']:.1%} of {mode}" for mode in options.modes if row["rebuild_every"]]
            print(f"  {name:28s} {row['milliseconds']:12.2f} ms {each} {', '.join(shares)}", flush=True)
        rows += some
        write_rows(options.output, rows)
    plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
