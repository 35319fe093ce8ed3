"""Table 2 of the paper: wall time of the sampled softmax loss (batch 10, m = 10, d = 64), drawing included.

Every row draws with another sampler and computes the loss of the same embeddings, without gradients. EXP is timed
four times: as anyone would write it in torch (`exp, plain`), written for speed (`exp, in place`, with a distribution
function in float32 and in float64), and as our streamed `exact`; ratios are against the fastest of all four. The kernel
samplers keep their copy of the embeddings in bytes. Before they are timed, all EXPs must give the exact loss, which
they have without noise, and the other samplers the log q of what they draw.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..head import default_sampler
from ..losses import full_softmax_loss, sampled_softmax_loss
from ..samplers import DEFAULT_TAU, ExactSampler, KernelSampler, Sampler, make_sampler
from .timing import interleaved

DIM, BATCH, NEGATIVES, BLOCK = 64, 10, 10, 64
FEATURES = (50, 200, 500, 1000)


def sampled_loss(sampler: Sampler, weight: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
    """The sampled softmax loss of normalised hidden and weight."""
    samples = sampler.sample(hidden, NEGATIVES, exclude=target)
    ids = torch.cat([target[:, None], samples.ids], 1)
    logits = F.embedding(ids, weight).mul_(hidden[:, None]).sum(-1).mul_(DEFAULT_TAU)
    return sampled_softmax_loss(logits[:, 0], logits[:, 1:], samples.log_q)


def plain_exp(weight: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
    """The same with q = the softmax over the negatives, as anyone would write it in torch."""
    logits = (hidden * DEFAULT_TAU) @ weight.T
    target_logit = logits.gather(1, target[:, None])
    log_q = logits.scatter(1, target[:, None], -torch.inf).log_softmax(1)
    ids = torch.multinomial(log_q.exp(), NEGATIVES, replacement=True)
    return sampled_softmax_loss(target_logit[:, 0], logits.gather(1, ids), log_q.gather(1, ids))


def exp_in_place(weight: Tensor, hidden: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by inverting the distribution function, with no more passes over the classes than needed.

    In float32 that function has steps of 6e-8, which is 3% of the mean probability at n = 500,000; `plain_exp` is
    float32 as well.
    """
    logits = (hidden * DEFAULT_TAU) @ weight.T
    target_logit = logits.gather(1, target[:, None])
    logits.scatter_(1, target[:, None], -torch.inf)
    top = logits.amax(1, keepdim=True)
    cdf = (logits - top).exp_().cumsum(1, dtype=dtype)
    total = cdf[:, -1:]
    ids = torch.searchsorted(cdf, torch.rand(BATCH, NEGATIVES, dtype=dtype) * total).clamp_(max=len(weight) - 1)
    negative_logits = logits.gather(1, ids)
    return sampled_softmax_loss(target_logit[:, 0], negative_logits, (negative_logits - top - total.log()).float())


def samplers(num_classes: int, features: Sequence[int], others: bool) -> dict[str, Sampler]:
    """Those of the table, and with `others` all that we have beside them."""
    made: dict[str, Sampler] = {"exact": ExactSampler()}
    sizes: dict[str, Any] = {"num_classes": num_classes, "dim": DIM}
    kernel: dict[str, Any] = {**sizes, "block_size": BLOCK, "byte_rows": True}
    made["quadratic"] = make_sampler("quadratic", **kernel)
    for num in features:
        made[f"rff D={num}"] = make_sampler("rff", num_features=num, **kernel)
    if others:
        made["default"] = make_sampler(**default_sampler(num_classes), **sizes)
        for name in ("orf", "sorf", "maclaurin", "positive"):
            made[f"{name} D=128"] = make_sampler(name, num_features=128, **kernel)
        made["unigram"] = make_sampler("unigram", counts=1 / torch.arange(1.0, num_classes + 1), **sizes)
        for name in ("uniform", "log_uniform", "in_batch", "moment", "midx", "lsh"):
            made[name] = make_sampler(name, **sizes)
        made["mixture"] = make_sampler("mixture", samplers=["uniform", "moment"], **sizes)
    return made


def check(name: str, sampler: Sampler, hidden: Tensor, target: Tensor) -> None:
    """Raise unless the sampler gives the log q of what it draws."""
    samples = sampler.sample(hidden, NEGATIVES, exclude=target)
    log_q = sampler.log_prob(hidden, samples.ids, exclude=target)
    torch.testing.assert_close(samples.log_q, log_q, rtol=1e-3, atol=1e-3, msg=lambda text: f"log q of {name}: {text}")


def check_exp(name: str, work: Callable[[], Tensor], weight: Tensor, hidden: Tensor, target: Tensor) -> None:
    """Raise unless the loss is the exact one: with q the softmax over the negatives all terms of Z' are the same."""
    exact = full_softmax_loss(hidden, weight, target, tau=DEFAULT_TAU)
    torch.testing.assert_close(work(), exact, rtol=1e-3, atol=1e-3, msg=lambda text: f"loss of {name}: {text}")


def measure(num_classes: int, features: Sequence[int], repeats: int, others: bool = False) -> list[dict[str, Any]]:
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
    for name, sampler in samplers(num_classes, features, others).items():
        print(f"  building {name}", flush=True)
        sampler.rebuild(weight)
        works[name] = functools.partial(sampled_loss, sampler, weight, hidden, target)
        memory[name] = sampler.tree.sums.nbytes / 1e6 if isinstance(sampler, KernelSampler) else 0.0
        check(name, sampler, hidden, target)
    for name in (*exps, "exact"):
        check_exp(name, works[name], weight, hidden, target)
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


def table2(sizes: Sequence[int] = (10_000, 500_000), repeats: int = 20) -> dict[str, Any]:
    """The table's rows at the paper's sizes."""
    rows = [row for num_classes in sizes for row in measure(num_classes, FEATURES, repeats)]
    return {"kind": "table2", "batch": BATCH, "negatives": NEGATIVES, "dim": DIM, "block_size": BLOCK, "rows": rows}
