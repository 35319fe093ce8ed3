"""What a run shows: a live bar on a terminal, a plain line now and then elsewhere."""

import time
from contextlib import ExitStack
from typing import Any, Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

# Seconds between plain lines of training; evaluations always have one.
_PLAIN_SECONDS = 10.0


@final
class Reporter:
    """`progress` after a step or so, `message` for what must be read."""

    def __init__(self, num_steps: int, first_step: int, unit: str, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.num_steps = num_steps
        self.first_step = first_step
        self.unit = unit
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last_line = 0.0
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}")]
            self._bar = self._exits.enter_context(Progress(*columns, TimeRemainingColumn(), console=self.console))
            self._task = self._bar.add_task("", total=self.num_steps, completed=self.first_step, numbers="")
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.close()
        self._bar = None

    def advance(self, step: int, epoch: int) -> None:
        """A step of an epoch, counted from 1, is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=f"epoch {epoch}")

    def train(self, record: dict[str, Any]) -> None:
        numbers = f"loss {record['loss']:.3f}  {record['items_per_second']:,.0f} {self.unit}/s"
        if record["sampler_share"]:
            numbers += f"  sampler {record['sampler_share']:.0%}"
        if self._bar is not None:
            self._bar.update(self._task, numbers=numbers)
        elif time.monotonic() - self._last_line > _PLAIN_SECONDS:
            self._last_line = time.monotonic()
            left = (self.num_steps - record["step"]) * record["seconds"] / record["step"]
            self.message(f"step {record['step']}/{self.num_steps}  {numbers}  {left / 60:.0f} min left")

    def valid(self, record: dict[str, Any], better: bool) -> None:
        hidden = ("kind", "step", "epoch", "seconds", "time")
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in record.items() if name not in hidden)
        best = "  (best)" if better else ""
        self.message(f"epoch {record['epoch']}  step {record['step']}  {record['seconds']:.0f} s  {numbers}{best}")

    def message(self, text: str) -> None:
        self.console.print(text, markup=False)
