"""Table 2 of the paper: wall time of the sampled softmax loss (batch 10, m = 10, d = 64), drawing included.

Every row draws with another sampler and computes the loss of the same embeddings, without gradients. EXP is timed
four times: as anyone would write it in torch (`exp, plain`), written for speed (`exp, in place`, with a distribution
function in float32 and in float64), and as our streamed `exact`; ratios are against the fastest of all four. The kernel
samplers keep their copy of the embeddings in bfloat16.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import interleaved, write_rows
from torch import Tensor

import rfsoftmax as rf

DIM, BATCH, NEGATIVES, BLOCK = 64, 10, 10, 64


def sampled_loss(sampler: rf.Sampler, weight: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
    """The sampled softmax loss of normalised hidden and weight."""
    samples = sampler.sample(hidden, NEGATIVES, exclude=target)
    ids = torch.cat([target[:, None], samples.ids], 1)
    logits = F.embedding(ids, weight).mul_(hidden[:, None]).sum(-1).mul_(rf.DEFAULT_TAU)
    return rf.sampled_softmax_loss(logits[:, 0], logits[:, 1:], samples.log_q)


def plain_exp(weight: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
    """The same with q = the softmax over the negatives, as anyone would write it in torch."""
    logits = (hidden * rf.DEFAULT_TAU) @ weight.T
    target_logit = logits.gather(1, target[:, None])
    log_q = logits.scatter(1, target[:, None], -torch.inf).log_softmax(1)
    ids = torch.multinomial(log_q.exp(), NEGATIVES, replacement=True)
    return rf.sampled_softmax_loss(target_logit[:, 0], logits.gather(1, ids), log_q.gather(1, ids))


def exp_in_place(weight: Tensor, hidden: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by inverting the distribution function, with no more passes over the classes than needed.

    In float32 that function has steps of 6e-8, which is 3% of the mean probability at n = 500,000; `plain_exp` is
    float32 as well.
    """
    logits = (hidden * rf.DEFAULT_TAU) @ weight.T
    target_logit = logits.gather(1, target[:, None])
    logits.scatter_(1, target[:, None], -torch.inf)
    top = logits.amax(1, keepdim=True)
    cdf = (logits - top).exp_().cumsum(1, dtype=dtype)
    total = cdf[:, -1:]
    ids = torch.searchsorted(cdf, torch.rand(BATCH, NEGATIVES, dtype=dtype) * total).clamp_(max=len(weight) - 1)
    negative_logits = logits.gather(1, ids)
    return rf.sampled_softmax_loss(target_logit[:, 0], negative_logits, (negative_logits - top - total.log()).float())


def samplers(num_classes: int, features: list[int]) -> dict[str, rf.Sampler]:
    made: dict[str, rf.Sampler] = {"exact": rf.ExactSampler()}
    common: dict[str, Any] = {"num_classes": num_classes, "dim": DIM, "block_size": BLOCK, "half_rows": True}
    made["quadratic"] = rf.make_sampler("quadratic", **common)
    for num in features:
        made[f"rff D={num}"] = rf.make_sampler("rff", num_features=num, **common)
    return made


def measure(num_classes: int, features: list[int], repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    weight = F.normalize(torch.randn(num_classes, DIM), dim=1)
    hidden, target = F.normalize(torch.randn(BATCH, DIM), dim=1), torch.randint(num_classes, (BATCH,))
    exps: dict[str, Callable[..., Tensor]] = {
        "exp, plain": plain_exp,
        "exp, in place": functools.partial(exp_in_place, dtype=torch.float32),
        "exp, in place, float64": functools.partial(exp_in_place, dtype=torch.float64),
    }
    works: dict[str, Callable[[], Any]] = {
        name: functools.partial(exp, weight, hidden, target) for name, exp in exps.items()
    }
    memory = dict.fromkeys(works, 0.0)
    for name, sampler in samplers(num_classes, features).items():
        print(f"  building {name}", flush=True)
        sampler.rebuild(weight)
        works[name] = functools.partial(sampled_loss, sampler, weight, hidden, target)
        memory[name] = sampler.tree.sums.nbytes / 1e6 if isinstance(sampler, rf.KernelSampler) else 0.0
    with torch.no_grad():
        seconds = interleaved(works, repeats)
    exp = min(seconds[name] for name in (*exps, "exact"))
    return [
        {
            "num_classes": num_classes,
            "method": name,
            "milliseconds": round(1e3 * time, 4),
            "times_faster_than_exp": round(exp / time, 2),
            "tree_megabytes": round(memory[name], 1),
            "repeats": repeats,
        }
        for name, time in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-classes", type=int, nargs="+", default=[10_000, 500_000, 5_000_000])
    parser.add_argument("--num-features", type=int, nargs="+", default=[50, 200, 500, 1000])
    parser.add_argument("--repeats", type=int, default=50, help="interleaved repetitions; the median counts")
    parser.add_argument("--output", type=Path, default=Path("results/bench_loss.csv"))
    options = parser.parse_args()
    rows = []
    for num_classes in options.num_classes:
        print(f"n = {num_classes:,}", flush=True)
        some = measure(num_classes, options.num_features, options.repeats)
        for row in some:
            cells = (row["milliseconds"], row["times_faster_than_exp"], row["tree_megabytes"])
            print(f"  {row['method']:24s} {cells[0]:10.3f} ms {cells[1]:8.1f} x EXP {cells[2]:9.1f} MB of sums")
        rows += some
        write_rows(options.output, rows)
    if len(options.num_classes) > 1:
        print_growth(rows, options.num_classes[0], options.num_classes[-1])


def print_growth(rows: list[dict[str, Any]], low: int, high: int) -> None:
    times = {(row["method"], row["num_classes"]): row["milliseconds"] for row in rows}
    for method in dict.fromkeys(row["method"] for row in rows):
        print(f"{method:24s} n = {high:,} over n = {low:,}: {times[method, high] / times[method, low]:.2f} x")


if __name__ == "__main__":
    main()
