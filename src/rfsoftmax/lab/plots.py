"""Pictures of a run: its losses by step and its validation scores by seconds of training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Records = Sequence[dict[str, Any]]


def draw(directory: Path, records: Records, title: str) -> None:
    """`loss.png` and one picture for each validation score."""
    directory.mkdir(parents=True, exist_ok=True)
    train = [record for record in records if record["kind"] == "train"]
    valid = [record for record in records if record["kind"] == "valid"]
    curves = {"training (sampled)": _points(train, "step", "loss")}
    if valid and "loss" in valid[0]:
        curves["validation (exact)"] = _points(valid, "step", "loss")
    _picture(directory / "loss.png", title, "step", "loss", curves)
    # Precision at 1, 3 and 5 share a picture.
    scores = [name for name in (valid[0] if valid else {}) if "@" in name or name == "perplexity"]
    for family in sorted({name.split("@")[0] for name in scores}):
        curves = {name: _points(valid, "seconds", name) for name in scores if name.split("@")[0] == family}
        _picture(directory / f"{family}.png", title, "seconds of training", family, curves)


def _points(records: Records, x: str, y: str) -> list[tuple[float, float]]:
    return [(record[x], record[y]) for record in records if record.get(y) is not None]


def _picture(path: Path, title: str, x: str, y: str, curves: dict[str, list[tuple[float, float]]]) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in curves.items():
        x_values, y_values = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x_values, y_values, label=name, marker="o" if len(points) < 30 else None, markersize=3)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    figure.savefig(path, dpi=120)
