"""Settings of a run: where they come from, what is wrong with them, and how they are written down."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from rfsoftmax.lab.config import DEFAULTS, TASKS, Config, dump, parse_option, read, resolve


def toml(directory: Path, text: str) -> Path:
    file = directory / "settings.toml"
    file.write_text(text)
    return file


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = resolve("text", toml(tmp_path, "dim = 32\nepochs = 3\n"), {"epochs": 5})
    assert config == replace(DEFAULTS["text"], dim=32, epochs=5)


@pytest.mark.parametrize("task", TASKS)
def test_without_file_and_options_the_settings_are_the_defaults_of_the_task(task: str) -> None:
    assert resolve(task) == DEFAULTS[task]
    assert DEFAULTS[task].task == task


def test_options_of_a_sampler_are_merged_one_by_one(tmp_path: Path) -> None:
    file = toml(tmp_path, 'method = "rff"\n[sampler_options]\nnum_features = 64\nnu = 2.0\n')
    assert resolve("text", file, {"sampler_options": {"nu": "auto"}}).sampler_options == {
        "num_features": 64,
        "nu": "auto",
    }


def test_options_of_a_sampler_start_afresh_with_another_method(tmp_path: Path) -> None:
    file = toml(tmp_path, 'method = "rff"\n[sampler_options]\nnum_features = 64\n')
    assert resolve("text", file, {"method": "midx"}).sampler_options == {}
    assert resolve("text", file, {"method": "full"}).sampler_options == {}
    assert resolve("text", file, {"method": "rff"}).sampler_options == {"num_features": 64}


def test_a_file_that_names_no_method_holds_options_of_the_default_one(tmp_path: Path) -> None:
    file = toml(tmp_path, "[sampler_options]\nnum_features = 64\n")
    assert resolve("text", file, {"method": "default"}).sampler_options == {"num_features": 64}


def test_a_whole_number_in_a_file_stands_for_a_float(tmp_path: Path) -> None:
    lr = resolve("text", toml(tmp_path, "lr = 1\n")).lr
    assert isinstance(lr, float)
    assert lr == 1.0


@pytest.mark.parametrize("task", TASKS)
def test_what_is_dumped_reads_back(task: str, tmp_path: Path) -> None:
    options = {"num_features": 64, "nu": "auto", "floor": 1e-05, "anchor": True, "samplers": ["uniform", 'a"b']}
    config = replace(
        DEFAULTS[task], method="rff", lr=1e-07, data='a "path"\\with\nmuch ünicode', sampler_options=options
    )
    file = toml(tmp_path, dump(config))
    assert resolve(task, file) == config
    assert set(read(file)) == {setting.name for setting in fields(Config)}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("dim", 0, "at least 1"),
        ("dim", 2.5, "a whole number"),
        ("dim", True, "a whole number"),
        ("lr", 0.0, "a positive finite number"),
        ("lr", float("nan"), "a positive finite number"),
        ("tau", float("inf"), "a positive finite number"),
        ("clip", -1.0, "at least 0"),
        ("dropout", 1.0, r"a number in \[0, 1\)"),
        ("vocab", 1, "at least 2, or 0"),
        ("seed", 2**32, "less than"),
        ("schedule", "exponential", "one of constant, linear, cosine"),
        ("method", "magic", "one of default, full"),
        ("bias", 1, "a truth"),
        ("sampler_options", 3, "a table"),
        ("sampler_options", {"nu": {"a": 1}}, "a number, a text, a truth or a list"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_setting_expectation_and_value(
    name: str, value: Any, expected: str
) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*: expected {expected}.*, got ") as caught:
        replace(DEFAULTS["text"], **{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dim 3", "settings.toml: expected TOML, got "),
        ("dimm = 3", "expected any of task, data.*, got 'dimm'"),
        ('dim = "3"', "dim: expected a whole number, got '3'"),
        ("sampler_options = 3", "sampler_options: expected a table, got 3"),
        ('task = "xc"', "task: expected 'text', got 'xc'"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        resolve("text", toml(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config: expected a TOML file, got .*none\.toml"):
        resolve("text", tmp_path / "none.toml")


@pytest.mark.parametrize("method", ["full", "adaptive"])
def test_methods_that_draw_nothing_take_no_sampler_options(method: str) -> None:
    with pytest.raises(ValueError, match=f"sampler_options: expected none with method '{method}'"):
        resolve("text", given={"method": method, "sampler_options": {"nu": 2}})


def test_nce_needs_one_label_a_point() -> None:
    with pytest.raises(ValueError, match="labels: expected pick_one with method 'nce', got pick_all"):
        resolve("xc", given={"method": "nce"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_features=256", ("num_features", 256)),
        ("nu=2.5", ("nu", 2.5)),
        ("nu=auto", ("nu", "auto")),
        ("anchor=true", ("anchor", True)),
        ("anchor=False", ("anchor", False)),
        ('samplers=["uniform", "moment"]', ("samplers", ["uniform", "moment"])),
    ],
)
def test_an_option_of_a_sampler_is_read_as_toml_or_as_text(text: str, expected: tuple[str, Any]) -> None:
    assert parse_option(text) == expected


@pytest.mark.parametrize("text", ["nu", "nu=", "=3"])
def test_an_option_without_name_or_value_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="sampler_option: expected NAME=VALUE, got"):
        parse_option(text)
