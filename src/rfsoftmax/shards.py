"""Which classes a rank has, how many draws are its own, and tensors over all classes of which it holds a part."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .ranks import Ranks


def class_range(num_classes: int, ranks: Ranks) -> range:
    """The classes of a rank: ceil(n / R) each, the last one what is left, as DTensors and `torch.chunk` split rows."""
    size = -(-num_classes // ranks.num)
    if num_classes <= size * (ranks.num - 1):
        need = f"enough for {ranks.num} ranks with ceil(n / {ranks.num}) each but the last"
        raise ValueError(f"num_classes: expected {need}, got {num_classes}, which leaves the last one without a class")
    return range(ranks.rank * size, min((ranks.rank + 1) * size, num_classes))


def allocate(num: int, shares: Sequence[float]) -> list[int]:
    """How many of `num` draws each rank makes: one, and of the rest its share, by largest remainders.

    All ranks compute it from the same numbers, and these do not depend on what is drawn now: given them Z' is unbiased.
    """
    rest, sum_of_shares = max(num - len(shares), 0), math.fsum(shares)
    exact = [rest * share / sum_of_shares for share in shares]
    counts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda r: (counts[r] - exact[r], r))
    for rank in by_remainder[: rest - sum(counts)]:
        counts[rank] += 1
    return [1 + count for count in counts]


def whole(part: Tensor, num_classes: int, ranks: Ranks) -> Tensor:
    """This rank's part (classes, ...) as that of a DTensor (num_classes, ...), in the same memory."""
    if ranks.num == 1:
        return part
    from torch.distributed.device_mesh import DeviceMesh  # both take a second to import
    from torch.distributed.tensor import DTensor, Shard

    assert ranks.group is not None
    mesh = DeviceMesh.from_group(ranks.group, part.device.type)
    shape = torch.Size([num_classes, *part.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def part(tensor: Tensor, classes: range, num_classes: int) -> Tensor:
    """The rows of `classes`, of a DTensor that `whole` made or of a plain one with all rows."""
    if hasattr(tensor, "to_local"):
        local: Tensor = tensor.to_local()
        return local
    return tensor[classes.start : classes.stop] if tensor.dim() and len(tensor) == num_classes else tensor
