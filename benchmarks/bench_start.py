"""What the first use in a process costs: the import, and the first steps, which load or compile the kernels.

The cost is what these take more than later steps do. Torch's own imports are told apart from it.

Each run is a process of its own. The first has an empty directory for numba's cache, as the first run ever has, and
compiles; the others find its kernels there. `NUMBA_CACHE_DIR` names that directory; by default numba takes the
`__pycache__` beside the library's files, or one of the user's where that cannot be written.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from measure import write_rows

STEPS = """
import json, sys, time
times = [time.perf_counter()]
import torch
torch.optim.SparseAdam([torch.zeros(1, requires_grad=True)])  # torch's first optimizer imports much of torch
times.append(time.perf_counter())
import rfsoftmax as rf
times.append(time.perf_counter())
for mode in ("per_example", "shared"):
    head = rf.SoftmaxHead(64, 10_000, negatives=mode)
    optimizer = rf.SparseAdam(list(head.parameters()), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        head(torch.randn(256, 64), torch.randint(10_000, (256,))).backward()
        optimizer.step()
        times.append(time.perf_counter())
seconds = [b - a for a, b in zip(times, times[1:])]
names = ["import_torch", "import_rfsoftmax"]
names += [f"{mode}_step_{i}" for mode in ("per_example", "shared") for i in (1, 2, 3)]
print(json.dumps(dict(zip(names, seconds))))
"""


def start(cache: Path) -> dict[str, float]:
    """Seconds by what was done first in a process, with numba's cache in that directory."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", STEPS]
    seconds: dict[str, float] = json.loads(
        subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    # All that is more than in a process that has begun: the third step of a mode is like any later one.
    later = 3 * (seconds["per_example_step_3"] + seconds["shared_step_3"])
    steps = sum(time for name, time in seconds.items() if "step" in name)
    return {**seconds, "first_use": seconds["import_rfsoftmax"] + steps - later}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs with a filled cache; the median counts")
    parser.add_argument("--output", type=Path, default=Path("results/bench_start.csv"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = [start(Path(directory)) for _ in range(1 + options.repeats)]
        size = sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())
    later: dict[str, Any] = {name: median(run[name] for run in runs[1:]) for name in runs[0]}
    rows = []
    for cache, found in (("empty", runs[0]), ("filled", later)):
        rows.append({"cache": cache, **{f"{name}_seconds": round(time, 3) for name, time in found.items()}})
        rows[-1] |= {"cache_bytes": size, "repeats": 1 if cache == "empty" else options.repeats}
        print(f"cache {cache}: first use {found['first_use']:.2f} s; torch itself {found['import_torch']:.2f} s")
    write_rows(options.output, rows)


if __name__ == "__main__":
    main()
