"""All samplers, and `make_sampler`, which makes any of them by name."""

import inspect
import math
from typing import Any

import torch

from ..features import (
    FeatureMap,
    OrthogonalFourier,
    PositiveRandom,
    Quadratic,
    RandomFourier,
    RandomMaclaurin,
    StructuredFourier,
)
from .base import DEFAULT_TAU, Sampler, Samples, check_tau
from .exact import ExactSampler
from .in_batch import InBatchSampler
from .kernel import KernelSampler
from .lsh import LSHSampler
from .midx import MIDXSampler
from .mixture import MixtureSampler
from .moment import MomentSampler
from .static import LogUniformSampler, UniformSampler, UnigramSampler

__all__ = [
    "DEFAULT_TAU",
    "ExactSampler",
    "InBatchSampler",
    "KernelSampler",
    "LSHSampler",
    "LogUniformSampler",
    "MIDXSampler",
    "MixtureSampler",
    "MomentSampler",
    "Sampler",
    "Samples",
    "UniformSampler",
    "UnigramSampler",
    "make_sampler",
]

_FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "rff": RandomFourier,
    "orf": OrthogonalFourier,
    "sorf": StructuredFourier,
    "quadratic": Quadratic,
    "maclaurin": RandomMaclaurin,
    "positive": PositiveRandom,
}
_OTHERS: dict[str, type[Sampler]] = {
    "uniform": UniformSampler,
    "log_uniform": LogUniformSampler,
    "unigram": UnigramSampler,
    "exact": ExactSampler,
    "moment": MomentSampler,
    "midx": MIDXSampler,
    "lsh": LSHSampler,
    "in_batch": InBatchSampler,
    "mixture": MixtureSampler,
}


def make_sampler(
    name: str,
    *,
    num_classes: int,
    dim: int,
    tau: float = DEFAULT_TAU,
    counts: torch.Tensor | None = None,
    absolute: bool = False,
    first: int = 0,
    **options: Any,
) -> Sampler:
    """The sampler `name`: uniform, log_uniform, unigram (needs counts), exact, moment, midx, lsh, in_batch, mixture
    (needs samplers, or their names), or by the feature map of a KernelSampler rff, orf, sorf, quadratic, maclaurin,
    positive.

    `absolute` says that the loss is the absolute softmax. `first` is the number that class 0 has among all, where the
    sampler, and `counts`, are for a part of them. `options` are the keyword arguments of the sampler's class
    and, for kernel samplers, of its feature map: num_features (D; 1024 if not given), nu (min(tau, ln(D) / 2) if not
    given, which keeps the relative noise of an estimate at a right angle below 1; "auto" starts there and calibrates
    it at each rebuild), alpha, beta, generator.
    """
    if name not in _FEATURE_MAPS and name not in _OTHERS:
        raise ValueError(f"name: expected one of {', '.join([*_OTHERS, *_FEATURE_MAPS])}, got {name!r}")
    if num_classes < 1:
        raise ValueError(f"num_classes: expected at least 1, got {num_classes}")
    check_tau(tau)
    given: dict[str, Any] = {"num_classes": num_classes, "dim": dim, "tau": tau, "counts": counts, "absolute": absolute}
    given["first"] = first
    if name == "unigram" and (counts is None or len(counts) != num_classes):
        found = "None" if counts is None else f"{len(counts)}"
        raise ValueError(f"counts: expected {num_classes} class counts for unigram, got {found}")
    if name == "mixture":
        parts = options.pop("samplers", [])
        given["samplers"] = [make_sampler(part, **given) if isinstance(part, str) else part for part in parts]
    if name in _OTHERS:
        return _OTHERS[name](**_arguments(name, [_OTHERS[name]], given, options)[0])
    if name != "quadratic":
        given["num_features"] = options.pop("num_features", 1024)
        given["nu"] = options.pop("nu", "default")
        if given["nu"] == "auto":
            options["calibrate"] = True
        if given["nu"] in ("auto", "default"):
            given["nu"] = min(tau, max(math.log(given["num_features"]), 1.0) / 2)
    for_map, for_sampler = _arguments(name, [_FEATURE_MAPS[name], KernelSampler], given, options)
    return KernelSampler(_FEATURE_MAPS[name](**for_map), **for_sampler)


def _arguments(name: str, makers: list[type], given: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """What each maker takes of `given` and `options`; an option that none takes is an error."""
    taken = [set(inspect.signature(maker).parameters) - {"feature_map"} for maker in makers]
    known = set().union(*taken)
    if unknown := sorted(set(options) - known):
        allowed = ", ".join(sorted(known - {"num_classes", "dim", "tau", "counts", "first"}))
        raise TypeError(f"options of {name!r}: expected any of {allowed}, got {', '.join(unknown)}")
    return [{key: value for key, value in {**given, **options}.items() if key in names} for names in taken]
