"""What the command line does with a trained run: evaluate, predict, diagnose, advise."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..advisor import Advice, advise_head
from ..diagnostics import diagnose, gradient_bias
from ..head import SoftmaxHead
from ..targets import as_labels
from . import checkpoints
from .classes import Classes
from .config import Config
from .models import Model, make_model
from .outputs import FullSoftmax, is_absolute, sampler_of
from .python_source import tokens
from .runs import Run
from .tasks import Task, XCTask, make_task, xc_batches
from .text import EOS, UNK
from .xc import load_xc, read_label_names


@dataclass(frozen=True, eq=False)
class Trained:
    """The model of a checkpoint, in eval()."""

    run: Run
    config: Config
    classes: Classes
    model: Model
    path: Path


def load(directory: str | Path, checkpoint: str = "best") -> Trained:
    run = Run(directory)
    classes = run.classes()
    model = make_model(replace(run.config, shard_classes=False), classes)
    path = checkpoints.find(run.checkpoints, checkpoint)
    checkpoints.load_model(path, model)
    return Trained(run, run.config, classes, model.eval(), path)


def evaluate(trained: Trained, split: str, data: str | None = None) -> dict[str, float]:
    """The scores on a split of the run's data, all of it, or on another file in the format of the run's."""
    task = make_task(replace(trained.config, eval_limit=0))
    trained.run.check_classes(task.classes)
    if data is None:
        return task.evaluate(trained.model, split)
    if not isinstance(task, XCTask):
        raise ValueError(f"data: expected none for text, whose splits are fixed, got {data!r}")
    points = load_xc(data, cache=trained.config.cache)
    _check_widths(trained, data, points.features.shape[1])
    return task.evaluate_data(trained.model, points)


@torch.no_grad()
def predict_words(trained: Trained, prompt: str, top: int) -> list[tuple[str, float]]:
    """The most likely next words after the prompt, with their probabilities."""
    ids = {word: number for number, word in enumerate(trained.classes.names)}
    words = _words(trained, prompt)
    inputs = torch.tensor([[ids[EOS], *(ids.get(word, ids[UNK]) for word in words)]])
    hidden = trained.model(inputs)[0][:, -1]
    best = trained.model.head.topk(hidden, min(top, len(ids)))[1]
    chances = trained.model.head.log_prob(hidden, best).exp()
    return [(trained.classes.names[i], p) for i, p in zip(best[0].tolist(), chances[0].tolist(), strict=True)]


@torch.no_grad()
def predict_labels(trained: Trained, data: str, top: int, names: tuple[str, ...]) -> Iterator[list[tuple[str, float]]]:
    """For each point of an extreme classification file its best labels and their scores, log probabilities."""
    points = load_xc(data, cache=trained.config.cache)
    _check_widths(trained, data, points.features.shape[1])
    names = names or trained.classes.names or tuple(map(str, range(len(trained.classes.counts))))
    for batch in xc_batches(points, 256):
        hidden = trained.model(batch.inputs)[0]
        best = trained.model.head.topk(hidden, min(top, len(names)))[1]
        scores = trained.model.head.log_prob(hidden, best)
        for row, row_scores in zip(best.tolist(), scores.tolist(), strict=True):
            yield [(names[i], score) for i, score in zip(row, row_scores, strict=True)]


def label_names(trained: Trained, names: str | None, ids: str | None) -> tuple[str, ...]:
    return () if names is None else read_label_names(names, len(trained.classes.counts), ids=ids)


def diagnose_run(trained: Trained, given: dict[str, Any], num_contexts: int, num_draws: int) -> str:
    """The tables of `diagnose` and `gradient_bias` for the checkpoint's sampler, or for another method's.

    Another sampler is made for the checkpoint's class embeddings and shown as many other contexts first.
    """
    hidden, target = contexts(trained, make_task(trained.config), 2 * num_contexts)
    seen, measured = slice(None, len(hidden) // 2), slice(len(hidden) // 2, None)
    head = trained.model.head
    if given or not isinstance(head, SoftmaxHead) or head.loss == "nce":
        head = _other_head(trained, given)
        for some, some_target in zip(hidden[seen].split(64), target[seen].split(64), strict=True):
            head(some, some_target)
        head.rebuild()
        head.eval()
    found = diagnose(head, hidden[measured], target[measured])
    bias = gradient_bias(head, hidden[measured], target[measured], num_draws=num_draws)
    return f"{found}\n\ngradient bias over {num_draws} draws of m = {head.num_negatives}\n{bias}"


def advise_run(trained: Trained, num_contexts: int, num_negatives: int | None) -> Advice:
    head = trained.model.head
    if not isinstance(head, SoftmaxHead):
        head = _other_head(trained, {})
    hidden, target = contexts(trained, make_task(trained.config), num_contexts)
    return advise_head(head, hidden, target, num_negatives=num_negatives)


@torch.no_grad()
def contexts(trained: Trained, task: Task, num: int) -> tuple[Tensor, Tensor]:
    """Queries (num, d) of the validation data and their labels (num, P), padded with -1."""
    queries, labels, found, state = [], [], 0, None
    for batch in task.held_out("valid"):
        hidden, state = trained.model(batch.inputs, state)
        rows = as_labels(batch.target, hidden.shape[:-1], len(trained.classes.counts), -100)
        kept = (rows >= 0).any(1)
        queries.append(hidden.flatten(0, -2)[kept])
        labels.append(rows[kept])
        found += int(kept.sum())
        if found >= num:
            break
    width = max(part.shape[1] for part in labels)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in labels]
    return torch.cat(queries)[:num], torch.cat(padded)[:num]


def _other_head(trained: Trained, given: dict[str, Any]) -> SoftmaxHead:
    """A head with another sampler and the checkpoint's class embeddings."""
    head = trained.model.head
    source = head.exact if isinstance(head, FullSoftmax) else head
    if not isinstance(source, SoftmaxHead):
        raise ValueError("run: expected one with class embeddings, got one of method 'adaptive'")
    instead = {"full": "default", "nce": "unigram"}
    own = instead.get(trained.config.method, trained.config.method)
    method = given.get("method", own)
    options = {**(trained.config.sampler_options if method == own else {}), **given.get("sampler_options", {})}
    config = replace(trained.config, method=method, sampler_options=options)
    other = SoftmaxHead(
        config.dim,
        source.num_classes,
        sampler_of(config, torch.from_numpy(trained.classes.counts)),
        min(config.num_negatives, source.num_classes - 1),
        config.tau,
        bias=source.bias is not None,
        normalize=source.normalize,
        loss="absolute" if is_absolute(config) else "softmax",
        labels=source.labels,
    )
    other.load_state_dict({name: value.detach() for name, value in source.named_parameters()}, strict=False)
    return other


def _words(trained: Trained, prompt: str) -> list[str]:
    if trained.config.data == "python-text":
        return [EOS if token == "\n" else token for token in tokens(prompt)][:-1]
    return prompt.split()


def _check_widths(trained: Trained, data: str, num_features: int) -> None:
    if num_features != trained.classes.num_inputs:
        raise ValueError(f"{data}: expected {trained.classes.num_inputs} features, got {num_features}")
