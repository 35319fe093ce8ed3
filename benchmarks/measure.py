"""Timing side by side and rows with their circumstances, for all benchmarks."""

import csv
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch


def interleaved(works: Mapping[str, Callable[[], Any]], repeats: int, burst: float = 0.02) -> dict[str, float]:
    """Median seconds a call of each work. All take turns in every repetition, so that noise of the machine falls on all
    alike; a turn is a burst of calls of at least `burst` seconds, so that one work does not pay for the caches that
    another one has filled. The first repetition warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repetition in range(1 + repeats):
        for name, work in works.items():
            calls, start = 0, time.perf_counter()
            while (passed := time.perf_counter() - start) < burst or not calls:
                work()
                calls += 1
            if repetition:
                seconds[name].append(passed / calls)
    return {name: median(times) for name, times in seconds.items()}


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
        "machine": _machine(),
        "commit": _commit(),
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


def _machine() -> str:
    return f"{platform.machine()} {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.system()}"


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return asked.stdout.strip() or "unknown"
