"""Memory for scattered rows: taken over where it fits, in huge pages where the system has them."""

import sys
from pathlib import Path

import pytest
import torch

import rfsoftmax as rf
from rfsoftmax import memory

MANY = 1 << 22  # float32 numbers: 16 MB


def test_room_is_taken_over_only_if_it_fits() -> None:
    old = torch.zeros(3, 4)
    assert memory.room((3, 4), torch.zeros(()), old) is old
    for shape, like in (((4, 3), torch.zeros(())), ((3, 4), torch.zeros((), dtype=torch.float64))):
        made = memory.room(shape, like, old)
        assert made is not old
        assert (made.shape, made.dtype) == (shape, like.dtype)


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(3), torch.zeros(MANY), torch.zeros(9, device="meta")])
def test_the_tensor_stays_as_it_is(tensor: torch.Tensor) -> None:
    assert memory.in_huge_pages(tensor) is tensor
    if tensor.device.type == "cpu":
        assert not tensor.any()


@pytest.mark.skipif(sys.platform != "linux", reason="the hint is Linux's")
def test_the_memory_of_large_heads_and_of_their_optimizer_is_marked() -> None:
    head = rf.SoftmaxHead(64, MANY // 64, "uniform")
    optimizer = rf.SparseAdam([head.weight])
    head(torch.randn(2, 64), torch.tensor([1, 2])).backward()
    optimizer.step()
    state = optimizer.state[head.weight]
    for tensor in (head.weight, state["exp_avg"], state["exp_avg_sq"]):
        assert "hg" in flags(tensor.data_ptr() + tensor.nbytes // 2)


def flags(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            low, high = (int(edge, 16) for edge in name.split("-"))
            inside = low <= address < high
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError("no mapping holds the address")
