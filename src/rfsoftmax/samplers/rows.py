"""All class embeddings as a rebuild reads them: some at a time, so that no second copy of all of them is made."""

from collections.abc import Iterator
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import row_kernels

# Numbers read at once: a megabyte, which stays in the cache of a core while it is worked on.
CHUNK_ELEMENTS = 1 << 18


@final
class ClassRows:
    """The rows of weight (n, d), of unit length if `normalize`: `F.normalize(weight, dim=1)`, made when asked for."""

    def __init__(self, weight: Tensor, normalize: bool = False) -> None:
        self.shape = weight.shape
        self.device = weight.device
        self._weight = weight.detach()
        self._normalize = normalize
        # What the compiled gather takes.
        self._is_plain = (
            weight.device.type == "cpu" and weight.is_contiguous() and weight.dtype in (torch.float32, torch.float64)
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice | Tensor) -> Tensor:
        """Those of a slice of the classes, or of ids (k,), int64."""
        if not isinstance(which, slice):
            if self._is_plain:
                return row_kernels.gathered(self._weight, which, self._normalize)
            rows = self._weight.index_select(0, which.to(self.device))  # several times faster than an index
        else:
            rows = self._weight[which]
        return F.normalize(rows, dim=1) if self._normalize else rows

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """All of them: slices of the classes, each with its rows."""
        for part in slices(*self.shape):
            yield part, self[part]


def slices(num: int, width: int) -> list[slice]:
    """[0, num) in pieces that stay in a cache, if each of its items takes `width` numbers."""
    step = max(1, CHUNK_ELEMENTS // width)
    return [slice(start, min(start + step, num)) for start in range(0, num, step)]


def index_dtype(num: int) -> torch.dtype:
    """The smallest dtype that can number so many things; int64 indexes tensors, so convert what is looked up."""
    return torch.int32 if num < 2**31 else torch.int64
