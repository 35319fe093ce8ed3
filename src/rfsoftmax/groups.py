"""Groups of like queries, for negatives that a group shares."""

import torch
from torch import Tensor

_ROUNDS = 3


@torch.no_grad()
def like_queries(queries: Tensor, num: int) -> tuple[Tensor, list[int]]:
    """An order (B,) of queries (B, d) that puts those alike side by side, and the sizes of at most `num` groups in it.

    By a few rounds of Lloyd's k-means, begun at queries evenly far apart in the batch: no random numbers. It takes
    B x num x d multiplications a round, as many as the logits of `num` negatives. A group left empty is not counted.
    """
    batch = len(queries)
    num = min(num, batch)
    centres = queries[torch.linspace(0, batch - 1, num, device=queries.device).long()]
    for _ in range(_ROUNDS - 1):
        nearest = _nearest(queries, centres)
        sizes = torch.bincount(nearest, minlength=num).unsqueeze(1)
        means = torch.zeros_like(centres).index_add_(0, nearest, queries) / sizes.clamp(min=1)
        centres = torch.where(sizes > 0, means, centres)
    nearest = _nearest(queries, centres)
    sizes = torch.bincount(nearest, minlength=num)
    return nearest.argsort(stable=True), sizes[sizes > 0].tolist()


def restored(x: Tensor, order: Tensor | slice) -> Tensor:
    """The rows of x (B, ...), which are in this order, back in their places; a slice stands for that of all rows."""
    return x if isinstance(order, slice) else torch.empty_like(x).index_copy(0, order, x)


def _nearest(queries: Tensor, centres: Tensor) -> Tensor:
    return torch.addmm(-0.5 * centres.square().sum(1), queries, centres.T).argmax(1)
