"""The processes that share the classes of one head, and what they send each other: rows of tensors, all to all."""

from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@final
class Ranks:
    """This process, number `rank` of `num`, in a process group; without `torch.distributed` it is alone.

    Everything goes through `dist.all_to_all_single`: it takes blocks of different sizes, so nothing is padded, gloo and
    NCCL have it, and sums over what arrives are in the order of ranks, the same to the last bit in every run.
    `bytes_sent` counts what has left this process for others.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if group is None and ready:
            group = dist.group.WORLD
        self.group = group
        self.rank = dist.get_rank(group) if ready else 0
        self.num = dist.get_world_size(group) if ready else 1
        if self.rank < 0:
            raise ValueError("process_group: expected one that this process is in, got another")
        self.bytes_sent = 0

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a process group cannot be copied

    def all_to_all(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Give rank r the next send[r] of the rows, and get receive[r] from each, one rank after another."""
        if self.num == 1:
            return rows
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=self.group)
        self.bytes_sent += (len(rows) - send[self.rank]) * rows[:0].new_empty(rows.shape[1:]).nbytes
        return received

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.num > 1:
            dist.barrier(group=self.group)

    def gather(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """The rows of all ranks, which have sizes[r] each, one rank after another; without gradient."""
        copies = rows.detach().repeat(self.num, *[1] * (rows.dim() - 1))
        return self.all_to_all(copies, [len(rows)] * self.num, sizes)


def gather(rows: Tensor, ranks: Ranks, sizes: list[int]) -> Tensor:
    """`Ranks.gather` with a gradient: each rank gets, for its own rows, the sum of all ranks' gradients times R.

    R = ranks.num is for DistributedDataParallel, which divides by it what the rows' encoders make of the gradient.
    """
    gathered: Tensor = _Gather.apply(rows, ranks, sizes)
    return gathered


def deliver(rows: Tensor, ranks: Ranks, sizes: list[int]) -> Tensor:
    """What all ranks have made of this rank's rows, (R, own, ...), for rows (sum of sizes, ...) about those of all.

    Backward each rank gets its gradient, of the mean over ranks of what they call their loss.
    """
    delivered: Tensor = _Deliver.apply(rows, ranks, sizes)
    return delivered


def total(own: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks of one number each, the same to the last bit on all of them.

    As all of them return it, the mean over ranks of what they return is it too: the gradient of `own` is R.
    """
    summed: Tensor = _Total.apply(own, ranks)
    return summed


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, sizes: list[int]) -> Tensor:
        ctx.ranks, ctx.sizes = ranks, sizes
        return ranks.gather(rows, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A reduce-scatter: to each rank the gradient of its rows, which it sums up.
        ranks, own = ctx.ranks, ctx.sizes[ctx.ranks.rank]
        parts = ranks.all_to_all(grad, ctx.sizes, [own] * ranks.num)
        return parts.view(ranks.num, own, *grad.shape[1:]).sum(0) * ranks.num, None, None


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, sizes: list[int]) -> Tensor:
        ctx.ranks, ctx.sizes = ranks, sizes
        own = sizes[ranks.rank]
        return ranks.all_to_all(rows, sizes, [own] * ranks.num).view(ranks.num, own, *rows.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ranks, own = ctx.ranks, ctx.sizes[ctx.ranks.rank]
        return ranks.all_to_all(grad.flatten(0, 1), [own] * ranks.num, ctx.sizes) / ranks.num, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks) -> Tensor:
        ctx.num = ranks.num
        return ranks.gather(own.view(1), [1] * ranks.num).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.num, None
