"""The random numbers of a draw, one from each stratum."""

import numpy as np
import torch
from torch import Generator, Tensor

from .vectors import compiled

# A little below 1, as (num - 1 + u) / num may round to 1.
_BELOW_ONE = 1 - 2.0**-52


def stratified_uniforms(rows: int, num: int, generator: Generator | None, device: torch.device) -> Tensor:
    """Uniforms (rows, num), float64, one from each of num equal strata, in an order turned at random.

    So each of them by itself is uniform on [0, 1), and a row ascends from its least one on, round its end. Compiled for
    CPU tensors: for a small batch the calls of torch would take as long as the draw.
    """
    u = torch.rand(rows, 1 + num, dtype=torch.float64, generator=generator, device=device)
    if device.type == "cpu":
        made = torch.empty(rows, num, dtype=torch.float64)
        _stratify(u.numpy(), made.numpy())
        return made
    turn = (u[:, :1] * (_BELOW_ONE * num)).long()
    stratum = torch.arange(num, device=device).add(turn).remainder_(num)
    return u[:, 1:].add_(stratum).mul_(_BELOW_ONE / num)


@compiled
def _stratify(u: np.ndarray, made: np.ndarray) -> None:
    num = made.shape[1]
    for b in range(made.shape[0]):
        stratum = int(u[b, 0] * (_BELOW_ONE * num))
        for i in range(num):
            made[b, i] = (u[b, 1 + i] + stratum) * (_BELOW_ONE / num)
            stratum = stratum + 1 if stratum + 1 < num else 0
