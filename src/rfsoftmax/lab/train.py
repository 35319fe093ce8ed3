"""The training loop. It can be killed at any time and goes on to the last bit."""

import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from rich.console import Console
from torch import Tensor

from . import checkpoints, rank_checkpoints
from .checkpoints import Progress
from .config import DEFAULTS, RESUMABLE, Config
from .models import Model, State, make_model
from .optimizers import clip_gradients, learning_rate, make_optimizers, set_learning_rate
from .outputs import check_method, sampled_head
from .parallel import data_parallel, each_says
from .reporter import Reporter
from .runs import NoEvents, Run, add_scalars
from .stopwatch import Stopwatch
from .tasks import Batch, Task, make_task

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class DivergedError(Exception):
    """The loss, or what it is made of, is not finite; the message names the batch and the last good checkpoint."""


class StoppedError(Exception):
    """Somebody asked to stop; all is saved, and the message says how to go on."""


@final
class Trainer:
    """Trains the model of a run from its last checkpoint, or from the start, to the end of its epochs.

    With adam, dense gradients go to Adam and sparse ones to SparseAdam. What is saved holds, beside parameters and
    optimizers, the random numbers, the LSTM's state, the place in the data and all of the sampler: losses after it
    are, on the same machine, those of a run that never stopped.

    With several ranks, those of the task, each has its share of a batch and of the classes; rank 0 writes and speaks.
    """

    def __init__(self, run: Run, task: Task, model: Model | None = None) -> None:
        run.check_classes(task.classes)
        self.run = run
        self.task = task
        self.ranks = task.ranks
        self.config = run.config
        self.num_batches = task.num_batches()
        self.num_steps = self.config.epochs * self.num_batches
        self.model = make_model(self.config, task.classes) if model is None else model
        self.head = sampled_head(self.model.head)
        self.optimizers = make_optimizers(self.config, self.model)
        self.progress = Progress()
        self.state: State = None
        self.watch = Stopwatch()
        if self.head is not None:
            self.watch.watch(self.head.sampler)
        if self.ranks.num > 1:
            torch.manual_seed(self.config.seed + self.ranks.rank)  # the model is there: this is for its dropout
        if checkpoints.saved(run.checkpoints):
            self._load(checkpoints.find(run.checkpoints))
        self.network = data_parallel(self.model, self.ranks)
        run.rewind(self.progress.step)
        console = Console(quiet=True) if run.mute else None
        self.reporter = Reporter(self.num_steps, self.progress.step, task.unit, console)
        self._clock = time.perf_counter()
        self._items = 0
        self._last = (self.progress.seconds, 0.0)  # seconds of training and in the sampler at the last line of metrics

    def fit(self) -> Progress:
        """Train until the last epoch is done or patience is at its end."""
        # Adagrad makes sparse tensors, and torch warns of those whose checks are neither on nor off.
        unchecked = torch.sparse.check_sparse_tensor_invariants(enable=False)
        with unchecked, _stop_asked() as asked, self.run.events() as events, self.reporter:
            self._clock = time.perf_counter()
            while not self._is_done():
                epoch = self.progress.epoch
                for batch in self.task.batches(epoch, self.progress.batch):
                    self._step(batch, events)
                    evaluated = self._evaluation_is_due() and self._evaluate(events)
                    if any(each_says(asked(), self.ranks)):
                        raise self._stopped()
                    if evaluated or (self.config.save_every and self.progress.step % self.config.save_every == 0):
                        self._save()
                    if self._is_done():
                        break
        self.run.plot()
        self._say_what_is_there()
        return self.progress

    def _is_done(self) -> bool:
        return self._is_patience_at_end() or self.progress.epoch >= self.config.epochs

    def _is_patience_at_end(self) -> bool:
        return 0 < self.config.patience <= self.progress.num_worse

    def _say_what_is_there(self) -> None:
        progress, name = self.progress, self.task.score
        if self._is_patience_at_end():
            self.reporter.message(f"no better {name} in {progress.num_worse} evaluations: stopped early")
        elif progress.step == self.reporter.first_step:
            self.reporter.message("nothing was left to do; --resume with a larger --epochs goes on")
        best = "nothing was evaluated" if progress.best is None else f"best {name} {progress.best:.4g}"
        saved = checkpoints.find(self.run.checkpoints, "best")
        self.reporter.message(f"done after {progress.step} steps: {best}, saved in {saved}")

    def _step(self, batch: Batch, events: "SummaryWriter | NoEvents") -> None:
        lr = learning_rate(self.config, self.progress.step, self.num_steps)
        set_learning_rate(self.optimizers, lr)
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        norm = self._clip()
        if not math.isfinite(norm):
            raise self._diverged(f"a gradient of norm {norm}")
        for optimizer in self.optimizers:
            optimizer.step()
        self._advance(loss.item(), batch.num_items)
        if self.progress.step % self.config.log_every == 0 or self._evaluation_is_due():
            self._log(lr, norm, events)

    def _clip(self) -> float:
        parts = list(self.model.head.parameters())
        ids = {id(parameter) for parameter in parts}
        whole = [parameter for parameter in self.model.parameters() if id(parameter) not in ids]
        return clip_gradients(whole, self.config.clip, parts, self.ranks)

    def _loss(self, batch: Batch) -> Tensor:
        hidden, self.state = self.network(batch.inputs, self.state)
        try:
            loss: Tensor = self.model.head(hidden, batch.target)
        except ValueError as error:  # the head's word for queries or embeddings that are not finite
            self._check_finite()
            if hidden.isfinite().all():
                raise
            raise self._diverged("queries that are not") from error
        if not math.isfinite(value := loss.item()):
            raise self._diverged(f"a loss of {value}")
        return loss

    def _advance(self, loss: float, num_items: int) -> None:
        progress, now = self.progress, time.perf_counter()
        progress.seconds += now - self._clock
        self._clock = now
        self._items += num_items
        progress.loss_sum += loss
        progress.num_summed += 1
        progress.step += 1
        progress.batch += 1
        if progress.batch == self.num_batches:
            progress.epoch, progress.batch, self.state = progress.epoch + 1, 0, None
        self.reporter.advance(progress.step, self._epoch_of_last_step())

    def _log(self, lr: float, norm: float, events: "SummaryWriter | NoEvents") -> None:
        """A line of metrics over the steps since the last one."""
        progress = self.progress
        seconds = max(progress.seconds - self._last[0], 1e-9)
        numbers = {
            "loss": progress.loss_sum / progress.num_summed,
            "lr": lr,
            "grad_norm": norm,
            "items_per_second": self._items / seconds,
            "sampler_share": (self.watch.seconds - self._last[1]) / seconds,
        }
        self.reporter.train(self._record("train", numbers, events))
        progress.loss_sum, progress.num_summed, self._items = 0.0, 0, 0
        self._last = (progress.seconds, self.watch.seconds)

    def _record(self, kind: str, numbers: dict[str, float], events: "SummaryWriter | NoEvents") -> dict[str, Any]:
        progress = self.progress
        epoch = self._epoch_of_last_step()
        place = {"kind": kind, "step": progress.step, "epoch": epoch, "seconds": progress.seconds, "time": time.time()}
        record = {**place, **numbers}
        self.run.log(record)
        add_scalars(events, record)
        return record

    def _epoch_of_last_step(self) -> int:
        """Counted from 1; a step that ends an epoch belongs to it."""
        return (self.progress.step - 1) // self.num_batches + 1

    def _evaluation_is_due(self) -> bool:
        step, every = self.progress.step, self.config.eval_every
        return step == self.num_steps or (step % every == 0 if every else self.progress.batch == 0)

    def _evaluate(self, events: "SummaryWriter | NoEvents") -> bool:
        progress = self.progress
        self._check_finite()
        random = torch.get_rng_state()
        numbers = self.task.evaluate(self.model)
        torch.set_rng_state(random)
        score = numbers[self.task.score]
        sign = 1 if self.task.higher_is_better else -1
        better = not math.isnan(score) and (progress.best is None or sign * score > sign * progress.best)
        if better:
            progress.best, progress.best_step, progress.num_worse = score, progress.step, 0
        else:
            progress.num_worse += 1
        self.reporter.valid(self._record("valid", numbers, events), better)
        self._clock = time.perf_counter()
        return True

    def _check_finite(self) -> None:
        """A checkpoint is one to go on from: no step that left NaN or inf behind is saved."""
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                raise self._diverged(f"NaN or inf in {name}", self.progress.step)

    def _save(self) -> Path:
        self._check_finite()
        if self.config.shard_classes:
            place = self.progress, _fixed(self.config), self.ranks
            path = rank_checkpoints.save(self.run.checkpoints, self.model, self.optimizers, self.state, *place)
            self._clock = time.perf_counter()
            return path
        training = {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": torch.get_rng_state(),
            "state": self.state,
            "sampler": None if self.head is None else checkpoints.sampler_state(self.head),
        }
        path = checkpoints.save(self.run.checkpoints, self.model, training, self.progress, _fixed(self.config))
        self._clock = time.perf_counter()
        return path

    def _load(self, path: Path) -> None:
        self.progress, settings = checkpoints.read_progress(path)
        for name, value in _fixed(self.config).items():
            # A setting that the checkpoint does not know is younger, and was then what its default is now.
            saved = settings.get(name, getattr(DEFAULTS[self.config.task], name))
            if saved != value:
                raise ValueError(f"{path}: expected a checkpoint with {name} {value!r}, got {saved!r}")
        if self.config.shard_classes:
            rows = self.config.batch_size
            self.state = rank_checkpoints.load(path, self.model, self.optimizers, rows, self.ranks)
            return
        checkpoints.load_model(path, self.model)
        training = checkpoints.load_training(path)
        for optimizer, state in zip(self.optimizers, training["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.state = training["state"]
        if self.head is not None:
            checkpoints.load_sampler(self.head, training["sampler"])
        torch.set_rng_state(training["random"])

    def _stopped(self) -> StoppedError:
        return StoppedError(f"saved {self._save()}; go on with: {_resume_command(self.run)}")

    def _diverged(self, what: str, step: int | None = None) -> DivergedError:
        """At a step, counted from 1; without one at the next."""
        step = self.progress.step + 1 if step is None else step
        saved = checkpoints.saved(self.run.checkpoints)
        epoch, batch = divmod(step - 1, self.num_batches)
        where = f"step {step}, batch {batch + 1} of epoch {epoch + 1}"
        last = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        advice = f"try a lower rate: {_resume_command(self.run)} --lr {self.config.lr / 4:g}"
        return DivergedError(f"{where}: expected finite numbers, got {what}; {last}; {advice}")


def new_trainer(directory: Path, config: Config) -> Trainer:
    """The trainer of a run that begins, alone; what is wrong with its settings is said before the run is there."""
    check_method(config)
    Run.check_new(directory)
    task = make_task(config)
    model = make_model(config, task.classes)
    return Trainer(Run.create(directory, config, task.classes), task, model)


def _fixed(config: Config) -> dict[str, Any]:
    """The settings that a run keeps for its whole life."""
    return {name: value for name, value in asdict(config).items() if name not in RESUMABLE}


def _resume_command(run: Run) -> str:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    place = shlex.quote(str(run.directory))
    if ranks > 1:
        launch = f"torchrun --nproc-per-node={ranks} -m rfsoftmax train"
        return f"{launch} {run.config.task} --run-directory {place} --resume"
    return f"rfsoftmax train {run.config.task} --run {place} --resume"


@contextmanager
def _stop_asked() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the step, or evaluation, is done first. Pressed again it stops at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nstopping after this step; Ctrl-C again stops at once, without saving\n")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
