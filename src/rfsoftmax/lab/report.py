"""`rfsoftmax report`: a page and pictures drawn from the result files alone."""

import json
from pathlib import Path

from .book import Book
from .charts import png
from .claims import Claim
from .claims_measured import MEASURED_CLAIMS
from .claims_trained import TRAINED_CLAIMS
from .claims_untested import UNTESTED_CLAIMS
from .pages import write_files
from .report_page import page
from .report_sections import sections
from .reproduce_options import ITEMS

PAGE = "report.html"


def claims() -> list[Claim]:
    """All claims, in the order of the items."""
    return sorted((*MEASURED_CLAIMS, *TRAINED_CLAIMS, *UNTESTED_CLAIMS), key=lambda claim: ITEMS.index(claim.item))


def write_report(book: Book, directory: Path) -> list[Path]:
    """`report.html`, which needs nothing beside it, and a PNG of each chart; their paths."""
    made = sections(book)
    judged = [(claim, claim.judge(book)) for claim in claims()]
    contents = {PAGE: page(book, made, judged, _circumstances(book)).encode()}
    contents |= {f"{chart.name}.png": png(chart) for section in made for chart in section.charts}
    return write_files(directory, contents)


def _circumstances(book: Book) -> list[str]:
    """The machines and commits of all results."""
    found: dict[str, set[str]] = {}
    for path in sorted(book.results.directory.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(result["machine"], set()).add(result["commit"])
    return [f"{machine}; commits {', '.join(sorted(commits))}" for machine, commits in found.items()] or [
        "no results yet"
    ]
