"""Kernels of numba give the same numbers in the process that compiles them and in those that find them in the cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Steps of a head with a training sampler, in a new process; prints the bits of all that came of them.
STEPS = """
import torch, rfsoftmax as rf
torch.manual_seed(0)
encoder, head = torch.nn.Linear(24, 24), rf.SoftmaxHead(24, 300, num_negatives=10, negatives={negatives!r})
optimizers = [torch.optim.Adam(encoder.parameters(), lr=0.05), rf.SparseAdam([head.weight], lr=0.05)]
for _ in range(40):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = head(encoder(torch.randn(12, 24)), torch.randint(300, (12,)))
    loss.backward()
    print(loss.item().hex())
    for optimizer in optimizers:
        optimizer.step()
print(head.weight.detach().double().sum().item().hex(), head.sampler.tree.sums.double().sum().item().hex())
"""


@pytest.mark.slow
@pytest.mark.parametrize("negatives", ["per_example", "shared"])
def test_the_first_process_ever_computes_what_later_ones_do(negatives: str, tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STEPS.format(negatives=negatives)]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert len(first.splitlines()) == 41
    assert second == first
