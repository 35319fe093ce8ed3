"""Peak resident memory of training the output layer: the steps of bench_step.py, each method in a process of its own.

A run builds the layer and its optimizer, takes some steps, for ours with a rebuild of the sampler among them, and tells
the most memory that its process ever held, less what it held once its imports were done. Beside it stands what the
parameters and the state of the optimizer need by themselves. Before all, a tiny run of ours fills numba's cache: to
compile the kernels takes some 100 MB more than to load them.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from bench_step import MODES, Batches, Step, baselines, our_head, step_of
from measure import resident_bytes, write_rows


def run(method: str, options: argparse.Namespace) -> dict[str, int]:
    """The bytes of one method, for the first of the given sizes, in this process."""
    torch.optim.SparseAdam([torch.zeros(1, requires_grad=True)])  # torch's first optimizer imports much of torch
    imported = resident_bytes()
    n, dim = options.num_classes[0], options.dim
    batches = Batches(n, dim, options.batch, options.steps)
    mode = method.removeprefix("ours, ")
    if mode in MODES:
        head = our_head(n, dim, options.negatives, mode).to(getattr(torch, options.dtype))
        step = step_of(head)
    else:
        step = baselines()[method](n, dim, options.negatives)
    for number in range(options.steps):
        batches.run(step)
        if mode in MODES and number == options.steps // 2:
            head.rebuild()
    return {"peak_bytes": resident_bytes("VmHWM"), "imported_bytes": imported, "needed_bytes": needed(step)}


def needed(step: Step) -> int:
    """Bytes of parameters and optimizer state."""
    parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
    state = [value for p in parameters for value in step.optimizer.state[p].values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in [*parameters, *state])


def measure(method: str, num_classes: int, options: argparse.Namespace) -> dict[str, Any]:
    """A row, from a process of its own."""
    settings: dict[str, Any] = {"dim": options.dim, "batch": options.batch, "negatives": options.negatives}
    settings |= {"steps": options.steps, "dtype": options.dtype if method.startswith("ours") else "float32"}
    arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, __file__, "--run", method, "--num-classes", str(num_classes), *arguments]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    own = found["peak_bytes"] - found["imported_bytes"]
    return {
        "method": method,
        "num_classes": num_classes,
        **settings,
        **found,
        "times_needed": round(own / found["needed_bytes"], 3),
        "times_needed_with_imports": round(found["peak_bytes"] / found["needed_bytes"], 3),
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name in dict.fromkeys(row["method"] for row in rows):
        some = {
            row["num_classes"]: (row["peak_bytes"] - row["imported_bytes"]) / 1e9
            for row in rows
            if row["method"] == name
        }
        axis.plot(list(some), list(some.values()), marker="o", label=name, lw=2.5 if name.startswith("ours") else 1)
    least = {row["num_classes"]: row["needed_bytes"] / 1e9 for row in rows if row["method"].startswith("ours")}
    axis.plot(list(least), list(least.values()), "k:", label="embeddings and Adam's two moments")
    axis.set(xscale="log", yscale="log", xlabel="classes", ylabel="peak memory less imports, GB")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--num-classes", type=int, nargs="+", default=sizes)
    parser.add_argument("--largest-baseline", type=int, default=1_000_000, help="above it only ours is measured")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of our embeddings")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--negatives", type=int, default=128, help="m")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--baselines", nargs="*", choices=list(baselines()), default=list(baselines()))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("results/bench_memory.csv"))
    parser.add_argument("--run", metavar="METHOD", help="measure one method in this process and print its bytes")
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options)))
        return
    for mode in options.modes:
        measure(f"ours, {mode}", 10 * options.negatives, options)
    rows: list[dict[str, Any]] = []
    for n in options.num_classes:
        methods = [f"ours, {mode}" for mode in options.modes]
        for method in methods + (options.baselines if n <= options.largest_baseline else []):
            rows.append(measure(method, n, options))
            own, least = rows[-1]["peak_bytes"] - rows[-1]["imported_bytes"], rows[-1]["needed_bytes"]
            sizes_text = f"{own / 1e6:>10,.0f} MB, parameters and optimizer {least / 1e6:>8,.0f} MB"
            print(f"{method:36s} n = {n:>10,} {sizes_text}: {rows[-1]['times_needed']} times", flush=True)
            write_rows(options.output, rows)
    plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
