"""Memory for scattered rows: taken over where it fits, in huge pages where the system has them."""

import ctypes
import mmap
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
def test_the_memory_of_large_heads_and_of_their_optimizer_is_marked_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marked: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        assert resident(tensor) < 0.5  # what has pages already keeps them
        marked.append(memory.in_huge_pages(tensor))
        return tensor

    for module in ("head", "optimizers"):
        monkeypatch.setattr(f"rfsoftmax.{module}.in_huge_pages", noted)
    # 64 MB: allocators ask the system for so much anew.
    head = rf.SoftmaxHead(64, 4 * MANY // 64, "uniform")
    optimizer = rf.SparseAdam([head.weight])
    head(torch.randn(2, 64), torch.tensor([1, 2])).backward()
    optimizer.step()
    state = optimizer.state[head.weight]
    held = (head.weight, state["exp_avg"], state["exp_avg_sq"])
    assert [tensor.data_ptr() for tensor in marked] == [tensor.data_ptr() for tensor in held]
    for tensor in held:
        assert "hg" in mapped(tensor, "VmFlags:")


def resident(tensor: torch.Tensor) -> float:
    """The share of a tensor's pages that are in memory."""
    start, end = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * (end - start))()
    size = ctypes.c_size_t(mmap.PAGESIZE * len(found))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(mmap.PAGESIZE * start), size, found) == 0
    return sum(page & 1 for page in found) / len(found)


def mapped(tensor: torch.Tensor, name: str) -> list[str]:
    """What the system says, by that name, of the mapping that holds the middle of a tensor."""
    address, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            low, high = (int(edge, 16) for edge in key.split("-"))
            inside = low <= address < high
        elif inside and key == name:
            return rest
    raise AssertionError("no mapping holds the tensor")
