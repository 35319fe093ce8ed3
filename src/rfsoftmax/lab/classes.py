"""What a model must know of its data, and the form of sparse inputs."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Classes:
    """What a model must know of its data: class i occurs counts[i] times in training and is called names[i].

    `num_inputs` is the number of words or features that the model's embedding holds; names may be missing.
    """

    num_inputs: int
    counts: NDArray[np.int64]
    names: tuple[str, ...]


class Bags(NamedTuple):
    """Sparse rows one after another, row b from offsets[b] on, as `nn.EmbeddingBag` takes them."""

    indices: Tensor
    offsets: Tensor
    values: Tensor
