"""`torchrun -m rfsoftmax train ... --shard-classes`: it learns, goes on after any end, and ends when a rank does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rfsoftmax import SoftmaxHead
from rfsoftmax.lab import checkpoints, cli
from rfsoftmax.lab.commands import load
from rfsoftmax.lab.config import resolve
from rfsoftmax.lab.outputs import make_output
from rfsoftmax.lab.parallel import own_rows
from rfsoftmax.lab.tasks import make_task
from rfsoftmax.ranks import Ranks
from test_lab_train import SMALL, records, write_corpus, write_points

SECONDS = 240  # a run of a few seconds may take so long on a busy machine


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("data")
    points = write_points(directory / "points.txt", num=255)  # batches of 12, the last with one point
    return {"text": write_corpus(directory), "xc": points, "cache": directory / "cache"}


def command(num: int, *arguments: str) -> list[str]:
    """torchrun with so many ranks; `--standalone` looks for a port of its own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
    return [*launch, "-m", "rfsoftmax", *arguments]


def new_run(data: dict[str, Path], run: Path, task: str, options: str) -> list[str]:
    place = ["train", task, "--data", str(data[task]), "--cache", str(data["cache"]), "--run-directory", str(run)]
    return [*place, *SMALL[task].split(), "--log-every", "1", "--shard-classes", *options.split()]


def run_ranks(num: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(num, *arguments), capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
    )


def train(num: int, data: dict[str, Path], run: Path, task: str = "text", options: str = "") -> str:
    done = run_ranks(num, *new_run(data, run, task, options))
    assert done.returncode == 0, done.stderr
    return done.stdout


def resume(num: int, run: Path, task: str = "text", options: str = "") -> str:
    done = run_ranks(num, "train", task, "--run-directory", str(run), "--resume", *options.split())
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run, "train")]


def test_two_ranks_learn_and_one_process_uses_what_they_saved(
    data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = train(2, data, tmp_path / "run", options="--epochs 2 --save-every 0")
    valid = records(tmp_path / "run", "valid")
    assert [line.split("  ")[0] for line in said.splitlines() if line.startswith("epoch")] == ["epoch 1", "epoch 2"]
    assert valid[-1]["perplexity"] < 0.75 * valid[0]["perplexity"] < 15
    assert [record["step"] for record in records(tmp_path / "run", "train")] == list(range(1, 41))
    trained = load(tmp_path / "run", "last")
    assert isinstance(trained.model.head, SoftmaxHead)
    assert cli.main(["evaluate", str(tmp_path / "run"), "--checkpoint", "last", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] == pytest.approx(valid[-1]["perplexity"], rel=1e-5)
    assert cli.main(["predict", str(tmp_path / "run"), "w1 w2"]) == 0
    assert cli.main(["diagnose", str(tmp_path / "run"), "--contexts", "8", "--draws", "3"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "num", "options"),
    [
        ("text", 2, ""),
        ("text", 3, "--method unigram --sparse-from 1 --negatives shared --bias"),
        ("text", 2, "--method nce --optimizer adagrad"),
        ("xc", 3, "--sparse-from 1"),
        ("xc", 4, "--method log_uniform --labels pick_one --dropout 0.1"),
    ],
)
def test_a_run_goes_on_to_the_last_bit_on_as_many_ranks_and_well_on_any(
    task: str, num: int, options: str, data: dict[str, Path], tmp_path: Path
) -> None:
    train(num, data, tmp_path / "whole", task, f"--epochs 3 {options}")
    train(num, data, tmp_path / "part", task, f"--epochs 2 {options}")
    whole = losses(tmp_path / "whole")
    half = len(losses(tmp_path / "part"))
    assert losses(tmp_path / "part") == whole[:half]
    resume(num, tmp_path / "part", task, "--epochs 3")
    assert losses(tmp_path / "part") == whole
    resume(2 if num == 3 else 3, tmp_path / "part", task, "--epochs 4")
    resume(1, tmp_path / "part", task, "--epochs 5")
    after = losses(tmp_path / "part")
    assert len(after) == len(whole) // 3 * 5
    assert max(after[len(whole) :]) < min(after[:3])


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job_and_the_last_checkpoint_loads(
    data: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = new_run(data, run, "text", "--epochs 1000 --save-every 5 --eval-every 1000000")
    job = subprocess.Popen(command(3, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(checkpoints.saved(run / "checkpoints")) > 1, job)
    os.kill(ranks_of(job.pid)[1], signal.SIGKILL)
    killed = time.monotonic()
    _, said = job.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert job.returncode != 0
    assert "Signal 9 (SIGKILL)" in said
    step = checkpoints.read_progress(checkpoints.find(run / "checkpoints"))[0].step
    assert step % 5 == 0
    epochs = -(-(step + 1) // 20)
    resume(2, run, options=f"--epochs {epochs}")
    assert len(losses(run)) == 20 * epochs


@pytest.mark.slow
def test_ctrl_c_saves_on_all_ranks_and_says_how_to_go_on(data: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = new_run(data, run, "text", "--epochs 1000 --save-every 0 --eval-every 1000000")
    job = subprocess.Popen(command(2, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 5, job)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert f"go on with: torchrun --nproc-per-node=2 -m rfsoftmax train text --run-directory {run} --resume" in said
    assert len(losses(run)) == checkpoints.read_progress(checkpoints.find(run / "checkpoints"))[0].step


def test_torchrun_without_shard_classes_is_refused(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Ranks, "__init__", second_of_two)
    arguments = [word for word in new_run(data, tmp_path / "run", "text", "") if word != "--shard-classes"]
    assert cli.main(arguments) == 1
    said = "rfsoftmax: shard_classes: expected --shard-classes with the 2 processes of torchrun, got none\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "run").exists()


def test_a_batch_has_a_row_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "__init__", second_of_two)
    with pytest.raises(ValueError, match="batch_size: expected at least 2, one for each rank, got 1"):
        make_task(resolve("text", given={"batch_size": 1}), Ranks())


def test_methods_that_draw_nothing_cannot_be_sharded() -> None:
    with pytest.raises(ValueError, match="method: expected one that draws negatives with shard_classes, got 'full'"):
        resolve("text", given={"method": "full", "shard_classes": True})


@pytest.mark.parametrize("method", ["unigram", "log_uniform", "nce"])
def test_a_rank_has_its_part_of_the_counts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("text", given={"method": method, "shard_classes": True, "dim": 4, "num_negatives": 2})
    counts = torch.arange(1, 11)
    alone: Any = make_output(resolve("text", given={"method": method, "dim": 4, "num_negatives": 2}), counts)
    monkeypatch.setattr(Ranks, "__init__", second_of_two)
    head: Any = make_output(config, counts)
    ids = torch.arange(5)[None]
    found = head.sampler.log_prob(torch.ones(1, 4), ids)
    whole = alone.sampler.log_prob(torch.ones(1, 4), torch.arange(10)[None])[:, 5:]
    torch.testing.assert_close(found, whole.log_softmax(1))
    if method == "nce":
        assert torch.equal(head.bias, alone.bias[5:])


def second_of_two(ranks: Ranks, group: Any = None) -> None:
    ranks.group, ranks.rank, ranks.num, ranks.bytes_sent = None, 1, 2, 0


def test_rows_are_shared_evenly() -> None:
    for num in (1, 2, 3, 4):
        for rows in (0, 1, 5, 8, 20):
            parts = []
            for rank in range(num):
                ranks = Ranks()
                ranks.rank, ranks.num = rank, num
                parts.append(list(range(rows))[own_rows(rows, ranks)])
            assert [row for part in parts for row in part] == list(range(rows))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def wait_for(is_true: Any, job: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + SECONDS
    while not is_true():
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


def ranks_of(launcher: int) -> list[int]:
    """The processes that torchrun started, by number."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(int(child) for child in children)
