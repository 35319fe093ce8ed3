"""What all pages are made with."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_files(directory: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write the files, each in one step, and say where they are."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        beside = directory / f"{name}.partial"
        beside.write_bytes(content)
        beside.replace(directory / name)
    return [directory / name for name in contents]


def cells(tag: str, texts: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str] | None = None) -> str:
    """A table that scrolls by itself where it is wider than the page; `kinds` are the classes of the rows."""
    kinds = [""] * len(rows) if kinds is None else kinds
    lines = [f'<tr class="{kind}">{cells("td", row)}</tr>' for row, kind in zip(rows, kinds, strict=True)]
    body = "\n".join(lines)
    inside = f"<table>\n<tr>{cells('th', header)}</tr>\n{body}\n</table>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="table">{inside}</div>\n'
