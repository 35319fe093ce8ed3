"""Optimizers for dense and sparse gradients, the norm of both, and the learning rate of a step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..optimizers import SparseAdam
from ..ranks import Ranks
from .config import Config
from .models import split_parameters
from .parallel import each_says


def make_optimizers(config: Config, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for dense and SparseAdam for sparse gradients; Adagrad and SGD take both."""
    dense, sparse = split_parameters(model)
    if config.optimizer == "adam":
        optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, config.lr)] if dense else []
        return optimizers + ([SparseAdam(sparse, config.lr)] if sparse else [])
    kind = torch.optim.Adagrad if config.optimizer == "adagrad" else torch.optim.SGD
    return [kind([*dense, *sparse], config.lr)]


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def learning_rate(config: Config, step: int, num_steps: int) -> float:
    """That of step 0 to num_steps - 1: it rises for `warmup` steps and falls by the schedule, to 0 after the last."""
    done = min(step / num_steps, 1.0)
    falls = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    return config.lr * rise * falls[config.schedule]


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], most: float, parts: Iterable[nn.Parameter] = (), ranks: Ranks | None = None
) -> float:
    """The norm of the gradient, sparse or dense, which is then scaled down to `most` if that is not 0.

    As `nn.utils.clip_grad_norm_`, which takes no sparse gradients. Of `parts` each rank has its own.
    """
    whole, own = _gradients(parameters), _gradients(parts)
    norm = math.hypot(_norm(whole), *([_norm(own)] if ranks is None else each_says(_norm(own), ranks)))
    if most and norm > most and math.isfinite(norm):
        for value in [*whole, *own]:
            value.mul_(most / norm)
    return norm


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The numbers of all gradients there are."""
    values = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # rows that occur twice would count as two short ones
            values.append(parameter.grad._values())
        elif parameter.grad is not None:
            values.append(parameter.grad)
    return values


def _norm(values: list[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in values))
