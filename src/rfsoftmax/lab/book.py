"""What the results say, asked by item, data set and label; whatever was not run yet is None."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from .experiments import TIBKAT, plan, with_seeds
from .measurements import measurement_name
from .results import Results

# Seeds that are looked for.
_SEEDS = range(10)
# Where no label has two seeds, differences below this share of the value count as noise.
_UNKNOWN_NOISE = 0.01


class Score(NamedTuple):
    """A number of one label: its mean over the seeds, the least and the largest."""

    mean: float
    low: float
    high: float
    num_seeds: int


class CurvePoint(NamedTuple):
    x: float
    score: Score


@final
@dataclass(frozen=True)
class Book:
    """Reads the files of `results` for the runs that the plan has at this scale."""

    results: Results
    scale: str = "small"
    sets: tuple[str, ...] = (TIBKAT,)
    _runs: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = field(default_factory=dict, compare=False)

    def runs(self, item: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """The runs of an item, by data set and label, in the order of the plan: none where nothing is finished."""
        if item not in self._runs:
            self._runs[item] = self._read(item)
        return self._runs[item]

    def _read(self, item: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for run in with_seeds(plan(item, self.scale, self.sets), list(_SEEDS)):
            result = self.results.training(run.dataset, run.config)
            of_label = found.setdefault((run.dataset, run.label), [])
            if result is not None:
                of_label.append(result)
        return found

    def score(self, item: str, dataset: str, label: str, metric: str) -> Score | None:
        """The metric at the end of training; `loss` and `softmax_loss` are the exact ones per label."""
        runs = self.runs(item).get((dataset, label), [])
        return _score([_last(run, metric) for run in runs])

    def scores(self, item: str, dataset: str, metric: str) -> dict[str, Score]:
        """Those of all labels that were run."""
        found = {
            label: _score([_last(run, metric) for run in runs])
            for (where, label), runs in self.runs(item).items()
            if where == dataset
        }
        return {label: score for label, score in found.items() if score is not None}

    def noise(self, item: str, dataset: str, metric: str) -> float:
        """The difference that two runs of one method may have: twice the standard deviation between seeds, pooled
        over the labels with several; without any, 1% of the least value."""
        runs = [some for (where, _), some in self.runs(item).items() if where == dataset]
        groups = [[_last(run, metric) for run in some] for some in runs]
        several = [group for group in groups if len(group) > 1]
        if not several:
            return _UNKNOWN_NOISE * min((value for group in groups for value in group), default=math.nan)
        squares = sum((value - sum(group) / len(group)) ** 2 for group in several for value in group)
        return 2 * math.sqrt(squares / sum(len(group) - 1 for group in several))

    def curves(self, item: str, dataset: str, metric: str, x: str = "epoch") -> dict[str, list[CurvePoint]]:
        """The metric by epoch or step, the mean over the seeds of each label that was run."""
        found = {}
        for (where, label), runs in self.runs(item).items():
            if where == dataset and runs:
                lines = [run["evaluations"] for run in runs]
                found[label] = [
                    point for at in zip(*lines, strict=False) if (point := _point(at, metric, x)) is not None
                ]
        return found

    def measurement(self, name: str) -> dict[str, Any] | None:
        """Of table1, table2 or a part of the theory."""
        return self.results.read(measurement_name(name, self.scale))

    def rows(self, name: str) -> list[dict[str, Any]]:
        found = self.measurement(name)
        return [] if found is None else found["rows"]


def _last(run: dict[str, Any], metric: str) -> float:
    source = run["final"] if metric in run["final"] else run["evaluations"][-1]
    value = source[metric]
    return math.inf if value is None else float(value)


def _score(values: Sequence[float]) -> Score | None:
    if not values:
        return None
    return Score(sum(values) / len(values), min(values), max(values), len(values))


def _point(at: Sequence[dict[str, Any]], metric: str, x: str) -> CurvePoint | None:
    score = _score([float(line[metric]) for line in at if line[metric] is not None])
    return None if score is None else CurvePoint(sum(float(line[x]) for line in at) / len(at), score)
