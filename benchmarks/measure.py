"""Rows with their circumstances, for all benchmarks; how they are timed is the lab's."""

import csv
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rfsoftmax.lab.timing import commit, interleaved, machine

__all__ = ["interleaved", "resident_bytes", "write_rows"]


def resident_bytes(which: str = "VmRSS") -> int:
    """What this process holds in memory, or, by VmHWM, the most it ever held.

    Not by getrusage: there a new process begins with the peak of the one that started it.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise RuntimeError(f"memory: expected Linux, whose {status} tells it, got {platform.system()}")
    return next(1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(which))


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
