"""The memory of a head with the default sampler, by formula: bytes per class of every part, and the ranks that n takes.

Prints the tables of docs/scaling.md; with `--measured results/bench_memory.csv` also the one that sets the formula
beside what bench_memory.py found.
"""

import argparse
import csv
import math
from pathlib import Path

from rfsoftmax.head import default_sampler

BLOCK = 64
MOMENTS = {"SparseAdam": 2, "Adagrad": 1, "SGD": 0}
ITEM = {"float32": 4, "bfloat16": 2}
# A rank of 64 GB of which a tenth stays free, and what a process takes before it has any class: torch and kernels.
RANK, PROCESS = 0.9 * 64e9, 0.5e9


def trained(dim: int, dtype: str, optimizer: str) -> dict[str, float]:
    """Bytes per class of what any training of the embeddings needs."""
    embedding = ITEM[dtype] * dim
    return {"embeddings": embedding, f"state of {optimizer}": MOMENTS[optimizer] * embedding}


def sampler(num_classes: float, dim: int) -> dict[str, float]:
    """Bytes per class of the default sampler. Two nodes of 2 D float32 sums, a weight and a count each for a block."""
    features = default_sampler(int(num_classes))["num_features"]
    return {
        "copy of the embeddings in bytes": dim,
        "their units": 4,
        "sums of the tree": 2 * 2 * features * 4 / BLOCK,
        "weights and counts of the tree": 2 * (8 + 8) / BLOCK,
        "order and position, int32": 8,
        "bias": 4,
    }


def rebuild() -> float:
    """Bytes per class that a rebuild holds for a moment: keys of the sort and the new order, less the old tables."""
    return 8 + 4 - 8


def total(num_classes: float, dim: int, dtype: str, optimizer: str) -> float:
    return sum(trained(dim, dtype, optimizer).values()) + sum(sampler(num_classes, dim).values()) + rebuild()


def ranks(num_classes: float, dim: int, dtype: str, optimizer: str) -> int:
    return math.ceil(num_classes * total(num_classes, dim, dtype, optimizer) / (RANK - PROCESS))


def parts_table(num_classes: float, dim: int, optimizer: str = "SparseAdam") -> list[str]:
    own = {**sampler(num_classes, dim), "rebuild, for a moment": rebuild()}
    columns = [{**trained(dim, dtype, optimizer), **own} for dtype in ITEM]
    lines = [f"| bytes per class, d = {dim} | {' | '.join(ITEM)} |", "|---|---|---|"]
    lines += [f"| {part} | {' | '.join(f'{column[part]:g}' for column in columns)} |" for part in columns[0]]
    least = [sum(trained(dim, dtype, optimizer).values()) for dtype in ITEM]
    sums = [sum(column.values()) for column in columns]
    lines.append(f"| all | {' | '.join(f'{s:g}' for s in sums)} |")
    ratios = " | ".join(f"{s / need:.2f}" for s, need in zip(sums, least, strict=True))
    return [*lines, f"| all, over embeddings and optimizer | {ratios} |"]


def ranks_table() -> list[str]:
    sizes = {"10^7": 1e7, "10^8": 1e8, "10^9": 1e9}
    heading = f"| d, dtype, optimizer | bytes per class | {' | '.join(f'n = {name}' for name in sizes)} |"
    lines = [heading, "|---" * 5 + "|"]
    for dim in (64, 128, 256):
        for dtype, optimizer in (("float32", "SparseAdam"), ("float32", "SGD"), ("bfloat16", "SparseAdam")):
            each = total(1e7, dim, dtype, optimizer)
            cells = [f"{_size(n * each)}: {_ranks(ranks(n, dim, dtype, optimizer))}" for n in sizes.values()]
            lines.append(f"| {dim}, {dtype}, {optimizer} | {each:,.1f} | {' | '.join(cells)} |")
    return lines


def measured_table(paths: list[Path]) -> list[str]:
    found = [row for path in paths for row in csv.DictReader(path.read_text().splitlines())]
    rows = [row for row in found if row["method"].startswith("ours")]
    heading = "| measured | n | formula | peak | peak less imports | the same over embeddings and optimizer |"
    lines = [heading, "|---" * 6 + "|"]
    for row in rows:
        n, dim, own = int(row["num_classes"]), int(row["dim"]), int(row["peak_bytes"]) - int(row["imported_bytes"])
        of_formula = n * total(n, dim, row["dtype"], "SparseAdam")
        cells = [_size(size) for size in (of_formula, int(row["peak_bytes"]), own)]
        name = f"{row['method'].removeprefix('ours, ')}, {row['dtype']}, d = {dim}"
        lines.append(f"| {name} | {n:,} | {' | '.join(cells)} | {row['times_needed']} |")
    return lines


def _size(size: float) -> str:
    unit, name = (1e12, "TB") if size >= 1e12 else (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:.3g} {name}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, nargs="+", help="rows of bench_memory.py to set beside the formula")
    options = parser.parse_args()
    tables = [parts_table(1e7, 64), ranks_table()]
    tables += [measured_table(options.measured)] if options.measured else []
    print("\n\n".join("\n".join(lines) for lines in tables))


if __name__ == "__main__":
    main()
