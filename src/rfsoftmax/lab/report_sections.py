"""The sections of the report: what the paper did, how ours differs, the tables and the charts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from . import paper_numbers
from .book import Book, CurvePoint
from .charts import Chart, ChartPoint, Line
from .claims import shown
from .claims_measured import errors, taus, times
from .experiments import ENWIKI, PTB
from .numbers_text import number, score_text
from .pages import table
from .report_texts import ABOUT
from .report_theory import theory

MISSING = "not run yet"
_FIXED = {"full": 0, "default": 1, "EXP": 3, "Quadratic": 4, "Uniform": 5, "Unigram": 6, "MIDX": 7}
_RFFS = (2, 7)


@final
@dataclass(frozen=True)
class Section:
    """`paper` and `ours` are sentences, `tables` HTML."""

    item: str
    title: str
    paper: str
    ours: str
    tables: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()


def sections(book: Book) -> list[Section]:
    return [make(book) for make in _SECTIONS.values()]


def colours(labels: Sequence[str]) -> list[int]:
    """A method has the same colour in every chart; labels that name a size take those that are left in turn."""
    rff = iter(_RFFS)
    known = [_FIXED.get(label, next(rff, 2) if label.startswith("Rff") else None) for label in labels]
    free = iter([colour for colour in range(8) if colour not in known] * 8)
    return [next(free) if colour is None else colour for colour in known]


def chart(name: str, title: str, x_name: str, curves: dict[str, list[CurvePoint]], **kinds: Any) -> Chart:
    some = {label: points for label, points in curves.items() if points}
    lines = [
        Line(
            label,
            tuple(ChartPoint(p.x, p.score.mean, p.score.low, p.score.high) for p in points),
            colour,
            label == "default",
        )
        for (label, points), colour in zip(some.items(), colours(list(some)), strict=True)
    ]
    return Chart(name, title, x_name, tuple(lines), **kinds)


def _perplexities(book: Book, item: str, dataset: str) -> str:
    """A row for each label of the plan: perplexity at the end, seeds, milliseconds a step, the sampler's share."""
    rows = []
    for (where, label), runs in book.runs(item).items():
        if where != dataset:
            continue
        score = book.score(item, dataset, label, "perplexity")
        if score is None:
            rows.append((label, MISSING, "", "", ""))
            continue
        share = sum(run["sampler_share"] for run in runs) / len(runs)
        rows.append(
            (
                label,
                score_text(score.mean),
                _range(score.low, score.high, score.num_seeds),
                number(_step_time(runs)),
                f"{100 * share:.0f}%",
            )
        )
    header = ("run", "validation perplexity", "seeds", "ms a step, about", "in the sampler")
    return table(header, rows, ["ours" if row[0] == "default" else "" for row in rows])


def _step_time(runs: list[dict[str, Any]]) -> float:
    """Milliseconds, the mean over the runs."""
    return sum(1000 * run["seconds"] / run["steps"] for run in runs) / len(runs)


def _by_plain_softmax(book: Book, item: str, dataset: str) -> tuple[str, ...]:
    """What Quadratic's perplexity would be by the loss of the others."""
    loss = book.score(item, dataset, "Quadratic", "softmax_loss")
    if loss is None:
        return ()
    plain = number(math.exp(loss.mean))
    return (f"Quadratic's perplexity is by its absolute softmax; by the plain softmax of its scores it is {plain}.",)


def _range(low: float, high: float, num: int) -> str:
    return "1" if num == 1 else f"{num}: {score_text(low)} to {score_text(high)}"


def _by_epoch(book: Book, item: str, title: str) -> Section:
    charts = [chart(item, title, "epoch", book.curves(item, PTB, "perplexity"))]
    notes = _by_plain_softmax(book, item, PTB)
    tables = (_perplexities(book, item, PTB),)
    return Section(item, *ABOUT[item], tables=tables, charts=tuple(c for c in charts if c.lines), notes=notes)


def _figure4(book: Book) -> Section:
    curves = book.curves("figure4", ENWIKI, "perplexity", "step")
    by_step = chart("figure4", "Perplexity by step", "training steps", curves)
    tables = (_perplexities(book, "figure4", ENWIKI),)
    notes = _by_plain_softmax(book, "figure4", ENWIKI)
    return Section("figure4", *ABOUT["figure4"], tables=tables, charts=(by_step,) if by_step.lines else (), notes=notes)


def _table1(book: Book) -> Section:
    all_taus = taus(book)
    if not all_taus:
        return Section("table1", *ABOUT["table1"], tables=(_missing(),))
    found = {tau: errors(book, tau) for tau in all_taus}
    rows = [
        (
            name,
            f"{size:,}",
            _paper(paper_numbers.TABLE1.get((name, size))),
            *(f"{found[tau][name, size]:.2g}" for tau in all_taus),
        )
        for name, size in found[all_taus[0]]
    ]
    header = ("features", "D", "paper", *(f"tau = {number(tau)}" for tau in all_taus))
    off = {tau: _distance(found[tau]) for tau in all_taus}
    nearest = min(off, key=off.__getitem__)
    note = (
        f"The paper does not give its tau. Of those tried, its five numbers are nearest to ours at "
        f"tau = {number(nearest)}, where they differ by a factor of {number(off[nearest])} in the geometric mean."
    )
    return Section("table1", *ABOUT["table1"], tables=(table(header, rows),), notes=(note,))


def _distance(found: dict[tuple[str, int], float]) -> float:
    """The geometric mean of the factors between the paper's numbers and these."""
    logs = [abs(math.log(found[key] / value)) for key, value in paper_numbers.TABLE1.items() if key in found]
    return math.exp(sum(logs) / len(logs)) if logs else math.inf


def _paper(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _table2(book: Book) -> Section:
    found = times(book)
    if not found:
        return Section("table2", *ABOUT["table2"], tables=(_missing(),))
    rows = []
    for n in sorted({n for n, _ in found}):
        for name in ("exp", "quadratic", *(name for m, name in found if m == n and name.startswith("rff"))):
            paper = paper_numbers.TABLE2.get((n, name))
            exp = paper_numbers.TABLE2.get((n, "exp"))
            faster = "" if paper is None or exp is None else f"{number(exp / paper)}x"
            ours = found[n, name]
            label = {"exp": "EXP", "quadratic": "Quadratic"}.get(name, name.replace("rff D=", "Rff, D = "))
            cells = (_paper(paper), faster, number(ours), f"{number(found[n, 'exp'] / ours)}x")
            rows.append((f"{n:,}", label, *cells))
    header = ("n", "method", "paper, ms", "times EXP's speed", "ours, ms", "times EXP's speed")
    return Section("table2", *ABOUT["table2"], tables=(table(header, rows),), notes=_in_training(book))


def _in_training(book: Book) -> tuple[str, ...]:
    """What the paper's own tree, updated all along, takes in a training step."""
    texts = []
    for item, name in (("figure3", "n = 10,000"), ("figure4", "n = 64,000")):
        found = {label: _step_time(runs) for (_, label), runs in book.runs(item).items() if runs}
        trees = ", ".join(f"{label} {number(time)} ms" for label, time in found.items() if label.startswith("Rff"))
        if trees and "EXP" in found:
            texts.append(f"{name}: {trees}, EXP {number(found['EXP'])} ms")
    if not texts:
        return ()
    return (
        "The paper's own tree, a class a leaf and updated at each step, was not timed here but trained with. A whole "
        f"training step with m = 100, roughly, {'; '.join(texts)}.",
    )


def _table3(book: Book) -> Section:
    tables = []
    for dataset in book.sets:
        rows = [_precisions(book, dataset, label) for where, label in book.runs("table3") if where == dataset]
        header = (f"{dataset}: method", "P@1", "P@3", "P@5", "softmax loss", "seeds", "seconds, about")
        tables.append(table(header, rows, ["ours" if row[0] == "default" else "" for row in rows]))
    paper = [(name, method, *map(str, values)) for (name, method), values in paper_numbers.TABLE3.items()]
    tables.append(table(("paper: data set", "method", "P@1", "P@3", "P@5"), paper))
    curves = book.curves("table3", book.sets[0], "precision@1")
    drawn = chart("table3", f"Precision@1 on {book.sets[0]}", "epoch", curves, log_y=False)
    own = book.score("table3", book.sets[0], "Quadratic", "loss")
    note = "Quadratic was trained with the absolute softmax, by which its loss is "
    notes = () if own is None else (f"{note}{own.mean:.3f}.",)
    charts = (drawn,) if drawn.lines else ()
    return Section("table3", *ABOUT["table3"], tables=tuple(tables), charts=charts, notes=notes)


def _precisions(book: Book, dataset: str, label: str) -> tuple[str, ...]:
    scores = [book.score("table3", dataset, label, f"precision@{k}") for k in (1, 3, 5)]
    loss = book.score("table3", dataset, label, "softmax_loss")
    if loss is None:
        return (label, MISSING, "", "", "", "", "")
    runs = book.runs("table3")[dataset, label]
    seconds = sum(run["seconds"] for run in runs) / len(runs)
    values = ["" if score is None else f"{score.mean:.3f}" for score in scores]
    first = scores[0]
    seeds = "" if first is None else f"{first.num_seeds}"
    if first is not None and first.num_seeds > 1:
        seeds += f": P@1 {first.low:.3f} to {first.high:.3f}"
    return (label, *values, f"{loss.mean:.3f}", seeds, number(seconds))


def _normalization(book: Book) -> Section:
    rows = []
    for label in ("normalised", "not normalised"):
        text = book.score("normalization", PTB, label, "perplexity")
        rows.append(("Penn Treebank, perplexity", label, str(paper_numbers.NORMALIZATION[label][0]), _shown(text)))
        for dataset in book.sets:
            score = book.score("normalization", dataset, label, "precision@1")
            paper = f"{paper_numbers.NORMALIZATION[label][1]} (AmazonCat-13k)"
            rows.append((f"{dataset}, precision@1", label, paper, _shown(score)))
    rows.sort(key=lambda row: row[0])
    drawn = chart(
        "normalization", "Perplexity on Penn Treebank", "epoch", book.curves("normalization", PTB, "perplexity")
    )
    header = ("measure", "embeddings", "paper", "ours")
    return Section(
        "normalization", *ABOUT["normalization"], tables=(table(header, rows),), charts=(drawn,) if drawn.lines else ()
    )


def _shown(score: Any) -> str:
    return MISSING if score is None else shown(score)


def _missing() -> str:
    return f'<p class="missing">{MISSING}</p>\n'


def _theory(book: Book) -> Section:
    tables, charts = theory(book)
    return Section("theory", *ABOUT["theory"], tables=tables or (_missing(),), charts=charts)


_SECTIONS: dict[str, Callable[[Book], Section]] = {
    "table1": _table1,
    "table2": _table2,
    "figure1": lambda book: _by_epoch(book, "figure1", "Perplexity by epoch, T = 1/sqrt(nu) varied"),
    "figure2": lambda book: _by_epoch(book, "figure2", "Perplexity by epoch, D varied"),
    "figure3": lambda book: _by_epoch(book, "figure3", "Perplexity by epoch"),
    "figure4": _figure4,
    "table3": _table3,
    "normalization": _normalization,
    "theory": _theory,
}
