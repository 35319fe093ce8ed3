"""Table 2 of the paper by `rfsoftmax.lab.table2`, at any size and with all our samplers, as CSV and plot."""

import argparse
from pathlib import Path
from typing import Any

from measure import write_rows

from rfsoftmax.lab import table2


def main() -> None:
    parser = argparse.ArgumentParser(description=table2.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-classes", type=int, nargs="+", default=[10_000, 500_000, 5_000_000])
    parser.add_argument("--num-features", type=int, nargs="+", default=[50, 200, 500, 1000])
    parser.add_argument("--repeats", type=int, default=50, help="interleaved repetitions; the median counts")
    parser.add_argument("--output", type=Path, default=Path("results/bench_loss.csv"))
    options = parser.parse_args()
    rows = []
    for num_classes in options.num_classes:
        print(f"n = {num_classes:,}", flush=True)
        some = [
            {**row, "dim": table2.DIM, "batch": table2.BATCH, "negatives": table2.NEGATIVES, "block_size": table2.BLOCK}
            for row in table2.measure(num_classes, options.num_features, options.repeats, others=True)
        ]
        for row in some:
            cells = (row["milliseconds"], row["times_faster_than_exp"], row["tree_megabytes"])
            print(f"  {row['method']:24s} {cells[0]:10.3f} ms {cells[1]:8.1f} x EXP {cells[2]:9.1f} MB of sums")
        rows += some
        write_rows(options.output, rows)
    if len(options.num_classes) > 1:
        print_growth(rows, options.num_classes[0], options.num_classes[-1])
    plot(rows, options.output.with_suffix(".png"))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds against n; the names stand at the ends of their lines, apart from one another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    lines = {name: [row for row in rows if row["method"] == name] for name in dict.fromkeys(r["method"] for r in rows)}
    floor = 0.0
    for name, some in sorted(lines.items(), key=lambda item: item[1][-1]["milliseconds"]):
        colour = "tab:red" if name.startswith("exp") or name == "exact" else "tab:blue"
        axis.plot([r["num_classes"] for r in some], [r["milliseconds"] for r in some], "o-", color=colour, lw=1, ms=3)
        height = max(some[-1]["milliseconds"], 1.12 * floor)
        axis.annotate(name, (1.15 * some[-1]["num_classes"], height), fontsize=8, color=colour, va="center")
        floor = height
    axis.set(xscale="log", yscale="log", xlabel="classes", ylabel="milliseconds of draw and loss, batch 10, m = 10")
    axis.set_xlim(right=8 * max(row["num_classes"] for row in rows))
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def print_growth(rows: list[dict[str, Any]], low: int, high: int) -> None:
    times = {(row["method"], row["num_classes"]): row["milliseconds"] for row in rows}
    for method in dict.fromkeys(row["method"] for row in rows):
        print(f"{method:24s} n = {high:,} over n = {low:,}: {times[method, high] / times[method, low]:.2f} x")


if __name__ == "__main__":
    main()
