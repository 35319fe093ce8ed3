"""`rfsoftmax reproduce`: run what is missing of the paper's experiments, list it, or take over a run made by hand.

A finished run leaves a small JSON file and is never run again; an unfinished one goes on from its last checkpoint.
Several processes may work on the same plan: each takes what no other has begun.
"""

import fcntl
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from .checkpoints import PROGRESS, keep_model, read_progress, saved
from .experiments import ENWIKI, PTB, TIBKAT, TRAINED, Planned, plan, with_seeds
from .measurements import MEASURED, Measurement, MissingRunError
from .places import Places
from .results import deciding
from .runs import CONFIG, Run
from .tasks import Task, make_task
from .timing import commit
from .train import DivergedError, StoppedError, Trainer, new_trainer
from .training_results import training_result

# For planning: steps of an epoch at the usual batch, where they are known without the data.
_EPOCH_STEPS = {PTB: 1328, TIBKAT: 707}
_ENWIKI_WORDS = 11_800_000

Work = Planned | Measurement


@final
@dataclass(frozen=True)
class Choice:
    """What of the plan is meant: items, and of them the runs whose label, method or name is among `only`."""

    items: tuple[str, ...]
    scale: str = "small"
    seeds: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    sets: tuple[str, ...] = (TIBKAT,)

    def works(self) -> list[tuple[str, Work]]:
        """Items and their work, each once: of items that share a run it is the first one's."""
        found: dict[str, tuple[str, Work]] = {}
        for item in self.items:
            for work in self._of(item):
                if not self.only or self._is_meant(work):
                    found.setdefault(work.name, (item, work))
        if self.only and not found:
            names = sorted({name for item in self.items for work in self._of(item) for name in _names(work)})
            raise ValueError(f"only: expected any of {', '.join(names)}, got {', '.join(self.only)}")
        return list(found.values())

    def _of(self, item: str) -> Sequence[Work]:
        if item not in TRAINED:
            return [part for part in MEASURED[item](self.scale) if part.dataset in ("", PTB, *self.sets)]
        runs = plan(item, self.scale, self.sets)
        return with_seeds(runs, list(self.seeds)) if self.seeds else runs

    def _is_meant(self, work: Work) -> bool:
        return bool(_names(work) & set(self.only))


def _names(work: Work) -> set[str]:
    return {work.name, work.label} | ({work.config.method} if isinstance(work, Planned) else set())


def reproduce(choice: Choice, places: Places) -> int:
    """Do what is missing, one after another; 0 if all of it is there in the end, 130 if somebody asked to stop."""
    commit()  # what runs is the source as it is now
    missing = 0
    for item, work in choice.works():
        print(f"{item}: {work.label} ({work.name}): ", end="", flush=True)
        with _claimed(places.runs, work.name) as free:
            if is_done(work, places):
                print("done before", flush=True)
            elif not free:
                print("another process is at it", flush=True)
                missing += 1
            else:
                print("begins", flush=True)
                try:
                    print(f"{item}: {_carry_out(work, places)}", flush=True)
                except StoppedError:
                    print("stopped and saved; the same command goes on", flush=True)
                    return 130
                except (DivergedError, MissingRunError) as error:
                    print(f"{item}: {work.label}: {error}", flush=True)
                    missing += 1
    return int(missing > 0)


def is_done(work: Work, places: Places) -> bool:
    if isinstance(work, Planned):
        return places.results.training(work.dataset, work.config) is not None
    return places.results.read(work.name) is not None


def _carry_out(work: Work, places: Places) -> Path:
    if isinstance(work, Measurement):
        return places.results.write(work.name, work.measure(places))
    run, task = _trained(work, places)
    path = places.results.write(work.name, training_result(work.dataset, run, task))
    keep_model(run.checkpoints)
    return path


def _trained(planned: Planned, places: Places) -> tuple[Run, Task]:
    """The run, finished: from its last checkpoint if it has begun, else from the start."""
    directory = places.runs / planned.name
    elsewhere: dict[str, Any] = {**places.of(planned.dataset), "cache": str(places.cache)}
    if (directory / CONFIG).exists():
        run = Run(directory)
        run.reconfigure(elsewhere)
        if _is_finished(run):
            return run, make_task(run.config)
        trainer = Trainer(run, make_task(run.config))
    else:
        trainer = new_trainer(directory, replace(planned.config, **elsewhere))
    trainer.fit()
    return trainer.run, trainer.task


def _is_finished(run: Run) -> bool:
    steps = saved(run.checkpoints)
    return bool(steps) and read_progress(steps[-1])[0].epoch >= run.config.epochs


def adopt(directory: Path, choice: Choice, places: Places) -> str:
    """Move a run of `rfsoftmax train` to where the plan has it; its result is written by the next `reproduce`.

    The plan must have a run of its settings, on a data set whose name is part of the path of the run's data.
    """
    run = Run(directory)
    for item, work in replace(choice, items=TRAINED).works():
        fits = isinstance(work, Planned) and work.dataset in Path(run.config.data).parts
        if isinstance(work, Planned) and fits and deciding(work.config) == deciding(run.config):
            target = places.runs / work.name
            if target.exists():
                raise FileExistsError(f"adopt: expected nothing at {target} yet, got a run there")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(directory, target)
            return f"{directory} is {item}: {work.label}, seed {work.config.seed}, and lies in {target} now"
    raise ValueError(f"adopt: expected a run with the settings of one in the plan, got {directory}")


def listing(choice: Choice, places: Places) -> str:
    """A line for each work: its item, label, seed, name, state and estimated minutes on one core."""
    rows, left = [], 0.0
    for item, work in choice.works():
        done, minutes = is_done(work, places), estimate(work) / 60
        left += 0.0 if done else minutes
        seed = str(work.config.seed) if isinstance(work, Planned) else "-"
        rows.append((item, work.label, seed, work.name, _state(work, places), f"{minutes:.0f} min"))
    header = ("item", "run", "seed", "name", "state", "estimate")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
    return "\n".join([*lines, "", f"{left / 60:.1f} hours of one core are left to do"])


def estimate(work: Work) -> float:
    """Seconds on one core, roughly."""
    if isinstance(work, Measurement):
        return work.seconds
    config = work.config
    if config.train_limit or work.dataset == ENWIKI:
        words = config.train_limit or _ENWIKI_WORDS
        return config.epochs * words / (config.batch_size * config.seq_len) * work.step_seconds
    return config.epochs * _EPOCH_STEPS.get(work.dataset, 10_000) * work.step_seconds


def _state(work: Work, places: Places) -> str:
    if is_done(work, places):
        return "done"
    steps = saved(places.runs / work.name / "checkpoints")
    if not steps or not (steps[-1] / PROGRESS).is_file():
        return "to do"
    return f"at step {read_progress(steps[-1])[0].step:,}"


@contextmanager
def _claimed(directory: Path, name: str) -> Iterator[bool]:
    """Whether the work is this process's; whatever ends the process gives it free again."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
