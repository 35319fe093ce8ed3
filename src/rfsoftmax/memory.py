"""Memory for rows that are read and written here and there: in huge pages, where the system has them.

With pages of 4 kB, each row that is far from the last one costs a walk of the page table, which takes longer than the
row itself.
"""

import ctypes
import mmap
import sys

import torch
from torch import Tensor

# Below it a tensor fits the page table's cache anyhow.
_LEAST_BYTES = 1 << 22
_madvise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None


def room(shape: tuple[int, ...], like: Tensor, old: Tensor | None = None) -> Tensor:
    """A tensor of the dtype and device of `like` to be written: `old`, if it is one of that shape, else a new one."""
    if old is not None and _takes(old, shape, like):
        return old
    return in_huge_pages(like.new_empty(shape))


def in_huge_pages(tensor: Tensor) -> Tensor:
    """The tensor, after asking for huge pages for what of it has not been written yet. It is a hint and may fail."""
    if _madvise is not None and type(tensor) is Tensor and tensor.device.type == "cpu":
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if tensor.nbytes >= _LEAST_BYTES:
            _madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_HUGEPAGE))
    return tensor


def _takes(old: Tensor, shape: tuple[int, ...], like: Tensor) -> bool:
    # What was made in inference mode cannot be written outside it.
    writable = torch.is_inference_mode_enabled() or not old.is_inference()
    return writable and (old.shape, old.dtype, old.device) == (shape, like.dtype, like.device)
