"""The report's tables and charts of the theorems."""

from typing import Any

from .book import Book
from .charts import Chart, ChartPoint, Line
from .claims_measured import measurable
from .experiments import PTB, TIBKAT
from .numbers_text import number
from .pages import table

_COLOURS = {"Uniform": 5, "Unigram": 6, "Quadratic": 4, "Rff, D = 1024": 2, "MIDX": 7, "default": 1, "EXP": 3}


def theory(book: Book) -> tuple[tuple[str, ...], tuple[Chart, ...]]:
    """Tables and charts of what there is."""
    tables, charts = [], []
    for dataset in (PTB, TIBKAT):
        if rows := book.rows(f"theorem1-{dataset}"):
            tables.append(_bounds(dataset, rows))
            charts.append(_bias_by_m(dataset, rows))
    if rows := book.rows(f"theorem2-{PTB}"):
        tables.append(_ratios(rows))
        charts.append(_chi2(rows))
    if rows := book.rows(f"corollary1-{PTB}"):
        tables.append(_biases(rows))
    return tuple(tables), tuple(chart for chart in charts if chart.lines)


def _bounds(dataset: str, rows: list[dict[str, Any]]) -> str:
    header = (
        f"Theorem 1, {dataset}: sampler",
        "m",
        "chi2",
        "relative bias",
        "its noise, taken off",
        "largest coordinate, noise left in",
        "noise of that",
        "LB printed",
        "UB printed",
        "bound that always holds",
        "below LB",
        "above UB",
        "outside the last",
    )
    shares = ("below_lower_printed", "above_upper_printed", "outside_always")
    columns = [
        *("chi2", "relative_bias", "noise", "bias_largest", "noise_largest"),
        *("lower_printed", "upper_printed", "bound_always"),
    ]
    cells = [
        (
            row["sampler"],
            str(row["num_negatives"]),
            *(number(row[c]) for c in columns),
            *(f"{100 * row[c]:.2g}%" for c in shares),
        )
        for row in rows
    ]
    return table(header, cells)


def _bias_by_m(dataset: str, rows: list[dict[str, Any]]) -> Chart:
    """Biases that the draws cannot tell from none have no place on a logarithmic axis and are left out."""
    lines = []
    for label in dict.fromkeys(row["sampler"] for row in rows):
        some = [(row["num_negatives"], measurable(row)) for row in rows if row["sampler"] == label]
        points = tuple(ChartPoint(m, value, value, value) for m, value in some if value > 0)
        if points:
            lines.append(Line(label, points, _COLOURS.get(label, 0), label == "default"))
    title = f"Relative bias of the gradient on {dataset}"
    return Chart(f"theory-bias-{dataset}", title, "negatives m", tuple(lines), log_x=True)


def _ratios(rows: list[dict[str, Any]]) -> str:
    header = (
        "Theorem 2: nu",
        "D",
        "median error of the features",
        "99%",
        "largest",
        "negative estimates",
        "chi2 of q",
        "gamma/rho the theorem needs",
    )
    columns = ("error_median", "error_99", "error_largest")
    cells = [
        (
            number(row["nu"]),
            "without end" if row["num_features"] is None else f"{row['num_features']:,}",
            *(number(row[c]) for c in columns),
            f"{100 * row['negative_share']:.2g}%",
            number(row["chi2"]),
            "" if row["condition"] is None else number(row["condition"]),
        )
        for row in rows
    ]
    return table(header, cells)


def _chi2(rows: list[dict[str, Any]]) -> Chart:
    lines = []
    for colour, nu in zip((3, 1, 2, 4), dict.fromkeys(row["nu"] for row in rows), strict=False):
        some = [(row["num_features"], row["chi2"]) for row in rows if row["nu"] == nu and row["num_features"]]
        points = tuple(ChartPoint(num, value, value, value) for num, value in some if value > 0)
        if points:
            lines.append(Line(f"nu = {number(nu)}", points, colour))
    return Chart("theory-chi2", "chi2 of q, random Fourier features", "frequencies D", tuple(lines), log_x=True)


def _biases(rows: list[dict[str, Any]]) -> str:
    header = ("Corollary 1: tau", "nu", "D", "relative bias, m = 100", "its noise, taken off")
    cells = [
        (
            number(row["tau"]),
            number(row["nu"]),
            "EXP" if row["num_features"] is None else f"{row['num_features']:,}",
            number(row["relative_bias"]),
            number(row["noise"]),
        )
        for row in rows
    ]
    return table(header, cells)
