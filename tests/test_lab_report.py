"""The report: verdicts follow from results by their rules, nothing is guessed, and the page works in a browser."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_up_results import write_all, write_measurements, write_training, write_trainings
from rfsoftmax.lab import cli
from rfsoftmax.lab.book import Book
from rfsoftmax.lab.charts import apart
from rfsoftmax.lab.charts_svg import ticks
from rfsoftmax.lab.claims import FAILS, HOLDS, OURS, UNTESTED, WEAKER
from rfsoftmax.lab.claims_untested import UNTESTED_CLAIMS
from rfsoftmax.lab.experiments import plan
from rfsoftmax.lab.numbers_text import number, score_text
from rfsoftmax.lab.report import claims, write_report
from rfsoftmax.lab.results import Results
from rfsoftmax.samplers import DEFAULT_TAU
from test_lab_demo import Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# A browser that asks nobody anything.
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def verdicts(results: Results) -> dict[str, tuple[str, str]]:
    book = Book(results)
    return {claim.sentence: tuple(claim.judge(book)) for claim in claims()}  # type: ignore[misc]


def test_without_results_nothing_is_tested_and_the_page_says_so(tmp_path: Path) -> None:
    results = Results(tmp_path / "none")
    assert {kind for kind, _ in verdicts(results).values()} == {UNTESTED}
    paths = write_report(Book(results), tmp_path / "report")
    assert [path.name for path in paths] == ["report.html"]
    text = Page(paths[0].read_text()).text
    assert text.count("not run yet") > 50
    of_paper = [claim for claim in claims() if claim.paper != OURS]
    assert f"0 hold, 0 hold weaker, 0 do not hold here, {len(of_paper)} are not tested" in text
    assert len(of_paper) == len(claims()) - 1


def test_where_all_is_as_in_the_paper_all_claims_hold(tmp_path: Path) -> None:
    found = verdicts(write_all(tmp_path))
    others = {sentence: kind for sentence, (kind, _) in found.items() if kind != HOLDS}
    assert others == {claim.sentence: UNTESTED for claim in UNTESTED_CLAIMS}


@pytest.mark.parametrize(
    ("item", "label", "value", "sentence", "expected"),
    [
        ("figure1", "T = 0.8", 140.0, "T = 0.5 gives the lowest", FAILS),
        ("figure1", "T = 0.4", 140.0, "T = 0.5 gives the lowest", WEAKER),
        ("figure1", "T = 0.4", 149.95, "T = 0.5 gives the lowest", HOLDS),
        ("figure1", "T = 0.3", 140.0, "beats nu = tau", FAILS),
        ("figure2", "D = 2048", 300.0, "comes closer to the full softmax", FAILS),
        ("figure2", "D = 512", 185.0, "comes closer to the full softmax", WEAKER),
        ("figure3", "EXP", 124.0, "does as well as the full softmax", WEAKER),
        ("figure3", "EXP", 140.0, "does as well as the full softmax", FAILS),
        ("figure3", "Rff, D = 1024", 125.0, "performs at par with EXP", WEAKER),
        ("figure3", "Rff, D = 1024", 130.0, "performs at par with EXP", FAILS),
        ("figure3", "Rff, D = 1024", 150.0, "D = 1024 beats Quadratic", FAILS),
        ("figure3", "Rff, D = 1024", 139.9, "D = 1024 beats Quadratic", WEAKER),
        ("figure3", "Uniform", 100.0, "RF-softmax beats Uniform", FAILS),
        ("figure4", "Rff, D = 8192", 1000.0, "D = 8192 beats Quadratic", FAILS),
        ("figure4", "Rff, D = 2048", 930.0, "D = 2048 is at par", WEAKER),
        ("figure4", "Rff, D = 2048", 980.0, "D = 2048 is at par", FAILS),
        ("table3", "full", 0.512, "accurate proxy", WEAKER),
        ("table3", "full", 0.6, "accurate proxy", FAILS),
        ("table3", "Rff, D = 1024", 0.3, "better than Uniform in precision", FAILS),
        ("table3", "Quadratic", 0.55, "or comparable", FAILS),
        ("table3", "EXP", 0.51, "comes close to EXP", WEAKER),
        ("table3", "Quadratic", 0.6, "smaller full softmax loss", FAILS),
        ("table3", "Quadratic", 0.494, "smaller full softmax loss", WEAKER),
        ("normalization", "not normalised", 110.0, "lower perplexity than plain ones", FAILS),
        ("normalization", "not normalised", 120.3, "lower perplexity than plain ones", WEAKER),
    ],
)
def test_other_results_give_other_verdicts(
    item: str, label: str, value: float, sentence: str, expected: str, tmp_path: Path
) -> None:
    results = Results(tmp_path)
    write_trainings(results)
    for run in plan(item):
        if run.label == label and not (run.config.task == "xc" and item == "normalization"):
            write_training(results, run, value)
    (found,) = [kind for said, (kind, _) in verdicts(results).items() if sentence in said]
    assert found == expected


def change_rows(results: Results, name: str, where: dict[str, Any], change: dict[str, Any]) -> None:
    """Other values in the rows that have those of `where`."""
    known = results.read(name)
    assert known is not None
    rows = [{**row, **(change if where.items() <= row.items() else {})} for row in known["rows"]]
    results.write(name, {**known, "rows": rows})


@pytest.mark.parametrize(
    ("name", "where", "change", "sentence", "expected"),
    [
        ("table1", {"num_features": 1000}, {"mse": 1.0}, "1,000 random Fourier", FAILS),
        ("table1", {"num_features": 1000, "tau": DEFAULT_TAU}, {"mse": 1.0}, "1,000 random Fourier", WEAKER),
        ("table1", {"num_features": 1000, "tau": 1.0}, {"mse": 1.0}, "1,000 random Fourier", WEAKER),
        ("table1", {"method": "SORF", "tau": 1.0}, {"mse": 1.0}, "an even lower error", WEAKER),
        ("table2", {"num_classes": 500_000}, {"milliseconds": 99.0}, "13.5 times as fast", FAILS),
        ("table2", {"method": "rff D=1000"}, {"milliseconds": 9.0}, "13.5 times as fast", WEAKER),
        ("table2", {"method": "rff D=1000", "num_classes": 500_000}, {"milliseconds": 9.0}, "hardly grows", WEAKER),
        ("theorem1-ptb", {}, {"above_upper_printed": 0.2}, "between LB and UB", FAILS),
        ("theorem1-ptb", {"sampler": "EXP"}, {"below_lower_printed": 0.2}, "between LB and UB", WEAKER),
        ("theorem1-ptb", {"sampler": "EXP"}, {"outside_always": 0.2}, "the corrected bound", WEAKER),
        ("theorem1-ptb", {"sampler": "EXP"}, {"relative_bias": 9.0}, "has the least bias", WEAKER),
        ("theorem1-ptb", {"sampler": "EXP"}, {"relative_bias": 9.0, "noise": 20.0}, "has the least bias", HOLDS),
        ("theorem1-ptb", {"num_negatives": 1000}, {"relative_bias": 9.0}, "falls as m grows", WEAKER),
        ("theorem2-ptb", {}, {"error_median": 1.0}, "as D grows, the ratio", FAILS),
        ("theorem2-ptb", {"nu": DEFAULT_TAU}, {"error_largest": 7.0}, "near the softmax for every class", WEAKER),
        ("theorem2-ptb", {}, {"error_largest": 7.0}, "near the softmax for every class", FAILS),
        ("theorem2-ptb", {"nu": DEFAULT_TAU}, {"chi2": 99.0}, "the further nu is below tau", WEAKER),
        ("theorem2-ptb", {"nu": DEFAULT_TAU}, {"chi2": 0.0}, "nu should be smaller than tau", FAILS),
        ("corollary1-ptb", {"tau": DEFAULT_TAU}, {"relative_bias": 1.0}, "goes to 0 as D grows", WEAKER),
        ("corollary1-ptb", {}, {"relative_bias": 1.0}, "goes to 0 as D grows", FAILS),
        ("corollary1-ptb", {}, {"relative_bias": 1.0, "noise": 2.5}, "goes to 0 as D grows", HOLDS),
    ],
)
def test_other_measurements_give_other_verdicts(
    name: str, where: dict[str, Any], change: dict[str, Any], sentence: str, expected: str, tmp_path: Path
) -> None:
    results = Results(tmp_path)
    write_measurements(results)
    change_rows(results, name, where, change)
    (found,) = [kind for said, (kind, _) in verdicts(results).items() if sentence in said]
    assert found == expected


def test_precision_that_normalising_hurts_is_told_from_one_that_it_helps(tmp_path: Path) -> None:
    for plain, expected in ((0.45, HOLDS), (0.515, WEAKER), (0.55, FAILS)):
        results = Results(tmp_path / str(plain))
        write_trainings(results)
        for run in plan("normalization"):
            if run.label == "not normalised" and run.config.task == "xc":
                write_training(results, run, plain)
        (found,) = [kind for said, (kind, _) in verdicts(results).items() if "does not hurt precision" in said]
        assert found == expected


def test_every_claim_names_its_rule_and_gives_a_number_once_it_is_run(tmp_path: Path) -> None:
    found = verdicts(write_all(tmp_path))
    assert len({claim.sentence for claim in claims()}) == len(claims())
    for claim in claims():
        assert claim.rule
        assert claim.paper
        assert claim in UNTESTED_CLAIMS or re.search(r"\d", found[claim.sentence][1])


def test_the_page_is_whole_and_needs_nothing_beside_it(tmp_path: Path) -> None:
    paths = write_report(Book(write_all(tmp_path / "results")), tmp_path / "report")
    source = paths[0].read_text()
    page = Page(source)
    assert "not run yet" not in page.text
    addresses = [value for _, values in page.tags for name, value in values.items() if name in ("href", "src")]
    assert all(str(value).startswith("#") for value in addresses)
    assert "http" not in source
    ids = {values["id"] for _, values in page.tags if "id" in values}
    assert {str(value)[1:] for value in addresses} <= ids
    pictures = [path for path in paths if path.suffix == ".png"]
    assert len(pictures) == len([tag for tag, _ in page.tags if tag == "svg"]) >= 9
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_a_run_that_is_missing_is_named_in_its_table_and_its_claims_are_not_tested(tmp_path: Path) -> None:
    results = write_all(tmp_path / "results")
    run = next(run for run in plan("figure3") if run.label == "Quadratic")
    results.path(run.name).unlink()
    text = Page(write_report(Book(results), tmp_path / "report")[0].read_text()).text
    assert "Quadraticnot run yet" in text
    assert [kind for said, (kind, _) in verdicts(results).items() if "D = 1024 beats Quadratic" in said] == [UNTESTED]


def test_noise_is_twice_the_pooled_deviation_between_seeds(tmp_path: Path) -> None:
    results = Results(tmp_path)
    run = next(run for run in plan("figure3") if run.label == "full")
    for seed in range(3):
        write_training(results, replace(run, config=replace(run.config, seed=seed)), 100.0)
    book = Book(results)
    assert book.noise("figure3", "ptb", "perplexity") == pytest.approx(2 * 0.1)
    score = book.score("figure3", "ptb", "full", "perplexity")
    assert score is not None
    assert score == pytest.approx((100.1, 100.0, 100.2, 3))


def test_the_command_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_all(tmp_path / "results")
    assert cli.main(["report", "--results", str(tmp_path / "results"), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "out" / "report.html")


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (1.0, 3.0, False, [1, 1.5, 2, 2.5, 3]),
        (90.0, 700.0, True, [100, 200, 500]),
        (140.0, 380.0, True, [150, 200, 250, 300, 350]),
        (120.0, 380.0, True, [200, 300]),
        (120.0, 126.0, True, [120, 122, 124, 126]),
        (1e-4, 1e3, True, [1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100, 1000]),
        (5.0, 5.0, True, [5.0]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, log: bool, expected: list[float]) -> None:
    assert ticks(low, high, log=log) == pytest.approx(expected)


def test_names_are_moved_apart_and_stay_in_order() -> None:
    assert apart([3.0, 1.0, 1.1], 1.0) == [3.0, 1.0, 2.0]


def test_numbers_have_three_digits_or_all_before_the_point() -> None:
    assert [number(value) for value in (0.0, 0.00012345, 0.5, 12.345, 123.45, 12345.6, 2e7)] == [
        "0", "0.000123", "0.5", "12.3", "123", "12,346", "2e+07",
    ]  # fmt: skip


def test_scores_have_four_digits_from_1_on() -> None:
    assert [score_text(value) for value in (0.45, 5.59, 110.98, 111.0, 999.96, 5594.2)] == [
        "0.45", "5.590", "111.0", "111.0", "1,000", "5,594",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium found: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    return write_report(Book(write_all(directory / "results")), directory)[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_in_a_browser_the_page_fits_its_width_and_says_nothing_on_the_console(
    browser: Any, report: Path, width: int, scheme: str, tmp_path: Path
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(report.as_uri())
    page.add_script_tag(content=_LOOKS)
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("Math.min(...[...document.querySelectorAll('svg text')].map(sizeOf))") >= 9
    assert page.evaluate("[...document.querySelectorAll('svg text')].filter(isCut).map(t => t.textContent)") == []
    assert page.evaluate(_CONTRAST) >= 4.5
    page.screenshot(path=str(tmp_path / f"report-{width}-{scheme}.png"), full_page=True)
    context.close()


# The size of a text on the screen, in pixels, and whether a part of it is outside its picture.
_LOOKS = """
const sizeOf = (t) => parseFloat(getComputedStyle(t).fontSize) * t.getCTM().a;
const isCut = (t) => {
  const [inner, outer] = [t.getBoundingClientRect(), t.ownerSVGElement.getBoundingClientRect()];
  return inner.left < outer.left - 0.5 || inner.right > outer.right + 0.5 || inner.bottom > outer.bottom + 2;
};
"""
# The least contrast of a verdict or a curve's name with the page behind it, as WCAG counts it.
_CONTRAST = """
() => {
  const light = (text) => {
    const parts = text.match(/[0-9.]+/g).slice(0, 3).map(Number).map(v => v / 255);
    const linear = parts.map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const back = light(getComputedStyle(document.body).backgroundColor);
  const fronts = [...document.querySelectorAll(".verdict, svg .name, small, a")].map(
    (part) => light(part.namespaceURI.includes("svg") ? getComputedStyle(part).fill : getComputedStyle(part).color));
  return Math.min(...fronts.map(f => (Math.max(f, back) + 0.05) / (Math.min(f, back) + 0.05)));
}
"""


def test_in_a_browser_a_curve_is_switched_off_and_on_by_the_keyboard_alone(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    boxes = page.locator("input[type=checkbox]")
    reached = set()
    for _ in range(page.evaluate("document.querySelectorAll('a, input, [tabindex]').length")):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.for ?? ''"))
    assert len(reached - {""}) == boxes.count()
    curve = page.locator('[data-curve="figure3-0"]')
    assert curve.count() == 1
    page.focus('input[data-for="figure3-0"]')
    page.keyboard.press("Space")
    assert not curve.is_visible()
    assert page.locator('[data-curve="figure3-1"]').is_visible()
    page.keyboard.press("Space")
    assert curve.is_visible()
    page.close()
