"""Table 1 of the paper: mean squared error of kernels that stand for exp(tau h.c), on pairs of USPS digits.

The paper says neither tau nor the scale of the error nor what D counts. Here the error is that of the Gaussian kernel
exp(tau (h.c - 1)) = exp(tau h.c) / e^tau, whose largest value is 1: on the scale of exp(tau h.c) all errors are
e^(2 tau) times as large. D counts frequencies, as in the paper's map, of which each gives a cosine and a sine; for
Maclaurin and positive features, columns; for the quadratic kernel d^2. All numbers are given for several tau.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..features import FeatureMap, OrthogonalFourier, PositiveRandom, RandomFourier, RandomMaclaurin, StructuredFourier

TAUS = (0.5, 1.0, 2.0, 4.0, 1 / 0.3**2)
SIZES = (100, 1000, 256**2)
_MAPS: dict[str, Callable[..., FeatureMap]] = {
    "Random Fourier": RandomFourier,
    "Orthogonal": OrthogonalFourier,
    "SORF": StructuredFourier,
    "Random Maclaurin": RandomMaclaurin,
    "Positive": PositiveRandom,
}
# These stand for exp(tau h.c) itself.
_EXPONENTIAL = ("Random Maclaurin", "Positive")
# Digits drawn for each side, of which all pairs are taken.
_DIGITS = 500
_CHUNK = 100


def table1(
    file: Path,
    taus: tuple[float, ...] = TAUS,
    sizes: tuple[int, ...] = SIZES,
    num_digits: int = _DIGITS,
    num_maps: int = 3,
) -> dict[str, Any]:
    """The errors of every map, the mean over `num_maps` drawings of its random numbers, and their spread."""
    h, c = _pairs(file, num_digits)
    rows = []
    for tau in taus:
        kernel = torch.exp(tau * (h.double() @ c.double().T - 1))
        rows.append({"tau": tau, "method": "Quadratic", "num_features": h.shape[1] ** 2, **_quadratic(h, c, kernel)})
        for name in _MAPS:
            for size in sizes if name in ("Random Fourier", "Orthogonal", "SORF") else sizes[-1:]:
                errors = [_error(name, size, tau, h, c, kernel, seed) for seed in range(num_maps)]
                some = torch.tensor(errors, dtype=torch.float64)
                spread = float(some.std()) if num_maps > 1 else 0.0
                row = {"tau": tau, "method": name, "num_features": size, "mse": float(some.mean()), "spread": spread}
                rows.append(row)
                print(f"  tau {tau:.4g}  {name:16s} D {size:6d}  MSE {row['mse']:.3g}", flush=True)
    pairs = f"all pairs of {len(h)} and {len(c)} digits, none in both"
    return {"kind": "table1", "dim": h.shape[1], "pairs": pairs, "num_maps": num_maps, "rows": rows}


def _pairs(file: Path, num: int) -> tuple[Tensor, Tensor]:
    """Digits of unit length for both sides of the kernel."""
    digits = F.normalize(torch.from_numpy(np.load(file)["X"]).float(), dim=1)
    chosen = torch.randperm(len(digits), generator=Generator().manual_seed(0))
    return digits[chosen[:num]], digits[chosen[num : 2 * num]]


def _quadratic(h: Tensor, c: Tensor, kernel: Tensor) -> dict[str, float]:
    """The best of alpha (h.c)^2 + beta by least squares, on these very pairs."""
    squares = (h.double() @ c.double().T).square().flatten()
    design = torch.stack([squares, torch.ones_like(squares)], dim=1)
    solution = torch.linalg.lstsq(design, kernel.reshape(-1, 1)).solution
    mse = float((design @ solution - kernel.reshape(-1, 1)).square().mean())
    return {"mse": mse, "spread": 0.0, "alpha": float(solution[0]), "beta": float(solution[1])}


def _error(name: str, size: int, tau: float, h: Tensor, c: Tensor, kernel: Tensor, seed: int) -> float:
    """The mean squared error of one drawing of the map, features of a few digits at a time."""
    phi = _MAPS[name](h.shape[1], size, tau, generator=Generator().manual_seed(seed))
    scale = math.exp(-tau) if name in _EXPONENTIAL else 1.0
    of_c = [phi(some) for some in c.split(_CHUNK)]
    total = 0.0
    for some, exact in zip(h.split(_CHUNK), kernel.split(_CHUNK), strict=True):
        of_h = phi(some)
        estimate = torch.cat([of_h @ other.T for other in of_c], dim=1)
        total += float((scale * estimate.double() - exact).square().sum())
    return total / kernel.numel()
