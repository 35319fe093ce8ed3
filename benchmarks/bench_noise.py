"""What it costs in noise that several draws share a walk down the tree, and that the sampler has the classes in bytes.

The default sampler by its `draws_per_block`, and with one draw a walk, whose noise hides less, by its `byte_rows`.

On models trained with the full softmax (Penn Treebank, TIBKAT, Gowalla; the last checkpoint of each), for held-out
queries and m negatives of each one's own, by many sets of draws:

- the relative variance of Z', mean over queries of E (Z' / Z - 1)^2;
- the noise of the gradient by the logits, mean over queries of E |g' - g|^2, g = p - 1_t with p the softmax and g' the
  same of the sampled loss. It is what the class embeddings see; without any error of Z' it would be about 1 / m.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_quality import make_head
from checkpoints import RECIPES, Checkpoint, load
from measure import write_rows
from torch import Generator, Tensor

import rfsoftmax as rf
from rfsoftmax.head import default_sampler


def noise(point: Checkpoint, changed: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Of the default sampler with options changed; of several labels of a query the last one is the target."""
    chosen = {**default_sampler(len(point.weight)), **changed}
    sampler = make_head(chosen.pop("name"), chosen, point, options.negatives, options.seed).sampler.eval()
    half = len(point.hidden) // 2
    hidden = F.normalize(point.hidden[half : half + options.contexts], dim=1)
    target = point.target[half : half + options.contexts].view(len(hidden), -1).amax(1, keepdim=True)
    logits = (rf.DEFAULT_TAU * hidden @ F.normalize(point.weight, dim=1).T).double()
    of_all, generator = logits.exp().sum(1, keepdim=True), torch.Generator().manual_seed(options.seed)
    errors = [
        _errors(sampler, hidden, target, logits, of_all, options.negatives, generator) for _ in range(options.draws)
    ]
    variance, gradient = (float(torch.stack(part).mean()) for part in zip(*errors, strict=True))
    return {"variance_of_z": variance, "gradient_noise": gradient}


def _errors(
    sampler: rf.Sampler, hidden: Tensor, target: Tensor, logits: Tensor, of_all: Tensor, num: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    """(Z' / Z - 1)^2 and |g' - g|^2 of one set of draws a query."""
    ids, log_q = sampler.sample(hidden, num, target, generator=generator)
    shares = torch.cat([logits.gather(1, target), logits.gather(1, ids) - log_q], 1).exp()
    shares[:, 1:] /= num
    sampled = shares.sum(1, keepdim=True)
    error = torch.zeros_like(logits).scatter_add_(1, torch.cat([target, ids], 1), shares / sampled)
    return (sampled / of_all - 1).square().squeeze(1), (error - logits.exp() / of_all).square().sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the directory with ptb/, tibkat-gnd/ and gowalla/")
    parser.add_argument("--sets", nargs="+", choices=list(RECIPES), default=["ptb", "tibkat", "gowalla"])
    parser.add_argument("--draws-per-block", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--contexts", type=int, default=100, help="held-out queries")
    parser.add_argument("--draws", type=int, default=100, help="sets of draws for each")
    parser.add_argument("--negatives", type=int, default=100, help="m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=Path(".cache/quality"), help="where checkpoints are kept")
    parser.add_argument("--output", type=Path, default=Path("results/bench_noise.csv"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    settings = {name: getattr(options, name) for name in ("contexts", "draws", "negatives", "seed")}
    for name in options.sets:
        point = list(load(name, options.data, options.cache).values())[-1]
        cases = [(each, True) for each in options.draws_per_block] + [(1, False)]
        for each, in_bytes in cases:
            changed = {"draws_per_block": each, "byte_rows": in_bytes}
            found = {key: float(f"{value:.3g}") for key, value in noise(point, changed, options).items()}
            rows.append({"data": name, "step": point.step, **changed, **found, **settings})
            print(
                f"{name:10s} {each} draws a block, rows in {'bytes' if in_bytes else 'float32'}: "
                f"variance of Z' {found['variance_of_z']}, gradient's noise {found['gradient_noise']}",
                flush=True,
            )
            write_rows(options.output, rows)


if __name__ == "__main__":
    main()
