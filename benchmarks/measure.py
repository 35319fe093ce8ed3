"""Rows with their circumstances, for all benchmarks; how they are timed is the lab's."""

import csv
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rfsoftmax.lab.timing import commit, interleaved, machine

__all__ = ["interleaved", "write_rows"]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows as CSV, each with the machine, the commit and the command that made it."""
    circumstances = {
        "machine": machine(),
        "commit": commit(),
        "command": " ".join(Path(word).name if "/" in word else word for word in sys.argv),
    }
    full = [{**row, **circumstances} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(full[0]))
        writer.writeheader()
        writer.writerows(full)
    beside.replace(path)
