"""Each example of a whole training, run as its reader would: the exact loss falls, and a checkpoint keeps it."""

import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"needs {package}: pip install -c constraints.txt '.[examples]', or make test-slow"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


def output(example: str) -> str:
    command = [sys.executable, f"examples/{example}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("example", ["plain_loop.py", pytest.param("lightning_module.py", marks=needs("lightning"))])
def test_the_exact_loss_falls_and_survives_a_checkpoint(example: str) -> None:
    losses = {when: float(loss) for when, loss in re.findall(r"exact loss (\w+) ([\d.]+)", output(example))}
    assert losses["saved"] < losses["before"] - 3
    assert losses["loaded"] == losses["saved"]
    assert losses["after"] < losses["loaded"]


@pytest.mark.slow
@needs("transformers")
def test_the_exact_loss_of_a_language_model_falls_and_is_that_of_hugging_face() -> None:
    found = re.findall(r"exact loss \w+ ([\d.]+) \(by Hugging Face ([\d.]+)\)", output("hugging_face_head.py"))
    (before, same_before), (after, same_after) = [(float(ours), float(theirs)) for ours, theirs in found]
    assert after < before - 3
    assert (before, after) == pytest.approx((same_before, same_after), abs=0.002)


def two_machines(*arguments: str) -> str:
    """What the first of two launchers says, started as in docs/distributed.md, with one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    place = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    jobs = [
        subprocess.Popen(
            [*launch, f"--node-rank={node}", *place, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    said, errors = zip(*(job.communicate(timeout=400) for job in jobs), strict=True)
    assert [job.returncode for job in jobs] == [0, 0], errors
    return str(said[0])


@pytest.mark.slow
def test_classes_over_two_machines_learn_and_go_on_in_one_process(tmp_path: Path) -> None:
    first = two_machines("examples/sharded_loop.py", str(tmp_path / "checkpoint"))
    before, after = re.findall(r"exact loss \w+ ([\d.]+)", first)
    assert float(after) < float(before) - 0.5
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "examples/sharded_loop.py"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "checkpoint")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    again, later = re.findall(r"exact loss \w+ ([\d.]+)", done.stdout)
    # Rank 0 alone has half of the held-out sessions.
    assert float(again) == pytest.approx(float(after), abs=0.3)
    assert float(later) < float(again)
