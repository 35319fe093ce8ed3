"""What is kept of a finished training run."""

import itertools
from statistics import median
from typing import Any

import torch

from ..head import SoftmaxHead
from ..targets import as_labels
from . import checkpoints
from .models import Model, make_model
from .results import deciding
from .runs import Run
from .tasks import IGNORED, Task

_PLACE = ("step", "epoch", "seconds")
_NOT_KEPT = (*_PLACE, "kind", "time")


def training_result(dataset: str, run: Run, task: Task) -> dict[str, Any]:
    """Settings, the evaluations with step and seconds of training, and the exact losses of the last checkpoint."""
    records = run.records()
    path = checkpoints.find(run.checkpoints)
    model = make_model(run.config, task.classes)
    checkpoints.load_model(path, model)
    progress = checkpoints.read_progress(path)[0]
    return {
        "kind": "training",
        "dataset": dataset,
        "config": deciding(run.config),
        "num_classes": len(task.classes.counts),
        "steps": progress.step,
        **timed_evaluations(records, progress.step),
        "final": final_losses(model, task),
    }


def timed_evaluations(records: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The evaluations among the records of metrics, the seconds of training, the sampler's share of them.

    A step counts for the median of all between two records: a run may have been paused, or have shared its cores.
    """
    trained = [record for record in records if record["kind"] == "train"]
    spans = itertools.pairwise([{"seconds": 0.0, "step": 0}, *trained])
    each = median((b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in spans)
    valid = [{**record, "seconds": each * record["step"]} for record in records if record["kind"] == "valid"]
    return {
        "seconds": each * steps,
        "sampler_share": median(record["sampler_share"] for record in trained),
        "evaluations": [_evaluation(record) for record in valid],
    }


def _evaluation(record: dict[str, Any]) -> dict[str, Any]:
    scores = {name: value for name, value in record.items() if name not in _NOT_KEPT}
    return {**{name: record[name] for name in _PLACE}, **scores}


def final_losses(model: Model, task: Task) -> dict[str, float]:
    """The mean of -log p over all labels of the validation data: `loss` with the p that the model is trained for,
    `softmax_loss` with the plain softmax, which differs for the absolute one alone."""
    head = model.head
    found = {"loss": _mean_loss(model, task)}
    if isinstance(head, SoftmaxHead) and head.loss == "absolute":
        head.loss = "softmax"
        found["softmax_loss"] = _mean_loss(model, task)
        head.loss = "absolute"
    return {"softmax_loss": found["loss"], **found}


@torch.no_grad()
def _mean_loss(model: Model, task: Task) -> float:
    model.eval()
    total, num, state = 0.0, 0, None
    for batch in task.held_out("valid"):
        hidden, state = model(batch.inputs, state)
        labels = as_labels(batch.target, hidden.shape[:-1], len(task.classes.counts), IGNORED)
        kept = (labels >= 0).any(1)
        queries, labels = hidden.flatten(0, -2)[kept], labels[kept]
        if len(labels):
            log_p = model.head.log_prob(queries, labels.clamp(min=0))
            total -= float(log_p[labels >= 0].double().sum())
            num += int((labels >= 0).sum())
    return total / max(num, 1)
