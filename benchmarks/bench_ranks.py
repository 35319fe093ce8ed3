"""Does a model learn the same on several ranks? The same training run by one process and by R, with several seeds.

Each run is `rfsoftmax train text` on the embedded Python sources, by itself and by torchrun with `--shard-classes`: the
same settings, the same words a step, the classes of the second split over the ranks. What is compared is the
perplexity of the validation text after the last step; the spread over seeds is the yardstick.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from measure import write_rows

BATCH, WORDS = 16, 20  # streams of text, and words of each in a step


def settings(options: argparse.Namespace, seed: int) -> list[str]:
    given = {
        "data": "python-text",
        "vocab": options.vocab,
        "dim": options.dim,
        "num-negatives": options.negatives,
        "batch-size": BATCH,
        "seq-len": WORDS,
        "train-limit": BATCH * WORDS * options.steps,
        "eval-limit": options.eval_limit,
        "epochs": 1,
        "seed": seed,
        "cache": options.cache,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def perplexity(ranks: int, directory: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """That of the last evaluation of a run on so many ranks, and how many steps it took."""
    train = ["-m", "rfsoftmax", "train", "text", "--run-directory", str(directory), *settings(options, seed)]
    if ranks > 1:
        train = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *train, "--shard-classes"]
    done = subprocess.run([sys.executable, *train], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        raise RuntimeError(f"train: expected it to end well on {ranks} ranks, got exit status {done.returncode}")
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    last: dict[str, Any] = [line for line in lines if line["kind"] == "valid"][-1]
    return {"steps": last["step"], "perplexity": round(last["perplexity"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seeds", type=int, default=3, help="each number of ranks so often")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--vocab", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--negatives", type=int, default=100)
    parser.add_argument("--eval-limit", type=int, default=50_000, help="words of the validation text")
    parser.add_argument("--cache", type=Path, default=Path(".cache/python-text"))
    parser.add_argument("--output", type=Path, default=Path("results/bench_ranks.csv"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for seed in range(options.seeds):
            for ranks in options.ranks:
                found = perplexity(ranks, Path(place) / f"{ranks}-{seed}", options, seed)
                sizes = {"num_classes": options.vocab, "dim": options.dim, "negatives": options.negatives}
                rows.append({"ranks": ranks, "seed": seed, **sizes, **found})
                write_rows(options.output, rows)
    for ranks in options.ranks:
        scores = [float(row["perplexity"]) for row in rows if row["ranks"] == ranks]
        spread = f", standard deviation {stdev(scores):.2f}" if len(scores) > 1 else ""
        each = ", ".join(f"{value:.2f}" for value in scores)
        print(f"{ranks} rank{'s'[: ranks > 1]}: perplexity {each}; mean {mean(scores):.2f}{spread}")


if __name__ == "__main__":
    main()
