"""A run on several processes, started by torchrun: joining them, sharing rows, and what they tell each other."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ranks import Ranks

T = TypeVar("T")

# How long a rank waits for the others, who may be reading data or drawing a picture, before it takes them for lost.
_PATIENCE = timedelta(minutes=10)


def join() -> Ranks:
    """This process among those that torchrun started; alone without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_PATIENCE)  # models of the lab are on the CPU
    return Ranks()


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def in_turn(ranks: Ranks, first: Callable[[], T], then: Callable[[], T] | None = None) -> T:
    """What `first` gives rank 0, and after that the others, or what `then` gives them."""
    if ranks.rank == 0:
        made = first()
        ranks.wait()
        return made
    ranks.wait()
    return (then or first)()


def own_rows(num: int, ranks: Ranks) -> slice:
    """Which of so many rows are this rank's; of the ranks none has two more than another."""
    return slice(ranks.rank * num // ranks.num, (ranks.rank + 1) * num // ranks.num)


def gather_rows(rows: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all ranks, in the order of ranks."""
    sizes = [int(size) for size in each_says(len(rows), ranks)]
    return ranks.gather(rows, sizes)


def each_says(number: float, ranks: Ranks) -> list[float]:
    """The numbers of all ranks."""
    numbers: list[float] = ranks.gather(torch.tensor([number], dtype=torch.float64), [1] * ranks.num).tolist()
    return numbers


def data_parallel(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model, whose gradients but those of `head` are averaged over the ranks as they come."""
    if ranks.num == 1:
        return model
    parallel = nn.parallel.DistributedDataParallel
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()] if name.startswith("head.")]
    parallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return parallel(model, process_group=ranks.group)


def is_lost(error: BaseException) -> bool:
    """Whether the error is gloo's word for another rank that has gone."""
    words = ("closed by peer", "reset by peer", "gloo", "Broken pipe", "timed out", "Timed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
