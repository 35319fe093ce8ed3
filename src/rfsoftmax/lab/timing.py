"""Timing side by side, and the circumstances that a number comes from."""

import functools
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
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


def machine() -> str:
    return f"{platform.machine()} {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.system()}"


@functools.cache
def commit() -> str:
    """The commit of this source when the process first asked, with -dirty if it was changed; unknown without git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"
