"""Each example of a whole training, run as its reader would: the exact loss falls, and a checkpoint keeps it."""

import os
import re
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
