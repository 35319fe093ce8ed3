"""The command, as a person at a terminal meets it: help, each command on tiny data, and errors of one line."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from rfsoftmax.lab import cli, plots
from rfsoftmax.lab.catalogue import METHODS
from rfsoftmax.lab.config import DEFAULTS, TASKS, Config
from rfsoftmax.lab.sampler_options import options_of
from test_lab_train import SMALL, write_corpus, write_points

COMMANDS = [
    "train",
    "train text",
    "train xc",
    "evaluate",
    "predict",
    "diagnose",
    "advise",
    "samplers",
    "demo",
    "reproduce",
    "report",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny data, and a trained run on text and on points: `text`, `points.txt`, `run-text`, `run-xc`."""
    directory = tmp_path_factory.mktemp("place")
    (directory / "text").mkdir()
    write_corpus(directory / "text")
    write_points(directory / "points.txt")
    write_points(directory / "held-out.txt", 30, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", lambda *_: None)
        for task, data in (("text", "text"), ("xc", "points.txt")):
            assert main(directory, f"train {task} --data {data} --run run-{task} --epochs 5 {SMALL[task]}") == 0
    return directory


def main(place: Path, line: str) -> int:
    """The exit code of a command line given in a directory."""
    before = Path.cwd()
    os.chdir(place)
    try:
        return cli.main(line.split())
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        os.chdir(before)


def output(place: Path, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(place, line) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def failure(place: Path, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a wrong command line gives, with exit code 1 and nothing on the standard output."""
    capsys.readouterr()
    assert main(place, line) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    return said.err.rstrip("\n")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = output(tmp_path, f"{command} --help", capsys)
    assert said.startswith(f"usage: rfsoftmax {command}".rstrip())
    # Something is said of the whole and of each option.
    assert len(said.split("options:")[0].splitlines()) > 3
    assert not re.search(r"^  (-[^ ]+ ?[^ ]*)$\n(?!   )", said, re.MULTILINE)


def test_the_help_names_every_command_and_the_commands_are_those(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = output(tmp_path, "--help", capsys)
    for command in {command.split()[0] for command in COMMANDS}:
        assert re.search(rf"^    {command}( |$)", said, re.MULTILINE)


@pytest.mark.parametrize("task", TASKS)
def test_the_help_of_train_names_every_setting_and_its_default(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = " ".join(output(tmp_path, f"train {task} --help", capsys).split())
    for setting in fields(Config):
        name, default = setting.name.replace("_", "-"), getattr(DEFAULTS[task], setting.name)
        is_there = setting.metadata["task"] in ("", task) and name != "task"
        assert (f" --{name.removesuffix('s') if isinstance(default, dict) else name}" in said) == is_there
        if is_there and isinstance(default, int) and not isinstance(default, bool):
            assert f"[{default}]" in said


def test_samplers_lists_every_method_with_its_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = output(tmp_path, "samplers", capsys)
    for method, entry in METHODS.items():
        assert re.search(rf"^{method} +{re.escape(entry.cost)} +{re.escape(entry.line)}$", said, re.MULTILINE)


@pytest.mark.parametrize("method", METHODS)
def test_samplers_describes_each_option_of_a_method(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = output(tmp_path, f"samplers {method}", capsys)
    assert METHODS[method].line in said
    for name in options_of(method):
        assert re.search(rf"^  {name} .*\[.+\] +\w", said, re.MULTILINE)


@pytest.mark.parametrize("name", ["text", "xc"])
def test_a_run_tells_its_story_in_plain_lines(
    name: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: None)
    data = place / ("text" if name == "text" else "points.txt")
    said = output(place, f"train {name} --data {data} --run {tmp_path}/run --epochs 1 {SMALL[name]}", capsys)
    lines = said.splitlines()
    assert lines[0] == f"{tmp_path}/run: {24 if name == 'text' else 20} classes, 20 steps an epoch"
    assert re.match(r"epoch 1  step 20  \d+ s  .*\(best\)$", lines[-2])
    assert re.match(r"done after 20 steps: best (perplexity|precision@1) [\d.]+, saved in .*step-000000020$", lines[-1])


def test_evaluate_gives_the_scores_of_the_best_checkpoint(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(place, "evaluate run-text --split test", capsys).splitlines()
    assert [line.split()[0] for line in lines] == ["loss", "perplexity"]
    scores = json.loads(output(place, "evaluate run-text --json", capsys))
    metrics = [json.loads(line) for line in (place / "run-text" / "metrics.jsonl").read_text().splitlines()]
    best = min(line["perplexity"] for line in metrics if line["kind"] == "valid")
    assert scores["perplexity"] == pytest.approx(best, rel=1e-6)


def test_evaluate_takes_another_file_of_points(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = json.loads(output(place, "evaluate run-xc --data held-out.txt --json", capsys))
    assert list(scores) == [f"{name}@{k}" for k in (1, 3, 5) for name in ("precision", "psp")]
    assert scores["precision@1"] > 0.4


def test_predict_says_likely_words(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in output(place, "predict run-text w5 --top 24", capsys).splitlines()]
    assert len(rows) == 24
    assert sum(float(chance) for chance, _ in rows) == pytest.approx(1, abs=0.01)
    assert {word for _, word in rows[:5]} & {"w6", "w7"}


def test_predict_names_the_labels_of_points(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "names.txt").write_text("".join(f"label {i}\n" for i in range(20)))
    said = output(place, "predict run-xc --input held-out.txt --top 3 --label-names names.txt", capsys)
    rows = [line.split("\t") for line in said.splitlines()]
    assert len(rows) == 30
    assert all(len(row) == 3 and re.fullmatch(r"label \d+:-\d+\.\d{4}", row[0]) for row in rows)


@pytest.mark.parametrize("options", ["", "--method moment", "--method rff --sampler-option num_features=16"])
def test_diagnose_measures_the_sampler_of_a_run_or_another(
    options: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = output(place, f"diagnose run-text --contexts 20 --draws 5 {options}", capsys)
    assert "chi2" in said
    assert "gradient bias over 5 draws of m = 5" in said


def test_diagnose_takes_points_with_several_labels(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "chi2" in output(place, "diagnose run-xc --contexts 5 --draws 3", capsys)


def test_advise_says_what_to_use(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr("rfsoftmax.advisor.advise", lambda *sizes, num_negatives: asked.append(sizes))
    output(place, "advise --dim 8 --num-classes 300 --batch-size 4", capsys)
    assert asked == [(8, 300, 4)]


def test_advise_takes_the_embeddings_and_queries_of_a_run(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "rfsoftmax.lab.commands.advise_head", lambda head, hidden, target, num_negatives: asked.append(hidden.shape)
    )
    output(place, "advise --run run-text --contexts 16", capsys)
    assert asked == [(16, 8)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("trian", "invalid choice: 'trian'"),
        ("train text --dimm 3", "unrecognized arguments: --dimm 3"),
        ("train text --dim x", "--dim: expected a whole number, got 'x'"),
        ("train text --lr fast", "--lr: expected a number, got 'fast'"),
        ("train text --dim 0 --run z", "dim: expected at least 1, got 0"),
        ("train text --method magic", "--method: expected one of default, full, .*, got 'magic'"),
        ("train text --sampler-option nu", "expected NAME=VALUE, got 'nu'"),
        ("train text --method rff --sampler-option mu=3", "expected any of anchor, .*, nu, .* 'rff', got 'mu'"),
        ("train text --method rff --sampler-option tau=3", "expected any of .*, got 'tau'"),
        ("train text --method rff --sampler-option nu=wide", "nu: expected a number or auto, got 'wide'"),
        ("train text --method rff --sampler-option nu=-1", "nu: expected .*, got -1"),
        ("train text --method rff --sampler-option block_size=1.5", "block_size: expected a whole number, got 1.5"),
        ("train text --method midx --sampler-option quantisation=x", "expected one of residual, product, got 'x'"),
        ("train text --method mixture --sampler-option samplers=3", r"samplers: expected a list, such as .*, got 3"),
        ("train text --data nowhere", "nowhere: expected a file, got none"),
        ("train text --data text --dim 8 --run z", "num_negatives: expected 1 to 23, .*, got 100"),
        ("train text --data text --run run-text", "run: expected a new directory, or --resume to go on, got run-text"),
        ("train text --run z --resume", "run: expected a directory with a config.toml, got z"),
        ("train text --config none.toml", "config: expected a TOML file, got none.toml"),
        ("evaluate z", "run: expected a directory with a config.toml, got z"),
        ("evaluate run-text --checkpoint 7", "checkpoint: expected last, best or one of the steps .*, got 7"),
        ("evaluate run-text --split all", "--split: expected one of valid, test, train, got 'all'"),
        ("evaluate run-text --data points.txt", "data: expected none for text, whose splits are fixed"),
        ("predict run-text --input points.txt", "predict: expected a prompt for a run on text, got 'points.txt'"),
        ("predict run-xc", "predict: expected --input FILE for a run on xc"),
        ("predict run-text --top 0", "--top: expected a whole number of at least 1, got '0'"),
        ("diagnose run-text --method full", "method: expected one that draws negatives, got 'full'"),
        ("diagnose run-text --method rff --sampler-option mu=3", "expected any of .*, got 'mu'"),
    ],
)
def test_an_error_is_one_line_that_names_argument_expectation_and_value(
    line: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(said, failure(place, line, capsys))
    assert not (place / "z").exists()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("2 30 20\n0 1:1\n3,x 2:1\n", ":3: expected a label id from 0 to 19, got 'x' in column 3"),
        ("2 30 20\n0 1:1\n3 31:1\n", ":3: expected a feature id from 0 to 29, got '31:1' in column 3"),
        ("2 30 20\n0 1:one\n3 3:1\n", ":2: expected a finite 32-bit number after the colon, got 'one' in column 5"),
        ("2 30\n0 1:1\n", ":1: expected a header of three whole numbers"),
        ("3 30 20\n0 1:1\n", ":1: expected 3 rows, as the header says, got 1"),
        ("1 31 20\n0 1:1\n", ": expected 30 features, got 31"),
    ],
)
def test_a_wrong_line_of_data_is_named_by_file_and_number(
    rows: str, said: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.txt"
    file.write_text(rows)
    assert f"{file}{said}" in failure(place, f"predict run-xc --input {file}", capsys)


def test_text_that_is_not_utf8_is_named_by_file_and_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.txt"
    file.write_bytes(b"good line\n" * 4 + b"bad \xff line\n")
    said = failure(place, f"train text --data {file} --run {tmp_path}/run", capsys)
    assert f"{file}:5: expected UTF-8 text, got byte 0xff in column 5" in said


def test_too_few_points_to_hold_some_out_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_points(tmp_path / "few.txt", 7)
    said = failure(place, f"train xc --data {tmp_path}/few.txt --run {tmp_path}/run", capsys)
    assert "data: expected at least 20 points, or a file for --valid, got 7" in said
    said = failure(place, f"train xc --data text/train.txt --valid points.txt --run {tmp_path}/run", capsys)
    assert "text/train.txt:1: expected a header" in said


def test_a_pipe_that_closes_early_is_no_error() -> None:
    program = "import sys; from rfsoftmax.lab.cli import main; sys.exit(main(['samplers']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
