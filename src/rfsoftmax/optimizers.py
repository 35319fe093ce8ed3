"""SparseAdam, compiled for CPU tensors: torch's takes about a quarter of a whole training step of `SoftmaxHead`."""

import math
from collections.abc import Callable
from inspect import unwrap
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from .memory import in_huge_pages
from .threads import spread
from .vectors import compiled, lean, prefetch

# Rows whose state is fetched ahead of its use.
_AHEAD = 8


@final
class SparseAdam(torch.optim.SparseAdam):
    """`torch.optim.SparseAdam` in one pass over the rows that have a gradient: same arguments, state and result.

        m += (1 - beta1) (g - m)
        v += (1 - beta2) (g^2 - v)
        w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)

    torch makes about ten passes over copies of those rows. Checkpoints of either load into the other. What is not a
    contiguous CPU tensor of float32 or float64 is left to torch.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not all(_suits(p) for group in self.param_groups for p in group["params"] if p.grad is not None):
            # What torch wraps around a step runs the hooks, and is around this one already.
            unwrap(torch.optim.SparseAdam.step)(self)
            return loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = in_huge_pages(torch.empty_like(parameter)).zero_()
        state["step"] += 1
        ids, values = _rows_once(parameter.grad)  # type: ignore[arg-type]
        if not values.size:
            return
        beta1, beta2 = group["betas"]
        first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        rate = float(group["lr"]) * math.sqrt(second) / first
        scales = tuple(values.dtype.type(x) for x in (1 - beta1, 1 - beta2, rate, group["eps"]))
        sign = values.dtype.type(-1 if group.get("maximize", False) else 1)
        rows = tuple(_rows(t) for t in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]))
        values = values.reshape(len(ids), -1)
        spread(_adam, (ids, values, sign, scales, rows), len(ids), 16 * values.shape[1])


def _suits(parameter: Tensor) -> bool:
    grad = parameter.grad
    assert grad is not None
    return (
        parameter.device.type == "cpu"
        and parameter.is_contiguous()
        and grad.is_sparse
        and grad.sparse_dim() == 1
        and parameter.dtype == grad.dtype
        and parameter.dtype in (torch.float32, torch.float64)
    )


def _rows_once(grad: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The rows' ids, each once, ascending, and their gradients. What already is so need not be coalesced, whose mark
    autograd drops."""
    if not _ascends(grad._indices()[0].numpy()):
        grad = grad.coalesce()
    return grad._indices()[0].numpy(), grad._values().numpy()


@compiled
def _ascends(ids: np.ndarray) -> bool:
    out_of_order = 0
    for k in range(1, ids.shape[0]):
        out_of_order += ids[k] <= ids[k - 1]
    return out_of_order == 0


def _rows(tensor: Tensor) -> np.ndarray:
    return tensor.view(len(tensor), -1).numpy()


@lean
def _adam(
    ids: np.ndarray,
    grads: np.ndarray,
    sign: float,
    scales: tuple[float, ...],
    rows: tuple[np.ndarray, ...],
    start: int,
    stop: int,
) -> None:
    (of_mean, of_square, rate, eps), (weight, mean, square) = scales, rows
    for k in range(start, stop):
        if k + _AHEAD < stop:
            following = ids[k + _AHEAD]
            for array in rows:
                prefetch(array, following, following + 1)
        w, m, v, g = weight[ids[k]], mean[ids[k]], square[ids[k]], grads[k]
        for j in range(g.shape[0]):
            x = sign * g[j]
            m[j] += of_mean * (x - m[j])
            v[j] += of_square * (x * x - v[j])
            w[j] -= rate * m[j] / (np.sqrt(v[j]) + eps)
