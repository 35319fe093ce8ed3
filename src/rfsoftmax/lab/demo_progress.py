"""What the demo shows while it runs: bars on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .demo_report import Point


@final
class Display:
    """`working` for what has no end in sight, `race` with a bar for each method, `say` for what stays."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            columns = [TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[numbers]}")]
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self.console)
            self._exits.enter_context(self._progress)
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.close()
        self._progress = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        if self._progress is None:
            self.say(f"{text} ...")
            yield
            return
        bar = self._progress.add_task(text, total=None, numbers="")
        yield
        self._progress.remove_task(bar)

    @contextmanager
    def race(self, methods: list[str], seconds: float) -> Iterator[None]:
        width = max(map(len, methods))
        if self._progress is not None:
            for method in methods:
                self._bars[method] = self._progress.add_task(
                    f"{method:{width}}", total=seconds, numbers="waits", start=False
                )
        yield
        if self._progress is not None:
            for bar in self._bars.values():
                self._progress.remove_task(bar)

    def step(self, method: str, seconds: float, steps: int) -> None:
        self._update(method, f"step {steps:,}", completed=seconds)

    def evaluating(self, method: str) -> None:
        self._update(method, "evaluates")

    def point(self, method: str, point: Point) -> None:
        self._update(method, f"perplexity {point.perplexity:,.0f}")
        if self._progress is None:
            numbers = f"{point.seconds:6.1f} s  step {point.step:5,}  perplexity {point.perplexity:,.0f}"
            self.say(f"{method:9s} {numbers}")

    def _update(self, method: str, numbers: str, **more: Any) -> None:
        if self._progress is not None:
            self._progress.start_task(self._bars[method])
            self._progress.update(self._bars[method], numbers=numbers, **more)
