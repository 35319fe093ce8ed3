"""A chart as SVG inside a page: its colours follow the page's, and a box for each curve takes it away."""

import html
import math
from collections.abc import Callable

from .charts import Chart, Line, apart
from .numbers_text import number, score_text

_WIDTH, _HEIGHT = 500, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 174, 12, 44
_GAP = 17.0
_TICKS = 5

Scale = Callable[[float], float]


def svg(chart: Chart) -> str:
    """The chart and its boxes."""
    xs = [point.x for line in chart.lines for point in line.points]
    ys = [value for line in chart.lines for point in line.points for value in (point.low, point.high)]
    x = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, log=chart.log_x)
    y = _scale(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP, log=chart.log_y)
    heights = _heights(chart, y)
    curves = "".join(_curve(chart, place, line, x, y, heights[place]) for place, line in enumerate(chart.lines))
    title = html.escape(chart.title)
    return (
        f'<figure class="chart"><figcaption>{title}</figcaption>\n'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">\n'
        f"{_axes(chart, (min(xs), max(xs)), (min(ys), max(ys)), x, y)}{curves}</svg>\n"
        f"{_boxes(chart)}</figure>\n"
    )


def _scale(low: float, high: float, start: float, end: float, *, log: bool) -> Scale:
    """From values to pixels; a single value lies in the middle."""
    a, b = (math.log(low), math.log(high)) if log else (low, high)

    def place(value: float) -> float:
        share = 0.5 if a == b else ((math.log(value) if log else value) - a) / (b - a)
        return start + share * (end - start)

    return place


def _axes(chart: Chart, xs: tuple[float, float], ys: tuple[float, float], x: Scale, y: Scale) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for value in ticks(*ys, log=chart.log_y):
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at}" text-anchor="end" dy="4">{number(value)}</text>')
    whole = all(point.x == int(point.x) for line in chart.lines for point in line.points)
    for value in ticks(*xs, log=chart.log_x, whole=whole):
        at = f"{x(value):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{at}" y="{bottom + 16}" text-anchor="middle">{number(value)}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{chart.x_name}</text>')
    return "\n".join(parts)


def ticks(low: float, high: float, *, log: bool, whole: bool = False) -> list[float]:
    """Round values from low to high: 1, 2, 5 times powers of ten, a handful of them; whole numbers if so said."""
    if low == high:
        return [low]
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        kept = [value for power in powers for digit in (1, 2, 5) if low <= (value := digit * 10.0**power) <= high]
        if len(kept) > _TICKS + 2:
            kept = [value for value in kept if math.log10(value) % 1 in (0.0, 1.0)][:: max(1, len(powers) // _TICKS)]
        if len(kept) > 2:
            return kept
    step = 10.0 ** math.floor(math.log10((high - low) / _TICKS))
    if whole:
        step = max(step, 1.0)
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= _TICKS)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _curve(chart: Chart, place: int, line: Line, x: Scale, y: Scale, height: float) -> str:
    """The curve, the range over its seeds, its name at the right and a thin line that leads there."""
    path = " ".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in line.points)
    there = [f"{x(point.x):.1f},{y(point.low):.1f}" for point in line.points]
    back = [f"{x(point.x):.1f},{y(point.high):.1f}" for point in reversed(line.points)]
    band = f'<polygon class="band" points="{" ".join(there + back)}"/>' if _has_range(line) else ""
    dots = "".join(
        f'<circle cx="{x(point.x):.1f}" cy="{y(point.y):.1f}" r="3"><title>{html.escape(line.label)}: '
        f"{score_text(point.y)} at {number(point.x)}</title></circle>"
        for point in line.points
    )
    end, right = line.points[-1], _WIDTH - _RIGHT
    leader = f'<polyline class="leader" points="{x(end.x):.1f},{y(end.y):.1f} {right + 6},{height:.1f}"/>'
    name = f'<text class="name" x="{right + 8}" y="{height:.1f}" dy="4">{html.escape(line.end)}</text>'
    kind = f"c{line.colour}{' bold' if line.bold else ''}"
    return (
        f'<g class="curve {kind}" data-curve="{chart.name}-{place}">'
        f'{band}{leader}<polyline class="line" points="{path}"/>{dots}{name}</g>\n'
    )


def _heights(chart: Chart, y: Scale) -> list[float]:
    """Where the names stand: at the ends of their curves, as far as the others and the picture leave room."""
    above = apart([-y(line.points[-1].y) for line in chart.lines], _GAP)
    over = max(0.0, max(above) + _TOP)
    return [over - height for height in above]


def _boxes(chart: Chart) -> str:
    boxes = [
        f'<label class="c{line.colour}"><input type="checkbox" checked data-for="{chart.name}-{place}"/> '
        f"{html.escape(line.label)}</label>"
        for place, line in enumerate(chart.lines)
    ]
    return f'<fieldset class="boxes"><legend>Curves shown</legend>{" ".join(boxes)}</fieldset>\n'


def _has_range(line: Line) -> bool:
    return any(point.high > point.low for point in line.points)
