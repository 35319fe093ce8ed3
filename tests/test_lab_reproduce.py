"""The paper's experiments at tiny sizes: run, stopped, taken up again, cached, adopted, listed."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rfsoftmax.lab import cli, plots, train
from rfsoftmax.lab.claims_untested import UNTESTED_CLAIMS
from rfsoftmax.lab.config import DEFAULTS, resolve
from rfsoftmax.lab.experiments import TRAINED, plan
from rfsoftmax.lab.outputs import make_output
from rfsoftmax.lab.reproduce_options import ITEMS
from rfsoftmax.lab.results import Results, deciding, run_name
from rfsoftmax.lab.table1 import table1
from rfsoftmax.lab.tasks import make_task
from rfsoftmax.lab.training_results import timed_evaluations
from test_lab_demo import Page
from test_lab_train import write_corpus, write_points


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as --data expects it, with a few hundred words, points and digits."""
    directory = tmp_path_factory.mktemp("data")
    for name in ("ptb", "enwiki", "tibkat-gnd", "usps"):
        (directory / name).mkdir()
    write_corpus(directory / "ptb")
    (directory / "enwiki" / "enwiki.txt").write_text((directory / "ptb" / "train.txt").read_text())
    write_points(directory / "tibkat-gnd" / "train.txt")
    write_points(directory / "tibkat-gnd" / "test.txt", 30, seed=1)
    digits = np.random.default_rng(0).uniform(-1, 1, (1100, 256)).astype(np.float32)
    np.savez(directory / "usps" / "usps_train.npz", X=digits)
    return directory


def arguments(data: Path, place: Path, line: str) -> list[str]:
    where = ["--data", str(data), "--results", str(place / "results"), "--runs", str(place / "runs")]
    return ["reproduce", *line.split(), *where, "--cache", str(data / "cache"), "--scale", "tiny"]


def reproduce(data: Path, place: Path, line: str) -> int:
    return cli.main(arguments(data, place, line))


def results(place: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((place / "results").glob("*.json"))}


@pytest.fixture(scope="module")
def everything(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where all was run once, with one seed."""
    place = tmp_path_factory.mktemp("everything")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", lambda *_: None)
        assert reproduce(data, place, "all --seeds 0") == 0
    return place


def test_every_run_of_the_plan_leaves_a_result_with_its_circumstances(data: Path, everything: Path) -> None:
    found = {name: result for name, result in results(everything).items() if result["kind"] == "training"}
    planned = {run.name: run for item in TRAINED for run in plan(item, "tiny")}
    assert set(found) == {name for name, run in planned.items() if run.config.seed == 0}
    for name, result in found.items():
        assert result["config"] == deciding(planned[name].config)
        assert len(result["evaluations"]) == 2
        assert result["machine"]
        assert result["commit"]
        assert result["seconds"] > 0
        score = result["evaluations"][-1]
        if result["config"]["task"] == "text":
            assert result["final"]["loss"] == pytest.approx(score["loss"], rel=1e-5)
        else:
            assert 0 <= score["precision@5"] <= 1
        assert str(data) not in json.dumps(result)
        assert str(everything) not in json.dumps(result)


def test_of_a_finished_run_its_last_model_is_kept_and_its_result_can_be_made_again(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(data, tmp_path, "figure3 --only Uniform") == 0
    (run,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    files = sorted(str(path.relative_to(run / "checkpoints")) for path in (run / "checkpoints").rglob("*.*"))
    assert files == ["step-000000040/model.safetensors", "step-000000040/progress.json"]
    (before,) = results(tmp_path).values()
    (tmp_path / "results" / f"{run.name}.json").unlink()
    assert reproduce(data, tmp_path, "figure3 --only Uniform") == 0
    assert list(results(tmp_path).values()) == [before]


def test_nothing_is_run_twice(data: Path, everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(data, everything, "all --seeds 0") == 0
    said = capsys.readouterr().out
    assert said.count("done before") == len(results(everything))
    assert "begins" not in said


def test_the_absolute_softmax_of_quadratic_has_two_losses_and_others_one(everything: Path) -> None:
    for result in results(everything).values():
        if result["kind"] == "training":
            absolute = "quadratic" in result["config"]["sampler_options"]
            assert (result["final"]["loss"] != result["final"]["softmax_loss"]) == absolute


def test_the_report_of_real_results_misses_nothing(
    data: Path, everything: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--results", str(everything / "results"), "--output", str(everything / "report")]
    assert cli.main(["report", "--scale", "tiny", *place]) == 0
    text = Page((everything / "report" / "report.html").read_text()).text
    assert "not run yet" not in text
    assert f"{len(UNTESTED_CLAIMS)} are not tested" in text


def test_theory_is_measured_on_the_checkpoints_of_the_full_softmax(everything: Path) -> None:
    found = results(everything)
    first = {(row["sampler"], row["num_negatives"]): row for row in found["theorem1-ptb-tiny"]["rows"]}
    assert first["EXP", 4]["chi2"] < 1e-6
    assert first["EXP", 4]["bound_always"] < 1e-6
    assert first["Uniform", 4]["upper_corrected"] > first["Uniform", 4]["bound_always"] > 0
    assert all(row["outside_always"] == 0 for row in first.values())
    assert "theorem1-tibkat-gnd-tiny" in found
    second = {(row["nu"], row["num_features"]): row for row in found["theorem2-ptb-tiny"]["rows"]}
    tau = found["theorem2-ptb-tiny"]["tau"]
    assert second[tau, None]["chi2"] < 1e-9
    assert second[1.0, None]["chi2"] > second[4.0, None]["chi2"] > 0
    assert second[1.0, 16]["error_median"] < second[1.0, 4]["error_median"]
    assert {row["num_features"] for row in found["corollary1-ptb-tiny"]["rows"]} == {None, 4, 16}


def test_theory_asks_for_the_runs_it_needs(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(data, tmp_path, "theory") == 1
    assert capsys.readouterr().out.count("expected the finished run") == 4


def test_the_error_of_random_fourier_features_in_table_1_is_their_variance(data: Path) -> None:
    found = table1(data / "usps" / "usps_train.npz", (1.0,), (50,), num_digits=60, num_maps=30)
    digits = np.load(data / "usps" / "usps_train.npz")["X"]
    rows = {row["method"]: row for row in found["rows"]}
    digits /= np.linalg.norm(digits, axis=1, keepdims=True)
    kernel = np.exp(digits[:300] @ digits[300:600].T - 1)
    expected = ((1 - kernel**2) ** 2).mean() / (2 * 50)
    assert rows["Random Fourier"]["mse"] == pytest.approx(expected, rel=0.15)
    assert rows["Orthogonal"]["mse"] < rows["Random Fourier"]["mse"]
    quadratic = rows["Quadratic"]
    assert quadratic["num_features"] == 256**2
    assert quadratic["mse"] < kernel.var() * 1.1


def test_a_killed_run_goes_on_with_the_same_command_to_the_same_result(data: Path, tmp_path: Path) -> None:
    line = "figure3 --only EXP"
    assert reproduce(data, tmp_path / "whole", line) == 0
    program = (
        "import sys, time; from rfsoftmax.lab import cli, checkpoints; save = checkpoints.save\n"
        "def slow(*args):\n    path = save(*args); print('saved', flush=True); time.sleep(60); return path\n"
        "checkpoints.save = slow\nsys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *arguments(data, tmp_path / "cut", line)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("saved" in said for said in process.stdout)
        process.send_signal(signal.SIGKILL)
    assert not results(tmp_path / "cut")
    assert reproduce(data, tmp_path / "cut", line) == 0
    (name, whole), (same, cut) = *results(tmp_path / "whole").items(), *results(tmp_path / "cut").items()
    assert name == same
    assert cut["final"] == whole["final"]
    assert _scores(cut) == _scores(whole)


def _scores(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in result["evaluations"]]


def test_ctrl_c_saves_and_says_that_the_same_command_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, steps = train.Trainer._step, iter(range(1000))

    def interrupted(self: train.Trainer, *arguments: Any) -> None:
        step(self, *arguments)
        if next(steps) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train.Trainer, "_step", interrupted)
    assert reproduce(data, tmp_path, "figure3 --only Uniform Unigram") == 130
    assert "stopped and saved; the same command goes on" in capsys.readouterr().out
    assert reproduce(data, tmp_path, "figure3 --only Uniform --list") == 0
    assert "at step 5" in capsys.readouterr().out
    assert reproduce(data, tmp_path, "figure3 --only Uniform") == 0
    assert len(results(tmp_path)) == 1


def test_a_run_of_train_with_the_settings_of_the_plan_is_adopted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--dim 8 --num-negatives 5 --batch-size 6 --seq-len 5 --epochs 2"
    settings = f"--vocab 0 --dropout 0.4 --schedule cosine --method uniform {sizes}"
    monkeypatch.chdir(data)  # where the run was made must not matter
    assert cli.main(["train", "text", "--data", "ptb", "--run", str(tmp_path / "by-hand"), *settings.split()]) == 0
    monkeypatch.chdir(tmp_path)
    assert reproduce(data, tmp_path, f"--adopt {tmp_path / 'by-hand'}") == 0
    assert "figure3: Uniform, seed 0" in capsys.readouterr().out
    assert not (tmp_path / "by-hand").exists()
    assert reproduce(data, tmp_path, "figure3 --only Uniform") == 0
    assert "step 40/40" not in capsys.readouterr().out  # nothing was left to do
    (result,) = results(tmp_path).values()
    assert result["config"]["method"] == "uniform"
    assert len(result["evaluations"]) == 2


def test_a_run_of_other_settings_or_data_is_not_adopted(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--dim 8 --num-negatives 5 --batch-size 6 --seq-len 5 --epochs 2 --vocab 0 --schedule cosine"
    for number, (text, more) in enumerate((("ptb", "--dropout 0.1"), ("enwiki/enwiki.txt", "--dropout 0.4"))):
        run = tmp_path / f"run{number}"
        line = ["train", "text", "--data", str(data / text), "--run", str(run), "--method", "uniform"]
        assert cli.main([*line, *sizes.split(), *more.split()]) == 0
        assert reproduce(data, tmp_path, f"--adopt {run}") == 1
        assert "adopt: expected a run with the settings of one in the plan" in capsys.readouterr().err
        assert run.exists()


def test_the_runs_of_figure_3_are_those_of_the_command_of_the_documentation() -> None:
    given = {"vocab": 0, "epochs": 10, "dropout": 0.4, "schedule": "cosine"}
    by_hand = [
        run_name("ptb", resolve("text", None, {**given, "method": m, "data": "x"}))
        for m in ("full", "default", "uniform")
    ]
    assert set(by_hand) <= {run.name for run in plan("figure3")}


def test_names_depend_on_what_decides_the_result_and_on_nothing_else() -> None:
    config = DEFAULTS["text"]
    name = run_name("ptb", config)
    assert run_name("ptb", replace(config, data="elsewhere", cache="c", save_every=7, log_every=9)) == name
    others = [
        replace(config, **change) for change in ({"seed": 1}, {"dim": 7}, {"eval_limit": 3}, {"normalize": False})
    ]
    assert len({name, run_name("enwiki", config), *(run_name("ptb", other) for other in others)}) == 6
    assert re.fullmatch(r"ptb-default-0-[0-9a-f]{8}", name)


def test_runs_of_one_item_differ_and_labels_name_them(tmp_path: Path) -> None:
    for scale in ("small", "paper", "tiny"):
        for item in TRAINED:
            runs = plan(item, scale)
            assert len({run.name for run in runs}) == len(runs)
            assert len({(run.dataset, run.label, run.config.seed) for run in runs}) == len(runs)


def test_a_result_of_other_defaults_is_not_taken_for_this_run(tmp_path: Path) -> None:
    config, kept = DEFAULTS["text"], Results(tmp_path)
    settings = {name: value for name, value in deciding(config).items() if name != "normalize"}
    kept.write(run_name("ptb", config), {"config": settings})
    assert kept.training("ptb", config) is not None  # an older one, that knew of no such setting
    kept.write(run_name("ptb", config), {"config": {**settings, "lr": 0.5}})
    assert kept.training("ptb", config) is None
    assert asdict(config)["lr"] != 0.5


def test_the_list_tells_what_is_done_and_how_much_is_left(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(data, tmp_path, "figure3 --only Uniform Unigram --list") == 0
    assert capsys.readouterr().out.count("  to do  ") == 2
    assert reproduce(data, tmp_path, "figure3 --only Uniform") == 0
    capsys.readouterr()
    assert reproduce(data, tmp_path, "figure3 --only Uniform Unigram --list") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[4] for row in rows[1:3]] == ["done", "to"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "item: expected any of table1, .*, all, got none"),
        ("figure3 --only magic", "only: expected any of .*Uniform.*, got magic"),
        ("figure9", "expected any of table1.*, got 'figure9'"),
        ("figure3 --seeds -1", "expected"),
        ("table3 --sets mine", "expected any of tibkat-gnd.*, got 'mine'"),
    ],
)
def test_wrong_arguments_are_said_in_one_line(
    line: str, message: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = reproduce(data, tmp_path, line)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 1
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert len(said.splitlines()) == 1


def test_data_must_be_named_and_its_directories_are_in_the_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RFSOFTMAX_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "figure3", "--only", "full"]) == 1
    assert "data: expected --data DIR or RFSOFTMAX_DATA, where ptb lies, got neither" in capsys.readouterr().err
    monkeypatch.setenv("RFSOFTMAX_DATA", str(tmp_path))
    assert cli.main(["reproduce", "figure3", "--only", "full"]) == 1
    assert f"data: expected {tmp_path / 'ptb'}, got nothing there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in ("ptb/", "enwiki/", "tibkat-gnd/", "usps/", *ITEMS))


def test_two_processes_do_not_do_the_same_work(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    name = next(run.name for run in plan("figure3", "tiny") if run.label == "Uniform")
    (tmp_path / "runs").mkdir()
    with (tmp_path / "runs" / f"{name}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert reproduce(data, tmp_path, "figure3 --only Uniform") == 1
        assert "another process is at it" in capsys.readouterr().out
    assert not results(tmp_path)
    assert os.listdir(tmp_path / "runs") == [f"{name}.lock"]


def test_train_limit_and_normalize_do_what_they_say(data: Path) -> None:
    given = {"cache": str(data / "cache"), "train_limit": 90}
    text = resolve("text", None, {**given, "data": str(data / "ptb"), "vocab": 0})
    points = resolve("xc", None, {**given, "data": str(data / "tibkat-gnd" / "train.txt")})
    assert make_task(replace(text, batch_size=6, seq_len=5)).num_batches() == 3
    assert make_task(replace(points, batch_size=30)).num_batches() == 3
    plain = make_output(replace(text, method="full", normalize=False, tau=1.0), torch.ones(24, dtype=torch.int64))
    hidden, weight = torch.randn(3, 200), next(plain.parameters()).detach()
    expected = (hidden @ weight.T).log_softmax(1)
    torch.testing.assert_close(plain.log_prob(hidden, torch.arange(24).repeat(3, 1)), expected)


def test_a_checkpoint_made_before_a_setting_was_there_goes_on(data: Path, tmp_path: Path) -> None:
    sizes = "--dim 8 --num-negatives 5 --batch-size 6 --seq-len 5 --epochs 1 --method uniform"
    line = ["train", "text", "--data", str(data / "ptb"), "--run", str(tmp_path / "run")]
    assert cli.main([*line, *sizes.split()]) == 0
    for file in (tmp_path / "run" / "checkpoints").glob("*/progress.json"):
        note = json.loads(file.read_text())
        del note["settings"]["normalize"], note["settings"]["train_limit"]
        file.write_text(json.dumps(note))
    assert cli.main(["train", "text", "--run", str(tmp_path / "run"), "--resume", "--epochs", "2"]) == 0
    assert cli.main(["train", "text", "--run", str(tmp_path / "run"), "--resume", "--no-normalize"]) == 1


def test_a_pause_does_not_count_as_training() -> None:
    seconds = [1.0, 2.0, 3.0, 3604.0, 3605.0, 3606.0, 3607.0]
    trained = [{"kind": "train", "step": 10 * i, "seconds": s, "sampler_share": 0.5} for i, s in enumerate(seconds, 1)]
    valid = {"kind": "valid", "step": 70, "epoch": 1, "seconds": 3607.0, "time": 1.0, "loss": 2.0}
    found = timed_evaluations([*trained, valid], 70)
    assert found["seconds"] == pytest.approx(7.0)
    assert found["sampler_share"] == 0.5
    assert found["evaluations"] == [{"step": 70, "epoch": 1, "seconds": pytest.approx(7.0), "loss": 2.0}]
