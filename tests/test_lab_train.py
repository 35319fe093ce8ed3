"""Training: it learns, it can be stopped in any way and goes on to the last bit, and it says what went wrong."""

import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torch import nn

from rfsoftmax.lab import checkpoints, cli, plots, train
from rfsoftmax.lab.config import DEFAULTS, resolve
from rfsoftmax.lab.models import make_model
from rfsoftmax.lab.optimizers import clip_gradients, learning_rate
from rfsoftmax.lab.runs import NoEvents, Run
from rfsoftmax.lab.tasks import TextTask

METHODS = ["default", "full", "unigram", "midx", "rff", "moment", "quadratic", "adaptive", "nce"]
# 20 steps an epoch on the corpus below, and as many on the points.
SMALL = {
    "text": "--dim 8 --num-negatives 5 --batch-size 6 --seq-len 5 --lr 0.02",
    "xc": "--dim 8 --num-negatives 5 --batch-size 12 --lr 0.02",
}
OFTEN = "--log-every 1 --save-every 8 --epochs 2"


def write_corpus(directory: Path) -> Path:
    """600 words of training text, each the one before it plus 1 or 2, in sentences of nine; 24 words in all."""
    generator = np.random.default_rng(0)
    for split, num in (("train", 60), ("valid", 12), ("test", 12)):
        words = generator.integers(1, 3, num * 9).cumsum() % 22
        lines = [" ".join(f"w{word}" for word in line) for line in words.reshape(num, 9)]
        (directory / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return directory


def write_points(file: Path, num: int = 252, seed: int = 0) -> Path:
    """Points with one to three of 20 labels, each of which shows as a feature of its own among 30."""
    generator = np.random.default_rng(seed)
    rows = [f"{num} 30 20"]
    for _ in range(num):
        labels = generator.choice(20, generator.integers(1, 4), replace=False).tolist()
        features = sorted({*labels, int(generator.integers(20, 30))})
        rows.append(f"{','.join(map(str, labels))} {' '.join(f'{i}:{1 + i / 100}' for i in features)}")
    file.write_text("\n".join(rows) + "\n")
    return file


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("data")
    return {
        "text": write_corpus(directory),
        "xc": write_points(directory / "points.txt"),
        "cache": directory / "cache",
    }


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time of a tiny run goes into its pictures; one test looks at them."""
    if "pictures" not in request.node.name:
        monkeypatch.setattr(plots, "draw", lambda *_: None)


def command(data: dict[str, Path], run: Path, options: str = "", task: str = "text") -> list[str]:
    """`rfsoftmax train` with tiny sizes, a line of metrics for each step and a checkpoint every eighth."""
    place = ["train", task, "--data", str(data[task]), "--cache", str(data["cache"]), "--run", str(run)]
    return [*place, *SMALL[task].split(), *OFTEN.split(), *options.split()]


def start(data: dict[str, Path], run: Path, options: str = "", task: str = "text") -> Path:
    assert cli.main(command(data, run, options, task)) == 0
    return run


def resume(run: Path, options: str = "", task: str = "text") -> int:
    return cli.main(["train", task, "--run", str(run), "--resume", *options.split()])


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run: Path) -> list[tuple[int, Any]]:
    """Step and loss of all training steps and evaluations, in the order they were written."""
    lines = records(run, "train") + records(run, "valid")
    return [(line["step"], line.get("loss", line.get("precision@1"))) for line in lines]


class KilledError(Exception):
    """Stands for the end of the process."""


def break_at(monkeypatch: pytest.MonkeyPatch, step: int, what: Any) -> None:
    """Call `what` before a step, counted from 1, begins."""
    whole = train.Trainer._step

    def step_or_break(trainer: train.Trainer, *arguments: Any) -> None:
        if trainer.progress.step == step - 1:
            what()
        whole(trainer, *arguments)

    monkeypatch.setattr(train.Trainer, "_step", step_or_break)


def kill() -> None:
    raise KilledError


@pytest.mark.parametrize("options", ["--method full", "", "--method unigram --sparse-from 1 --optimizer adagrad"])
@pytest.mark.parametrize("task", ["text", "xc"])
def test_the_loss_falls_and_the_score_rises(
    task: str, options: str, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(data, tmp_path / "run", f"--epochs 6 {options}", task)
    train_losses = [loss for _, loss in losses(run)][: len(records(run, "train"))]
    assert len(train_losses) == 120
    assert np.mean(train_losses[-20:]) < np.mean(train_losses[:20]) - 0.4
    if task == "text":
        # 24 words of which two may follow: a perplexity of 2 and a little is the least.
        assert records(run, "valid")[-1]["perplexity"] < 12
    else:
        assert records(run, "valid")[-1]["precision@1"] > 0.5
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len([line for line in out.splitlines() if line.startswith("epoch")]) == 6
    assert len(out.splitlines()) <= 9


@pytest.mark.parametrize(
    ("task", "options"),
    [
        *(("text", f"--method {method}") for method in METHODS),
        ("text", "--method rff --sampler-option nu=auto --sparse-from 1 --negatives shared --layers 2 --bias"),
        ("text", "--schedule cosine --warmup 5 --optimizer adagrad --method in_batch --eval-every 7"),
        ("xc", "--method default --sparse-from 1"),
        ("xc", "--method mixture --sampler-option samplers=['unigram','moment'] --labels pick_one --dropout 0.1"),
        ("xc", "--method lsh --optimizer sgd"),
    ],
)
def test_a_run_that_broke_goes_on_with_the_losses_of_one_that_did_not(
    task: str, options: str, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start(data, tmp_path / "whole", options, task)
    with monkeypatch.context() as patch:
        break_at(patch, 30, kill)
        with pytest.raises(KilledError):
            start(data, tmp_path / "broken", options, task)
    assert losses(tmp_path / "broken")[:29] == losses(whole)[:29]
    assert resume(tmp_path / "broken", task=task) == 0
    assert losses(tmp_path / "broken") == losses(whole)


def test_a_rebuild_of_the_sampler_comes_at_the_same_step_after_a_break(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rebuilding(*arguments: Any) -> Any:
        model: Any = make_model(*arguments)
        model.head.rebuild_every = 13
        return model

    for module in ("models", "train"):
        monkeypatch.setattr(f"rfsoftmax.lab.{module}.make_model", rebuilding)
    whole = start(data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        break_at(patch, 20, kill)
        with pytest.raises(KilledError):
            start(data, tmp_path / "broken")
    resume(tmp_path / "broken")
    assert losses(tmp_path / "broken") == losses(whole)


def test_a_process_killed_in_the_middle_of_an_epoch_goes_on_exactly(data: dict[str, Path], tmp_path: Path) -> None:
    whole = start(data, tmp_path / "whole", "--epochs 10 --save-every 30")
    run = tmp_path / "killed"
    child = subprocess.Popen([sys.executable, "-m", "rfsoftmax", *command(data, run, "--epochs 10 --save-every 30")])
    metrics = run / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 50):
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert 50 < len(losses(run)) < 200
    assert resume(run) == 0
    assert losses(run) == losses(whole)


KILLED_IN_A_CHECKPOINT = """
import os, signal, sys
from rfsoftmax.lab import checkpoints, cli

write = checkpoints.written

def write_half(path, work):
    write(path, work)
    if path.name == sys.argv[1] and path.parent.name.startswith("step-000000016"):
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

checkpoints.written = write_half
cli.main(sys.argv[2:])
"""


@pytest.mark.parametrize("file", [checkpoints.TRAINING])
def test_a_process_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    file: str, data: dict[str, Path], tmp_path: Path
) -> None:
    whole, run = start(data, tmp_path / "whole"), tmp_path / "killed"
    child = [sys.executable, "-c", KILLED_IN_A_CHECKPOINT, file, *command(data, run)]
    assert subprocess.run(child, check=False).returncode == -signal.SIGKILL
    assert [path.name for path in checkpoints.saved(run / "checkpoints")] == ["step-000000008"]
    assert resume(run) == 0
    assert losses(run) == losses(whole)
    assert not list((run / "checkpoints").glob("*.partial"))


def test_ctrl_c_saves_and_says_how_to_go_on(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, run = start(data, tmp_path / "whole"), tmp_path / "a run"
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        break_at(patch, 13, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert cli.main(command(data, run)) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert checkpoints.find(run / "checkpoints").name == "step-000000013"
    assert f"go on with: rfsoftmax train text --run '{run}' --resume" in capfd.readouterr().err
    assert resume(run) == 0
    assert losses(run) == losses(whole)


def test_ctrl_c_twice_stops_at_once(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    break_at(monkeypatch, 13, twice)
    assert cli.main(command(data, tmp_path / "run")) == 130
    assert checkpoints.find(tmp_path / "run" / "checkpoints").name == "step-000000008"
    assert "stopped at once" in capfd.readouterr().err


def test_numbers_that_are_not_finite_stop_the_run_with_batch_and_last_good_checkpoint(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(data, tmp_path / "run", "--epochs 1 --optimizer sgd --clip 0")
    good = checkpoints.find(run / "checkpoints")
    assert resume(run, "--epochs 2 --lr 1e38 --save-every 0") == 1
    said = capsys.readouterr().err
    assert "batch 1 of epoch 2: expected finite numbers, got" in said or "batch 2 of epoch 2" in said
    assert f"the last good checkpoint is {good}; try a lower rate: rfsoftmax train text --run" in said
    assert len(said.splitlines()) == 1
    assert checkpoints.find(run / "checkpoints") == good
    assert resume(run, "--epochs 2 --lr 0.01") == 0


def test_a_loss_that_is_not_finite_is_named_before_any_parameter_takes_harm(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train.Trainer._loss

    def broken(trainer: train.Trainer, batch: Any) -> torch.Tensor:
        if trainer.progress.step == 22:
            with torch.no_grad():
                next(trainer.model.lstm.parameters()).fill_(math.nan)  # type: ignore[union-attr]
        return whole(trainer, batch)

    monkeypatch.setattr(train.Trainer, "_loss", broken)
    assert cli.main(command(data, tmp_path / "run", "--method adaptive")) == 1
    said = capsys.readouterr().err
    assert "step 23, batch 3 of epoch 2: expected finite numbers, got a loss of nan" in said
    assert "step-000000020" in said


def test_a_fault_of_the_data_is_not_taken_for_divergence(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "all.txt"
    file.write_text("40 1 3\n" + "0,1,2 0:1\n" * 40)
    place = ["--data", str(file), "--cache", str(data["cache"]), "--run", str(tmp_path / "run")]
    assert cli.main(["train", "xc", *place, "--dim", "8", "--num-negatives", "2"]) == 1
    assert capsys.readouterr().err.startswith("rfsoftmax: target: expected a class left for a negative in each row")


def test_a_checkpoint_of_other_settings_is_refused(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = start(data, tmp_path / "one"), start(data, tmp_path / "other", "--dim 12")
    shutil.rmtree(one / "checkpoints")
    shutil.copytree(other / "checkpoints", one / "checkpoints")
    assert resume(one) == 1
    assert "expected a checkpoint with dim 8, got 12" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused(data: dict[str, Path], tmp_path: Path) -> None:
    run = start(data, tmp_path / "run")
    config = resolve("text", run / "config.toml", {"dim": 12})
    model = make_model(config, TextTask(config).classes)
    with pytest.raises(
        ValueError, match=r"expected a checkpoint of this model, got another: .*embedding\.weight"
    ) as caught:
        checkpoints.load_model(checkpoints.find(run / "checkpoints"), model)
    assert "\n" not in str(caught.value)


def test_other_data_under_the_name_of_a_run_is_refused(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(data["text"], tmp_path / "copy")
    run = start({**data, "text": copy}, tmp_path / "run")
    (copy / "train.txt").write_text("w1 w2 w3\n" * 60)
    assert resume(run) == 1
    assert cli.main(["evaluate", str(run)]) == 1
    assert capsys.readouterr().err.count("data: expected what") == 2


def test_settings_that_make_another_run_of_it_are_refused_and_others_taken_over(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(data, tmp_path / "run")
    assert resume(run, "--dim 12") == 1
    assert f"dim: expected 8, as in {run / 'config.toml'}, got 12" in capsys.readouterr().err
    assert resume(run, task="xc") == 1
    assert "run: expected one on xc" in capsys.readouterr().err
    assert resume(run, "--epochs 3 --lr 0.5") == 0
    assert [line["lr"] for line in records(run, "train")][39:41] == [0.02, 0.5]
    assert len(records(run, "train")) == 60
    capsys.readouterr()
    assert resume(run) == 0
    assert "nothing was left to do; --resume with a larger --epochs goes on" in capsys.readouterr().out


def test_a_full_disk_leaves_the_last_checkpoint_whole(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run, write = start(data, tmp_path / "whole"), tmp_path / "run", save_file

    def full(tensors: Any, file: Path) -> None:
        if "step-000000016" in str(file):
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(tensors, file)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full)
        assert cli.main(command(data, run)) == 1
    said = capsys.readouterr().err
    assert "expected to write a checkpoint, got [Errno 28] No space left on device; the last checkpoint is" in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000000008"]
    assert resume(run) == 0
    assert losses(run) == losses(whole)


@pytest.mark.parametrize("most", [400, 6000])
def test_a_limit_on_the_size_of_files_is_said_in_one_line(
    most: int,
    data: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What safetensors and torch raise is no OSError: here they meet a real failure, by turns."""
    run, save = start(data, tmp_path / "run"), checkpoints.save
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*arguments: Any) -> Path:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            return save(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(checkpoints, "save", limited)
    monkeypatch.setattr(Run, "events", lambda run: NoEvents())  # its thread writes when it likes
    before = checkpoints.saved(run / "checkpoints")
    assert resume(run, "--epochs 3") == 1
    said = capsys.readouterr().err
    assert "expected to write a checkpoint, got" in said
    assert len(said.splitlines()) == 1
    assert checkpoints.saved(run / "checkpoints") == before


def test_checkpoints_are_the_last_two_and_the_best(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([10.0, 9.0, 9.5, 9.6, 9.7])
    monkeypatch.setattr(TextTask, "evaluate", lambda *_: {"perplexity": next(scores)})
    run = start(data, tmp_path / "run", "--epochs 5")
    assert [path.name for path in checkpoints.saved(run / "checkpoints")] == [
        "step-000000040",
        "step-000000096",
        "step-000000100",
    ]
    assert checkpoints.find(run / "checkpoints", "best").name == "step-000000040"
    assert checkpoints.find(run / "checkpoints", "96").name == "step-000000096"
    with pytest.raises(FileNotFoundError, match="expected last, best or one of the steps 40, 96, 100, got 50"):
        checkpoints.find(run / "checkpoints", "50")
    with pytest.raises(ValueError, match="expected last, best or a step, got 'worst'"):
        checkpoints.find(run / "checkpoints", "worst")


def test_patience_stops_early_and_more_patience_goes_on(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = iter([10.0, 9.0, math.nan, 9.6, 9.7, 8.0])
    monkeypatch.setattr(TextTask, "evaluate", lambda *_: {"perplexity": next(scores)})
    run = start(data, tmp_path / "run", "--epochs 6 --patience 2")
    assert [line["perplexity"] for line in records(run, "valid")] == [10.0, 9.0, None, 9.6]
    assert "no better perplexity in 2 evaluations: stopped early" in capsys.readouterr().out
    assert resume(run) == 0
    assert len(records(run, "valid")) == 4
    assert resume(run, "--patience 4") == 0
    assert len(records(run, "valid")) == 6


def test_a_score_that_is_no_number_is_not_the_best(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([math.nan, math.inf, 9.0])
    monkeypatch.setattr(TextTask, "evaluate", lambda *_: {"perplexity": next(scores)})
    run = start(data, tmp_path / "run", "--epochs 3")
    assert checkpoints.read_progress(checkpoints.find(run / "checkpoints"))[0].best == 9.0


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]), ("cosine", [1, 0.853553, 0.5, 0.146447])],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, factors: list[float]) -> None:
    config = resolve("text", given={"schedule": schedule, "lr": 0.5})
    assert [learning_rate(config, step, 4) for step in range(4)] == pytest.approx([0.5 * x for x in factors], rel=1e-5)


def test_the_learning_rate_rises_at_first() -> None:
    config = resolve("text", given={"warmup": 4, "lr": 1.0})
    assert [learning_rate(config, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize("most", [0.0, 0.5, 100.0])
def test_clipping_sparse_gradients_equals_clipping_dense_ones(most: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ids, values = torch.tensor([[3, 0, 3, 7, 3]]), torch.randn(5, 4, generator=generator)
    sparse, dense, other = (nn.Parameter(torch.zeros(9, 4)) for _ in range(3))
    sparse.grad = torch.sparse_coo_tensor(ids, values, (9, 4))
    dense.grad = sparse.grad.to_dense()
    other.grad = torch.randn(9, 4, generator=generator)
    twin = nn.Parameter(torch.zeros(9, 4))
    twin.grad = other.grad.clone()
    norm = clip_gradients([sparse, other, nn.Parameter(torch.zeros(1))], most)
    expected = nn.utils.clip_grad_norm_([dense, twin], most or math.inf)
    assert norm == pytest.approx(float(expected))
    torch.testing.assert_close(sparse.grad.to_dense(), dense.grad)
    torch.testing.assert_close(other.grad, twin.grad)


def test_training_with_sparse_gradients_clips_as_with_dense_ones(data: dict[str, Path], tmp_path: Path) -> None:
    """By SGD, for which a row without a gradient stays where it is in both."""
    options = "--optimizer sgd --method unigram --clip 0.1 --lr 0.5 --dropout 0"
    dense = start(data, tmp_path / "dense", f"{options} --sparse-from 1000")
    sparse = start(data, tmp_path / "sparse", f"{options} --sparse-from 0")
    numbers = [[line["loss"] for line in records(run, "train")] for run in (dense, sparse)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)
    assert all(line["grad_norm"] > 0.1 for line in records(dense, "train"))


def test_the_event_files_hold_each_step_once_whatever_happened(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        break_at(patch, 31, kill)
        with pytest.raises(KilledError):
            start(data, run)
    assert resume(run) == 0
    (file,) = (run / "tensorboard").iterdir()
    events = EventAccumulator(str(file), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in records(run, "train")]
    assert [event.step for event in events.Scalars("valid/perplexity")] == [20, 40]


@pytest.mark.parametrize(("task", "pictures"), [("text", {"loss", "perplexity"}), ("xc", {"loss", "precision", "psp"})])
def test_a_run_ends_with_its_pictures(task: str, pictures: set[str], data: dict[str, Path], tmp_path: Path) -> None:
    directory = start(data, tmp_path / "run", "--epochs 1", task) / "plots"
    assert {file.name for file in directory.iterdir()} == {f"{name}.png" for name in pictures}
    assert all(file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 3000 for file in directory.iterdir())


def test_a_short_run_has_a_line_of_metrics_too(data: dict[str, Path], tmp_path: Path) -> None:
    run = start(data, tmp_path / "run", f"--log-every {DEFAULTS['text'].log_every}")
    assert [line["step"] for line in records(run, "train")] == [20, 40]
