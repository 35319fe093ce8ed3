"""What came of the demo: a table, a sentence, two pictures and a page that holds them all."""

import base64
import html
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .charts import Chart, ChartPoint, Line, png
from .numbers_text import number
from .pages import cells, write_files

# Perplexities nearer than this are called level: a few thousand held-out words do not tell them apart.
_LEVEL = 1.03
_HEADER = ("method", "perplexity", "steps", "ms/step", "speed", "chi2")
_LABELS = {"full": "full softmax", "rff": "rff (paper)"}
# Places in `charts.COLOURS`.
_COLOURS = {"full": 0, "default": 1, "rff": 2, "uniform": 5}
_MORE_COLOURS = (3, 4, 6, 7)


class Point(NamedTuple):
    """The perplexity of held-out text after so many seconds of training, and steps."""

    seconds: float
    step: int
    perplexity: float


@dataclass(frozen=True)
class Result:
    """A method's curve, and the median chi2 of its sampler at the end of it, if it has one."""

    method: str
    curve: tuple[Point, ...]
    chi2: float | None

    @property
    def perplexity(self) -> float:
        return self.curve[-1].perplexity

    @property
    def steps(self) -> int:
        return self.curve[-1].step

    @property
    def step_seconds(self) -> float:
        return self.curve[-1].seconds / self.steps


def verdict(results: Sequence[Result]) -> str:
    """One sentence of what the numbers show, whoever wins."""
    ranked = sorted(results, key=lambda result: (math.isnan(result.perplexity), result.perplexity))
    seconds = min(result.curve[-1].seconds for result in results)
    ours = next((result for result in ranked if result.method == "default"), ranked[0])
    full = next((result for result in ranked if result.method == "full"), ours)
    speed = full.step_seconds / ours.step_seconds
    sentence = f"After {number(seconds)} seconds of training each, {_ranking(ranked, ours)}"
    if full is not ours:
        how = f"{number(speed)} times as fast as" if speed >= 1 else f"{number(1 / speed)} times slower than"
        sentence += f"; a step with {_name(ours)} is {how} one with {_name(full)}"
    return f"{sentence}."


def _ranking(ranked: Sequence[Result], ours: Result) -> str:
    best = ranked[0]
    if len(ranked) == 1:
        return f"{_name(best)} is at validation perplexity {number(best.perplexity)}"
    other = ranked[1] if ours is best else best
    if all(result.perplexity < _LEVEL * best.perplexity for result in (ours, other)):
        numbers = f"{number(ours.perplexity)} and {number(other.perplexity)}"
        return f"{_name(ours)} and {_name(other)} are level at the lowest validation perplexity, {numbers}"
    if ours is best:
        numbers = f"{number(best.perplexity)}; next is {_name(other)} with {number(other.perplexity)}"
        return f"{_name(ours)} has the lowest validation perplexity, {numbers}"
    numbers = f"{number(best.perplexity)} against {number(ours.perplexity)}"
    return f"{_name(ours)} does not win: {_name(best)} has the lowest validation perplexity, {numbers}"


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The cells of the table, as text: the header first. Speed is that of a step, relative to the full softmax."""
    full = next((result for result in results if result.method == "full"), None)
    table: list[tuple[str, ...]] = [_HEADER]
    for result in results:
        speed = "-" if full is None else f"{number(full.step_seconds / result.step_seconds)}x"
        chi2 = "-" if result.chi2 is None else number(result.chi2)
        milliseconds = number(1000 * result.step_seconds)
        table.append((result.method, number(result.perplexity), f"{result.steps:,}", milliseconds, speed, chi2))
    return table


def plain_table(results: Sequence[Result]) -> str:
    table = rows(results)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([f"{line[0]:{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in table
    )


def write_report(directory: Path, results: Sequence[Result], command: str, setup: str) -> list[Path]:
    """`report.html`, which needs nothing beside it, `perplexity.png` and `steps.png`; their paths."""
    by_seconds = _picture(results, "perplexity", lambda point: point.seconds, "seconds of training", log_x=False)
    by_steps = _picture(results, "steps", lambda point: point.step, "training steps", log_x=True)
    page = _page(results, command, setup, by_seconds, by_steps)
    contents = {"report.html": page.encode(), "perplexity.png": by_seconds, "steps.png": by_steps}
    return write_files(directory, contents)


def _picture(results: Sequence[Result], name: str, x: Callable[[Point], float], x_name: str, *, log_x: bool) -> bytes:
    """The curves as a PNG, each with its name and last perplexity at its end."""
    more = itertools.cycle(_MORE_COLOURS)
    lines = []
    for result in results:
        points = [point for point in result.curve if math.isfinite(point.perplexity) and (point.step or not log_x)]
        if points:
            values = tuple(ChartPoint(x(point), *3 * (point.perplexity,)) for point in points)
            colour = _COLOURS[result.method] if result.method in _COLOURS else next(more)
            lines.append(Line(_name(result), values, colour, bold=result.method == "default"))
    return png(Chart(name, "Perplexity of held-out text (lower is better)", x_name, tuple(lines), log_x=log_x))


def _name(result: Result) -> str:
    return _LABELS.get(result.method, result.method)


_STYLE = """
body { font: 17px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 44rem; margin: 0 auto;
       padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
.lead { font-size: 1.15rem; }
img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.ours { font-weight: bold; color: #0072b2; }
code { background: #f3f3f3; padding: 0.15rem 0.35rem; overflow-wrap: anywhere; }
small { color: #555; }
"""


def _page(results: Sequence[Result], command: str, setup: str, by_seconds: bytes, by_steps: bytes) -> str:
    header, *lines = rows(results)
    body = "".join(map(_row, lines))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<title>rfsoftmax demo</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>One model, the same training time, {len(lines)} output layers</h1>
<p class="lead">{html.escape(verdict(results))}</p>
{_image(by_seconds, "validation perplexity against seconds of training")}
<p>How to read it: every curve is the same language model; only the output layer it is trained with differs. At any
moment the lowest curve is the best model for the time spent. All are judged by the exact full softmax.</p>
<div class="wide">
<table>
<tr>{cells("th", header)}</tr>
{body}</table>
</div>
<p><small>Speed is that of a step, relative to the full softmax. chi2 = &#931; p&#178;/q &#8722; 1 says how far the
sampler's q is from the softmax p over the negatives, at the end of its own training, median over held-out contexts:
0 is perfect, and with m negatives the noise of the loss goes as chi2/m.</small></p>
<h2>What a step is worth</h2>
{_image(by_steps, "validation perplexity against training steps")}
<p>The same points by steps in place of seconds. A sampler that comes close to the softmax follows the curve of the full
softmax; one that does not needs more steps for the same perplexity.</p>
<h2>What was run</h2>
<p>{html.escape(setup)}</p>
<p><code>{html.escape(command)}</code></p>
</body>
</html>
"""


def _row(texts: Sequence[str]) -> str:
    kind = ' class="ours"' if texts[0] == "default" else ""
    return f"<tr{kind}>{cells('td', texts)}</tr>\n"


def _image(png: bytes, about: str) -> str:
    return f'<img alt="{about}" src="data:image/png;base64,{base64.b64encode(png).decode()}" />'
