"""Charts of curves with their names at their ends, as PNG by matplotlib and as SVG for a page."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .numbers_text import number, score_text

# Dark on white; the page has a second set for dark screens.
COLOURS = ("#1a1a1a", "#0063a8", "#b34700", "#00734f", "#8b3a9c", "#6b6b6b", "#7a5c00", "#a3175b")


class ChartPoint(NamedTuple):
    """A point of a curve, and the range over the seeds around it."""

    x: float
    y: float
    low: float
    high: float


@final
@dataclass(frozen=True)
class Line:
    label: str
    points: tuple[ChartPoint, ...]
    colour: int  # of COLOURS
    bold: bool = False

    @property
    def end(self) -> str:
        """What stands at its end: the name and the last value."""
        return f"{self.label}: {score_text(self.points[-1].y)}"


@final
@dataclass(frozen=True)
class Chart:
    """`name` is that of its PNG; an axis is logarithmic if so said."""

    name: str
    title: str
    x_name: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = True


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, in their order, moved up where one is less than `gap` above the one below it."""
    moved = list(heights)
    below = -math.inf
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        moved[index] = below = max(heights[index], below + gap)
    return moved


def png(chart: Chart) -> bytes:
    """The chart as a PNG."""
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for line in chart.lines:
        width, order = (3.2, 4) if line.bold else (2.0, 3)
        xs, ys, lows, highs = zip(*line.points, strict=True)
        colour = COLOURS[line.colour]
        axes.plot(xs, ys, color=colour, linewidth=width, marker="o", markersize=width + 2, zorder=order)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if chart.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.set_title(chart.title, loc="left", fontsize=13)
    axes.set_xlabel(chart.x_name, fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _name_ends(axes, chart)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    return out.getvalue()


def _name_ends(axes: "object", chart: Chart) -> None:
    """Names at the ends of the curves, moved up from them where two would overlap."""
    scale = math.log if chart.log_y else float
    low, high = map(scale, axes.get_ylim())  # type: ignore[attr-defined]
    ends = [line.points[-1] for line in chart.lines]
    heights = apart([scale(end.y) for end in ends], 0.06 * (high - low))
    for line, end, height in zip(chart.lines, ends, heights, strict=True):
        shift = (height - scale(end.y)) / (high - low) * 72 * 3.8
        axes.annotate(  # type: ignore[attr-defined]
            line.end,
            (end.x, end.y),
            (9, shift),
            textcoords="offset points",
            va="center",
            color=COLOURS[line.colour],
            fontsize=12,
            fontweight="bold" if line.bold else "normal",
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            zorder=5,
        )
