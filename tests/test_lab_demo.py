"""The demo end to end on a tiny text, and what it says of made-up results."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rfsoftmax.lab.cli import main
from rfsoftmax.lab.demo import _spread
from rfsoftmax.lab.demo_config import DemoConfig
from rfsoftmax.lab.demo_report import Point, Result, plain_table, rows, verdict, write_report
from rfsoftmax.lab.options import demo_settings, make_parser

PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """The tags of a page, closed as they should be, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def made_up(**perplexities: float) -> list[Result]:
    """Results of 10 seconds; a step of the full softmax takes 100 ms, any other 20 ms."""
    steps = {"full": 100}
    return [
        Result(
            method,
            (Point(0.0, 0, 5e4), Point(5.0, 10, 2 * value), Point(10.0, steps.get(method, 500), value)),
            None if method == "full" else 3.5,
        )
        for method, value in perplexities.items()
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    words = (rng.zipf(1.3, 6000) - 1) % 300
    lines = [" ".join(f"w{word}" for word in words[start : start + 10]) for start in range(0, len(words), 10)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_demo_prints_a_table_and_a_sentence_and_writes_a_page_with_its_pictures(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    sizes = ["--seconds", "0.4", "--dim", "8", "--num-negatives", "5", "--batch-size", "4", "--eval-limit", "200"]
    where = ["--data", str(text), "--cache", str(tmp_path / "cache"), "--output", str(output)]
    assert main(["demo", *sizes, *where]) == 0
    printed = capsys.readouterr().out
    for method in ("full", "uniform", "rff", "default"):
        line = re.search(rf"^{method} +([\d,.]+) +([\d,]+) +([\d,.]+) +([\d.]+)x +(\S+)$", printed, re.MULTILINE)
        assert line is not None, printed
        assert (line[5] == "-") == (method == "full")
        assert 1 < float(line[1].replace(",", "")) < 5000
    assert len(set(re.findall(r" 0\.0 s  step +0  (perplexity .*)", printed))) == 1  # all start from the same model
    sentence = re.search(r"^After 0\.\d+ seconds of training each, .*\.$", printed, re.MULTILINE)
    assert sentence is not None
    page = Page((output / "report.html").read_text())
    assert sentence[0] in page.text
    assert f"--data {text}" in page.text
    assert sorted(path.name for path in output.iterdir()) == ["perplexity.png", "report.html", "steps.png"]
    assert all((output / name).read_bytes().startswith(PNG) for name in ("perplexity.png", "steps.png"))


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    results = made_up(full=300.0, default=100.0)
    write_report(tmp_path, results, "rfsoftmax demo --data 'a<b'", "what & where")
    page = Page((tmp_path / "report.html").read_text())
    assert "rfsoftmax demo --data 'a<b'" in page.text
    assert "what & where" in page.text
    images = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    contents = [base64.b64decode(image.removeprefix("data:image/png;base64,"), validate=True) for image in images]
    assert contents == [(tmp_path / name).read_bytes() for name in ("perplexity.png", "steps.png")]
    assert not {tag for tag, _ in page.tags} & {"link", "script", "iframe"}
    assert "http" not in (tmp_path / "report.html").read_text()
    assert any(attributes.get("name") == "viewport" for _, attributes in page.tags)


def test_the_sentence_names_the_default_when_it_wins() -> None:
    said = verdict(made_up(full=300.0, uniform=250.0, default=100.0))
    assert "default has the lowest validation perplexity, 100; next is uniform with 250" in said
    assert "a step with default is 5 times as fast as one with full softmax" in said


@pytest.mark.parametrize("winner", ["full", "uniform", "rff"])
def test_the_sentence_says_so_when_the_default_does_not_win(winner: str) -> None:
    results = made_up(**{"full": 300.0, "uniform": 250.0, "rff": 400.0, "default": 100.0, winner: 50.0})
    said = verdict(results)
    assert "default does not win" in said
    assert "has the lowest validation perplexity, 50 against 100" in said


def test_the_sentence_calls_near_perplexities_level() -> None:
    assert "default and uniform are level" in verdict(made_up(full=300.0, uniform=101.0, default=100.0))
    assert "default and uniform are level" in verdict(made_up(full=300.0, uniform=100.0, default=101.0))


def test_the_sentence_says_so_when_a_step_of_the_default_is_slower() -> None:
    full, ours = made_up(full=300.0, default=100.0)
    slow = replace(ours, curve=(Point(10.0, 50, 100.0),))
    assert "a step with default is 2 times slower than one with full softmax" in verdict([full, slow])


def test_the_sentence_stands_without_the_default_or_the_full_softmax() -> None:
    assert "uniform has the lowest validation perplexity, 80; next is rff" in verdict(made_up(rff=90.0, uniform=80.0))
    assert (
        verdict(made_up(uniform=80.0)) == "After 10 seconds of training each, uniform is at validation perplexity 80."
    )
    diverged = verdict(made_up(rff=float("nan"), default=80.0))
    assert "default has the lowest" in diverged


def test_the_table_gives_speed_relative_to_the_full_softmax() -> None:
    results = made_up(full=300.0, default=1234.5)
    assert rows(results)[1:] == [
        ("full", "300", "100", "100", "1x", "-"),
        ("default", "1,234", "500", "20", "5x", "3.5"),
    ]
    assert len({len(line) for line in plain_table(results).splitlines()}) == 1
    assert rows(made_up(default=100.0))[1][4] == "-"


def test_pictures_leave_out_what_is_not_finite(tmp_path: Path) -> None:
    paths = write_report(tmp_path, made_up(full=float("inf"), moment=90.0, default=float("nan")), "", "")
    assert all(path.stat().st_size > 1000 for path in paths)


def test_held_out_pieces_are_spread_over_all_of_the_text() -> None:
    ids = np.arange(1000, dtype=np.int32)
    assert _spread(ids, 4, 12).tolist() == [0, 1, 2, 332, 333, 334, 664, 665, 666, 997, 998, 999]
    assert _spread(ids, 4, 0) is ids
    assert _spread(ids, 4, 2000) is ids


def test_the_command_of_the_report_gives_the_same_settings_again() -> None:
    config = DemoConfig(seconds=3.0, methods=("full", "moment"), output="a b", lr=1e-2)
    words = ["demo", "--seconds", "3.0", "--methods", "full", "moment", "--output", "a b", "--lr", "0.01"]
    assert config.command() == "rfsoftmax demo --seconds 3.0 --methods full moment --output 'a b' --lr 0.01"
    assert demo_settings(make_parser().parse_args(words)) == config
    assert demo_settings(make_parser().parse_args(["demo"])) == DemoConfig()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "seconds: expected a positive number, got 0.0"),
        (["--methods", "full", "none"], "methods: expected some of"),
        (["--methods", "full", "full"], "methods: expected some of"),
    ],
)
def test_wrong_settings_are_said_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 1
    assert message in capsys.readouterr().err
