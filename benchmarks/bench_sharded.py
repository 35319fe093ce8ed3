"""The sharded head: a training step on R ranks with R times the classes against one rank, and the bytes it sends.

One run has all of it: R processes of one thread each take turns between a step of `ShardedSoftmaxHead` on all of them,
with R n classes, and a step of `SoftmaxHead` on rank 0 alone, with n, while the others wait. A step is draw, loss,
backward, SparseAdam and the update of the sampler, with new queries and targets. Both ways to share the work are timed:
"more data" has the batch of the one rank on each of them, "same data" that batch split over them. Bytes are counted as
they leave a rank, at R n and at a hundredth of it, and held against the formula of docs/distributed.md.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import write_rows
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

import rfsoftmax as rf

NUM_BATCHES = 8
# With so many negatives sampled and exact loss of a batch may differ by so much: by chance, and as log Z' is biased.
CHECKED, CLOSE = 20_000, 0.1

Step = Callable[[], None]


def batches(num_classes: int, dim: int, batch: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Queries (B, d) and targets (B,) by Zipf's law over all classes, spread over the ranks by a permutation."""
    g = torch.Generator().manual_seed(seed)
    ranked = (num_classes ** torch.rand(NUM_BATCHES, batch, generator=g, dtype=torch.float64)).long() - 1
    targets = ranked * 7919 % num_classes  # frequent classes on all ranks alike
    return list(zip(torch.randn(NUM_BATCHES, batch, dim, generator=g), targets, strict=True))


def stepper(head: torch.nn.Module, data: list[tuple[Tensor, Tensor]]) -> Step:
    optimizer, turn = rf.SparseAdam(list(head.parameters()), lr=1e-3), iter(range(10**9))

    def step() -> None:
        hidden, target = data[next(turn) % len(data)]
        optimizer.zero_grad()
        head(hidden.detach().requires_grad_(), target).backward()
        optimizer.step()

    return step


def check(head: Any, data: list[tuple[Tensor, Tensor]]) -> None:
    """The sampled loss must be about the exact one."""
    hidden, target = data[0]
    m, head.num_negatives = head.num_negatives, CHECKED
    with torch.no_grad():
        sampled, exact = float(head.train()(hidden[:64], target[:64])), float(head.eval()(hidden[:64], target[:64]))
    head.train().num_negatives = m
    if abs(sampled - exact) > CLOSE:
        raise AssertionError(f"sampled loss: expected about {exact}, got {sampled}")


def bytes_of_a_step(head: rf.ShardedSoftmaxHead, step: Step, batch: int, dim: int) -> int:
    before = head.ranks.bytes_sent
    step()
    sent, ranks = head.ranks.bytes_sent - before, head.ranks.num
    formula = (ranks - 1) * (8 * batch * (dim + 3) + 8 * ranks + 20)
    if sent != formula:
        raise AssertionError(f"bytes a step: expected {formula}, as docs/distributed.md says, got {sent}")
    return sent


def worker(rank: int, options: argparse.Namespace, place: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{place}/store", options.ranks)
    patience = timedelta(minutes=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks, timeout=patience)
    rows = [row for mode in options.modes for row in measure(rank, mode, options)]
    if rank == 0:
        Path(place, "rows.json").write_text(json.dumps(rows))
    dist.barrier()  # one that leaves early takes the connections of the others with it
    dist.destroy_process_group()


def measure(rank: int, mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    n, ranks, dim, batch, kind = options.num_classes, options.ranks, options.dim, options.batch, options.negatives
    torch.manual_seed(0)
    say(rank, f"{mode} negatives: building")
    steps: dict[tuple[str, int], Step] = {}
    if rank == 0:
        alone: Any = rf.SoftmaxHead(dim, n, num_negatives=kind, negatives=mode)  # type: ignore[arg-type]
        check(alone, batches(n, dim, batch, 1))
        steps["one rank", n] = stepper(alone, batches(n, dim, batch, 1))
    sent = {}
    for num_classes in (max(4 * kind, ranks * n // 100), ranks * n):
        head: Any = rf.ShardedSoftmaxHead(dim, num_classes, num_negatives=kind, negatives=mode)  # type: ignore[arg-type]
        data = batches(num_classes, dim, batch, 2 + rank)
        check(head, data)
        more = stepper(head, data)
        sent[num_classes] = bytes_of_a_step(head, more, batch, dim)
    steps["more data", ranks * n] = more
    steps["same data", ranks * n] = stepper(head, [(h[: batch // ranks], t[: batch // ranks]) for h, t in data])
    names = [("one rank", n), ("more data", ranks * n), ("same data", ranks * n)]
    seconds = in_turns(names, steps, options)
    if rank:
        return []
    rows = []
    for (name, num_classes), each in seconds.items():
        row = {
            "work": name,
            "ranks": 1 if name == "one rank" else ranks,
            "num_classes": num_classes,
            "dim": dim,
            "batch_of_a_rank": batch // ranks if name == "same data" else batch,
            "negatives": kind,
            "mode": mode,
            "milliseconds": round(1e3 * each, 3),
            "times_one_rank": round(each / seconds["one rank", n], 3),
            "bytes_sent_by_a_rank": sent[num_classes] if name == "more data" else "",
            "repeats": options.repeats,
        }
        rows.append(row)
        say(
            rank,
            f"  {name:10s} n = {num_classes:>10,}  {row['milliseconds']:>9} ms  {row['times_one_rank']} x one rank",
        )
    small = min(sent)
    rows.append({**rows[1], "num_classes": small, "milliseconds": "", "times_one_rank": "", "work": "bytes alone"})
    rows[-1]["bytes_sent_by_a_rank"] = sent[small]
    say(
        rank,
        f"  bytes sent by a rank in a step: {sent[small]:,} at n = {small:,}, {sent[ranks * n]:,} at n = {ranks * n:,}",
    )
    return rows


def in_turns(
    names: list[tuple[str, int]], steps: dict[tuple[str, int], Step], options: argparse.Namespace
) -> dict[tuple[str, int], float]:
    """Median seconds a step of each work, on rank 0, all of which take turns; the first round warms up."""
    seconds: dict[tuple[str, int], list[float]] = {name: [] for name in names}
    for repetition in range(1 + options.repeats):
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            if name in steps:
                for _ in range(options.steps):
                    steps[name]()
            passed = time.perf_counter() - start
            if repetition:
                seconds[name].append(passed / options.steps)
    return {name: median(times) for name, times in seconds.items()}


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--num-classes", type=int, default=1_000_000, help="n of the one rank")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--negatives", type=int, default=128, help="m")
    parser.add_argument("--modes", nargs="+", choices=("per_example", "shared"), default=["per_example", "shared"])
    parser.add_argument("--repeats", type=int, default=15, help="turns of each work; the median counts")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--output", type=Path, default=Path("results/bench_sharded.csv"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        spawn(worker, (options, place), nprocs=options.ranks)
        rows = json.loads(Path(place, "rows.json").read_text())
    write_rows(options.output, rows)


if __name__ == "__main__":
    main()
