"""Checkpoints: all that training needs to go on to the last bit. One is there whole or not at all.

A checkpoint is a directory `step-N` with `model.safetensors` (the model's state_dict), `training.pt` (optimizers,
random numbers, the state of the network and of its sampler) and `progress.json`. It is written beside and renamed.
That of a run with `shard_classes` has other files in the place of the first two: see rank_checkpoints.py.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..head import SoftmaxHead, _Visit
from ..sharded_checkpoints import load_checkpoint

MODEL, TRAINING, PROGRESS, SHARDED = "model.safetensors", "training.pt", "progress.json", "sharded"
_PARTIAL = ".partial"


@dataclass
class Progress:
    """How far a run has come. `epoch` and `batch` are those of the next step."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0  # of training, without evaluations and checkpoints
    loss_sum: float = 0.0  # of the steps since the last line of metrics
    num_summed: int = 0
    best: float | None = None
    best_step: int = 0
    num_worse: int = 0  # evaluations since the best


def save(directory: Path, model: nn.Module, training: dict[str, Any], progress: Progress, settings: Any) -> Path:
    """Write the checkpoint of `progress.step` below `directory`; of the others the last and the best are kept."""
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    with made(directory, progress, settings) as beside:
        written(beside / MODEL, lambda file: save_file(tensors, file))
        written(beside / TRAINING, lambda file: torch.save(training, file))
    return place(directory, progress)


def place(directory: Path, progress: Progress) -> Path:
    """Where the checkpoint of `progress.step` is, or will be."""
    return directory / f"step-{progress.step:09d}"


def beside(directory: Path, progress: Progress) -> Path:
    """Where it is while it is written."""
    path = place(directory, progress)
    return path.with_name(path.name + _PARTIAL)


@contextmanager
def made(directory: Path, progress: Progress, settings: Any) -> Iterator[Path]:
    """A directory to write a checkpoint into, which is then in its place at once."""
    path, partial = place(directory, progress), beside(directory, progress)
    shutil.rmtree(partial, ignore_errors=True)
    note = json.dumps({**asdict(progress), "settings": settings})
    try:
        partial.mkdir(parents=True)
        yield partial
        written(partial / PROGRESS, lambda file: file.write_text(note))
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        _sync(directory)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own
        shutil.rmtree(partial, ignore_errors=True)
        steps = saved(directory)
        last = f"the last checkpoint is {steps[-1]}" if steps else "there is no checkpoint yet"
        raise OSError(f"{path}: expected to write a checkpoint, got {error}; {last}") from error
    _prune(directory, progress)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: it holds the old text or the new, whatever happens."""
    partial = path.with_name(path.name + _PARTIAL)
    written(partial, lambda file: file.write_text(text, encoding="utf-8"))
    partial.replace(path)


def saved(directory: Path) -> list[Path]:
    """The checkpoints, oldest first."""
    return sorted(path for path in directory.glob("step-*") if not path.name.endswith(_PARTIAL))


def keep_model(directory: Path) -> None:
    """Of a run that is at its end keep the model of the last checkpoint: the state of a large tree is gigabytes."""
    steps = saved(directory)
    for old in steps[:-1]:
        shutil.rmtree(old, ignore_errors=True)
    (steps[-1] / TRAINING).unlink(missing_ok=True)


def find(directory: Path, which: str = "last") -> Path:
    """The checkpoint "last", "best" or of a step."""
    steps = saved(directory)
    if not steps:
        raise FileNotFoundError(f"{directory}: expected a checkpoint, got none")
    if which == "last":
        return steps[-1]
    wanted = read_progress(steps[-1])[0].best_step if which == "best" else which
    if not str(wanted).isdigit():
        raise ValueError(f"checkpoint: expected last, best or a step, got {which!r}")
    path = directory / f"step-{int(wanted):09d}"
    if path in steps:
        return path
    if which == "best":  # nothing was evaluated yet
        return steps[-1]
    known = ", ".join(str(int(step.name.removeprefix("step-"))) for step in steps)
    raise FileNotFoundError(f"checkpoint: expected last, best or one of the steps {known}, got {which}")


def read_progress(path: Path) -> tuple[Progress, dict[str, Any]]:
    """How far the checkpoint is, and the settings it was made with."""
    try:
        note = json.loads((path / PROGRESS).read_text())
        settings: dict[str, Any] = note.pop("settings")
        return Progress(**note), settings
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / PROGRESS}: expected what this version writes, got another: {error}") from error


def load_model(path: Path, model: nn.Module) -> None:
    if (path / SHARDED).is_dir():
        load_checkpoint(path / SHARDED, model)
        return
    try:
        model.load_state_dict(load_file(path / MODEL))
    except SafetensorError as error:
        raise ValueError(f"{path / MODEL}: expected a whole file, got a damaged one: {error}") from error
    except RuntimeError as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path}: expected a checkpoint of this model, got another: {what}") from error


def load_training(path: Path) -> dict[str, Any]:
    training: dict[str, Any] = torch.load(path / TRAINING, weights_only=True)
    return training


def sampler_state(head: SoftmaxHead) -> dict[str, Any]:
    """What the next draws depend on and a state_dict leaves for a rebuild to make anew.

    A rebuild would round sums that were updated step by step otherwise, and the draws after it would differ.
    """
    kept = head.sampler.state_dict()
    modules = head.sampler.named_modules()
    return {
        "buffers": {name: value for name, value in head.sampler.named_buffers() if name not in kept},
        "numbers": {
            name: {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float)}
            for name, module in modules
        },
        "forwards": head._forwards,
        "visits": [tuple(visit) for visit in head._visits],
    }


@torch.no_grad()
def load_sampler(head: SoftmaxHead, state: dict[str, Any]) -> None:
    """To be called after `load_model`, with what `sampler_state` gave."""
    head.rebuild()  # makes every buffer in its size; what it keeps of the saved state_dict stays
    for name, buffer in head.sampler.named_buffers():
        if name in state["buffers"]:
            buffer.copy_(state["buffers"][name])
    for name, module in head.sampler.named_modules():
        vars(module).update(state["numbers"][name])
    head._forwards = state["forwards"]
    head._visits = [_Visit(*visit) for visit in state["visits"]]


def written(path: Path, write: Callable[[Path], Any]) -> None:
    """Written to the disk itself, which a rename may reach before the bytes do."""
    write(path)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(directory: Path, progress: Progress) -> None:
    best = f"step-{progress.best_step:09d}"
    for old in saved(directory)[:-2]:
        if old.name != best:
            shutil.rmtree(old, ignore_errors=True)
    for partial in directory.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(partial, ignore_errors=True)
