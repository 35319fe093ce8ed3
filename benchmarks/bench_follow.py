"""What it costs in chi2 that of the negatives drawn few are looked at for what has moved: by `follow_every`.

On models trained with the full softmax (Penn Treebank, TIBKAT, Gowalla; the last checkpoint of each) the output layer
is trained further with the default sampler, on held-out queries, and never rebuilt: SparseAdam, m = 100 negatives of
each query's own. After so many steps chi2 of the sampler as it then is, on other held-out queries, median and mean.
"""

import argparse
from pathlib import Path
from typing import Any

from bench_modes import BATCH, head_of, step_of
from bench_step import LR
from checkpoints import RECIPES, Checkpoint, load
from measure import write_rows

import rfsoftmax as rf
from rfsoftmax.diagnostics import diagnose


def measure(point: Checkpoint, follow_every: int, batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    half = len(point.hidden) // 2
    head = head_of(point, "per_example", min(batch, half))
    head.rebuild_every = max(options.steps) + 2 * len(point.hidden)
    # As after a long training: else it would be rebuilt in the first hundred forwards.
    head._all_forwards = head.rebuild_every
    head.sampler.follow_every = follow_every
    queries, labels = point.hidden[half:].split(batch), point.target[half:].split(batch)
    step = step_of(head, rf.SparseAdam([head.weight], lr=LR), list(zip(queries, labels, strict=True)))
    rows: list[dict[str, Any]] = []
    done = 0
    for steps in sorted(options.steps):
        for _ in range(steps - done):
            step()
        done = steps
        head._freshen()
        chi2 = diagnose(head, point.hidden[: options.contexts], point.target[: options.contexts]).chi2
        found = {"chi2_median": float(chi2.median()), "chi2_mean": float(chi2.mean())}
        rows.append({"steps": steps, **{name: float(f"{value:.4g}") for name, value in found.items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the directory with ptb/, tibkat-gnd/ and gowalla/")
    parser.add_argument("--sets", nargs="+", choices=list(RECIPES), default=["ptb", "tibkat", "gowalla"])
    parser.add_argument("--follow-every", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 300], help="when chi2 is measured")
    parser.add_argument("--contexts", type=int, default=200, help="held-out queries for chi2")
    parser.add_argument("--batch", type=int, help="queries of a step; by default 700 of text and 256 of others")
    parser.add_argument("--cache", type=Path, default=Path(".cache/quality"), help="where checkpoints are kept")
    parser.add_argument("--output", type=Path, default=Path("results/bench_follow.csv"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.sets:
        point = list(load(name, options.data, options.cache).values())[-1]
        batch = options.batch or BATCH.get(name, 256)
        for every in options.follow_every:
            for found in measure(point, every, batch, options):
                settings = {"batch": batch, "lr": LR, "contexts": options.contexts}
                rows.append({"data": name, "follow_every": every, **found, **settings})
                print(
                    f"{name:10s} follow_every {every:3d}, {found['steps']:5d} steps: chi2 {found['chi2_median']} "
                    f"(mean {found['chi2_mean']})",
                    flush=True,
                )
            write_rows(options.output, rows)


if __name__ == "__main__":
    main()
