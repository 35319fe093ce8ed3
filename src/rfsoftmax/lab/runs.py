"""A run's directory: config.toml, classes.json, metrics.jsonl, checkpoints, plots and TensorBoard events."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np

from . import plots
from .checkpoints import write_text
from .classes import Classes
from .config import RESUMABLE, Config, dump, read, resolve

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

CONFIG, CLASSES, METRICS = "config.toml", "classes.json", "metrics.jsonl"


@final
class Run:
    """What a run has written so far. `create` starts one, `Run(directory)` opens one that is there.

    With `mute` nothing is written: of several ranks one does it for all.
    """

    def __init__(self, directory: str | Path, *, mute: bool = False) -> None:
        self.mute = mute
        self.directory = Path(directory)
        self.checkpoints = self.directory / "checkpoints"
        if not (self.directory / CONFIG).is_file():
            raise FileNotFoundError(f"run: expected a directory with a {CONFIG}, got {self.directory}")
        self.config = _config(self.directory)

    @classmethod
    def create(cls, directory: str | Path, config: Config, classes: Classes) -> Self:
        directory = Path(directory)
        cls.check_new(directory)
        directory.mkdir(parents=True, exist_ok=True)
        note = {"num_inputs": classes.num_inputs, "names": classes.names, "counts": classes.counts.tolist()}
        write_text(directory / CLASSES, json.dumps(note))
        write_text(directory / METRICS, "")
        write_text(directory / CONFIG, dump(config))
        return cls(directory)

    @staticmethod
    def check_new(directory: Path) -> None:
        if (directory / CONFIG).exists():
            raise FileExistsError(f"run: expected a new directory, or --resume to go on, got {directory}")

    def reconfigure(self, given: dict[str, Any]) -> None:
        """Take over settings that may change when a run goes on; another value of any other is an error."""
        config = resolve(self.config.task, self.directory / CONFIG, given)
        for name, old in asdict(self.config).items():
            if (new := getattr(config, name)) != old and name not in RESUMABLE:
                raise ValueError(f"{name}: expected {old!r}, as in {self.directory / CONFIG}, got {new!r}")
        if config != self.config and not self.mute:
            write_text(self.directory / CONFIG, dump(config))
        self.config = config

    def classes(self) -> Classes:
        note = json.loads((self.directory / CLASSES).read_text(encoding="utf-8"))
        return Classes(note["num_inputs"], np.array(note["counts"], dtype=np.int64), tuple(note["names"]))

    def check_classes(self, classes: Classes) -> None:
        """Raise if the data has changed since the run began."""
        if not np.array_equal(self.classes().counts, classes.counts):
            raise ValueError(f"data: expected what {self.directory} was trained on, got other classes or counts")

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to the metrics; what is not finite, and so not JSON, becomes null."""
        if self.mute:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with (self.directory / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All lines of the metrics; a last one that was cut short is left out."""
        return list(self._records())

    def _records(self) -> Iterator[dict[str, Any]]:
        for line in (self.directory / METRICS).read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)

    def rewind(self, step: int) -> None:
        """Forget what was logged after a step: the run goes on from there."""
        if self.mute:
            return
        kept = [record for record in self.records() if record["step"] <= step]
        write_text(self.directory / METRICS, "".join(json.dumps(record) + "\n" for record in kept))

    def events(self) -> "SummaryWriter | NoEvents":
        """A writer of TensorBoard events whose one file begins with all that was logged so far."""
        if self.mute:
            return NoEvents()
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only training needs it

        directory = self.directory / "tensorboard"
        for old in directory.glob("events.out.tfevents.*"):
            old.unlink()
        writer = SummaryWriter(str(directory))
        for record in self.records():
            add_scalars(writer, record)
        return writer

    def plot(self) -> None:
        if not self.mute:
            plots.draw(self.directory / "plots", self.records(), self.directory.name)


@final
class NoEvents:
    """A writer that writes nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add_scalar(self, *scalar: object) -> None:
        pass


def add_scalars(writer: "SummaryWriter | NoEvents", record: dict[str, Any]) -> None:
    """A line of metrics as TensorBoard shows it: `train/loss`, `valid/perplexity`, ..."""
    for name, value in record.items():
        if name not in ("kind", "step", "time") and value is not None:
            writer.add_scalar(f"{record['kind']}/{name}", float(value), record["step"], record["time"])


def _config(directory: Path) -> Config:
    task = read(directory / CONFIG).get("task", "text")
    return resolve(task, directory / CONFIG)
