"""The demo: one language model, trained with several output layers for the same seconds each.

The models take turns, a slice of the time each, so that whatever else the machine does slows all of them alike.
"""

import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from ..diagnostics import diagnose
from .classes import Classes
from .config import Config
from .demo_config import DemoConfig
from .demo_progress import Display
from .demo_report import Point, Result, plain_table, verdict, write_report
from .models import State, make_model
from .optimizers import clip_gradients, make_optimizers
from .outputs import check_method, sampled_head
from .tasks import Batch, TextTask

# When each model is evaluated, in shares of its time: early, where the curves fall fastest, more often.
_EVALUATIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
# Words of each stream whose queries chi2 is measured on.
_CHI2_WORDS = 5
_WARM_UP_CLASSES = 1024


@final
class Contestant:
    """A model in training, and what came of it so far."""

    def __init__(self, config: Config, task: TextTask) -> None:
        self.method = config.method
        self.config = config
        self.task = task
        self.model = make_model(config, task.classes)
        self.optimizers = make_optimizers(config, self.model)
        self.seconds = 0.0  # of training alone
        self.steps = 0
        self.curve: list[Point] = []
        self._batches = self._endless()
        self._state: State = None

    def train(self, until: float, after_step: Callable[[float, int], None]) -> None:
        """Train to `until` seconds in all; a step that has begun is done."""
        self.model.train()
        while self.seconds < until:
            batch = next(self._batches)
            start = time.perf_counter()
            self._step(batch)
            self.seconds += time.perf_counter() - start
            self.steps += 1
            after_step(self.seconds, self.steps)

    def _step(self, batch: Batch) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        hidden, self._state = self.model(batch.inputs, self._state)
        self.model.head(hidden, batch.target).backward()
        clip_gradients(self.model.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()

    def evaluate(self) -> Point:
        """The exact perplexity of held-out text, where the model is now."""
        point = Point(self.seconds, self.steps, self.task.evaluate(self.model)["perplexity"])
        self.curve.append(point)
        return point

    @torch.no_grad()
    def chi2(self) -> float | None:
        """The median of chi2 over held-out contexts, of this model's sampler and softmax; None without a sampler."""
        head = sampled_head(self.model.head)
        if head is None or head.loss == "nce":
            return None
        self.model.eval()
        batch = next(iter(self.task.held_out("valid")))
        assert isinstance(batch.target, torch.Tensor)
        hidden = self.model(batch.inputs)[0][:, -_CHI2_WORDS:]
        return float(diagnose(head, hidden, batch.target[:, -_CHI2_WORDS:]).chi2.median())

    def result(self) -> Result:
        return Result(self.method, tuple(self.curve), self.chi2())

    def _endless(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            self._state = None
            yield from self.task.batches(epoch)


def run_demo(config: DemoConfig) -> list[Result]:
    """Train, print the table and what it shows, write the report; a result for each method."""
    for method in config.methods:
        check_method(config.of(method))
    began = time.perf_counter()
    with Display() as display:
        with display.working(f"reading {_corpus_name(config)}"):
            task = _make_task(config)
        display.say(
            f"{len(task.corpus.train):,} words to train on, {len(task.classes.counts):,} classes; "
            f"{config.seconds:g} seconds of training for each of {', '.join(config.methods)}"
        )
        with display.working("compiling kernels (kept for the next time)"):
            for method in config.methods:
                _warm_up(config.of(method))
        contestants = [Contestant(config.of(method), task) for method in config.methods]
        _start_alike(contestants)
        _race(contestants, config.seconds, display)
        with display.working("measuring chi2 of the samplers"):
            results = [contestant.result() for contestant in contestants]
        paths = write_report(Path(config.output), results, config.command(), _setup(config, task))
        minutes = (time.perf_counter() - began) / 60
        display.say(f"\n{plain_table(results)}\n\n{verdict(results)}\n\n{paths[0]}  ({minutes:.1f} minutes in all)")
    return results


@torch.no_grad()
def _start_alike(contestants: list[Contestant]) -> None:
    """Give all the first one's parameters: a sampler's frequencies, drawn before, gave them other random numbers."""
    for contestant in contestants[1:]:
        pairs = zip(contestant.model.parameters(), contestants[0].model.parameters(), strict=False)
        for parameter, first in pairs:
            if parameter.shape == first.shape:  # the adaptive softmax has an output layer of its own
                parameter.copy_(first)


def _race(contestants: list[Contestant], seconds: float, display: Display) -> None:
    with display.race([contestant.method for contestant in contestants], seconds):
        for share in _EVALUATIONS:
            for contestant in contestants:
                contestant.train(share * seconds, partial(display.step, contestant.method))
                # One step may have lasted for more than a slice.
                if not contestant.curve or contestant.steps > contestant.curve[-1].step:
                    display.evaluating(contestant.method)
                    display.point(contestant.method, contestant.evaluate())


def _make_task(config: DemoConfig) -> TextTask:
    """The corpus, of whose validation text `eval_limit` words are kept: a piece for each stream, evenly spread."""
    task = TextTask(config.of(config.methods[0]))
    valid = _spread(np.asarray(task.corpus.valid), config.batch_size, config.eval_limit)
    task.corpus = replace(task.corpus, valid=valid)
    return task


def _spread(ids: NDArray[np.int32], num_pieces: int, limit: int) -> NDArray[np.int32]:
    """`num_pieces` pieces of ids, as far apart as they can be, `limit` words in all; all of it if it is shorter."""
    length = limit // num_pieces
    if len(ids) <= limit or not length:
        return ids
    starts = np.linspace(0, len(ids) - length, num_pieces).astype(int)
    return np.concatenate([ids[start : start + length] for start in starts])


def _warm_up(config: Config) -> None:
    """A step on few classes, so that no method's time goes into compiling its kernels."""
    n = max(_WARM_UP_CLASSES, 2 * config.num_negatives)
    model = make_model(config, Classes(n, np.ones(n, dtype=np.int64), ()))
    words = torch.randint(n, (2, config.batch_size, config.seq_len))
    for _ in range(2):
        hidden, _state = model(words[0])
        model.head(hidden, words[1]).backward()
        for optimizer in make_optimizers(config, model):
            optimizer.step()


def _corpus_name(config: DemoConfig) -> str:
    if config.data == "python-text":
        return "the Python sources of the standard library and torch (the first time some 10 seconds)"
    return config.data


def _setup(config: DemoConfig, task: TextTask) -> str:
    """What was trained, on what, in a paragraph."""
    return (
        f"An LSTM language model, d = {config.dim}, on {len(task.corpus.train):,} words of {config.data} with "
        f"{len(task.classes.counts):,} classes; {config.batch_size} x {config.seq_len} words a step, "
        f"m = {config.num_negatives} negatives for each, Adam (SparseAdam for sparse gradients) with learning rate "
        f"{config.lr:g}, no dropout, seed {config.seed}. Perplexity is exact, by the full softmax, on "
        f"{len(task.corpus.valid):,} held-out words; evaluation does not count as training time. "
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}."
    )
