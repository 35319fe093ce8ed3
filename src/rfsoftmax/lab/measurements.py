"""The paper's experiments that train nothing: what each is called, what it takes and what it measures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from .experiments import PTB, TIBKAT, Planned, plan
from .places import Places


class MissingRunError(Exception):
    """A measurement needs the checkpoint of a run that is not finished; the message names it."""


@final
@dataclass(frozen=True)
class Measurement:
    """`dataset` is empty where no trained model is needed; `seconds` of one core are for planning alone."""

    label: str
    name: str
    dataset: str
    seconds: float
    measure: Callable[[Places], dict[str, Any]]


def measurement_name(name: str, scale: str) -> str:
    """That of its file: other sizes have another one, and the tables are of the paper's sizes at both scales."""
    same = scale == "small" or (scale == "paper" and name in ("table1", "table2"))
    return name if same else f"{name}-{scale}"


def _table1(scale: str) -> list[Measurement]:
    from .table1 import table1

    sizes: dict[str, Any] = {"taus": (1.0,), "num_digits": 8, "num_maps": 1} if scale == "tiny" else {}
    name = measurement_name("table1", scale)
    return [Measurement("kernel approximation", name, "", 300, lambda places: table1(places.usps(), **sizes))]


def _table2(scale: str) -> list[Measurement]:
    from .table2 import table2

    sizes: dict[str, Any] = {"sizes": (300, 3000), "repeats": 1} if scale == "tiny" else {}
    return [Measurement("wall time", measurement_name("table2", scale), "", 300, lambda places: table2(**sizes))]


def _theory(scale: str) -> list[Measurement]:
    from . import theory

    sizes = theory.SIZES[scale]
    parts = [
        ("Theorem 1", "theorem1", PTB, theory.theorem1, 900),
        ("Theorem 1", "theorem1", TIBKAT, theory.theorem1, 900),
        ("Theorem 2", "theorem2", PTB, theory.theorem2, 600),
        ("Corollary 1", "corollary1", PTB, theory.corollary1, 600),
    ]
    return [
        Measurement(
            f"{label}, {dataset}",
            measurement_name(f"{name}-{dataset}", scale),
            dataset,
            seconds,
            partial(of, dataset, sizes),
        )
        for label, name, dataset, of, seconds in parts
    ]


MEASURED = {"table1": _table1, "table2": _table2, "theory": _theory}


def trained_run(dataset: str, scale: str = "small") -> Planned:
    """The run of the full softmax on whose embeddings the theory is measured."""
    item = "figure3" if dataset == PTB else "table3"
    return next(run for run in plan(item, scale, (dataset,)) if run.config.method == "full")
