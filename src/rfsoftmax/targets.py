"""The three forms of a target, made into one: labels (N, P), int64, distinct in each row, padded with -1."""

import torch
from torch import Tensor

from .samplers.base import check_ids, once_each

Target = Tensor | tuple[Tensor, Tensor]


def as_labels(target: Target, batch_shape: torch.Size, num_classes: int, ignore_index: int) -> Tensor:
    """Labels of N = prod(batch_shape) rows.

    A tensor of shape `batch_shape` holds one class each, or `ignore_index` for a row to leave out; (B, P) holds the
    positives of B rows padded with -1; a pair (indices, offsets) holds them one row after another, row b from
    offsets[b] on, as in `torch.nn.EmbeddingBag`.
    """
    if isinstance(target, tuple):
        labels = _from_bags(*target, rows=batch_shape.numel())
    elif target.shape == batch_shape:
        labels = torch.where(target == ignore_index, -1, _without_strays(target, ignore_index)).reshape(-1, 1)
    elif len(batch_shape) == 1 and target.dim() == 2 and len(target) == len(batch_shape) * batch_shape[0]:
        labels = target
    else:
        forms = f"{tuple(batch_shape)}, (B, P) padded with -1, or a pair (indices, offsets)"
        raise ValueError(f"target: expected shape {forms}, got {tuple(target.shape)}")
    check_ids("target", labels, num_classes, lowest=-1)
    return once_each(labels.long())


def _without_strays(target: Tensor, ignore_index: int) -> Tensor:
    """The target, whose -1 is no padding but a class out of range unless it is the ignore_index."""
    if ignore_index != -1 and bool((target == -1).any()):
        raise ValueError(f"target: expected classes from 0 on or ignore_index={ignore_index}, got -1")
    return target


def _from_bags(indices: Tensor, offsets: Tensor, rows: int) -> Tensor:
    check_ids("target[1] (offsets)", offsets, len(indices) + 1)
    if indices.dim() != 1 or offsets.shape != (rows,):
        shapes = f"{tuple(indices.shape)} and {tuple(offsets.shape)}"
        raise ValueError(f"target: expected indices of shape (K,) and offsets of shape ({rows},), got {shapes}")
    ends = torch.cat([offsets[1:], offsets.new_tensor([len(indices)])])
    if int(offsets[0]) != 0 or bool((ends < offsets).any()):
        raise ValueError("target[1] (offsets): expected to start at 0 and never to fall, got otherwise")
    lengths = ends - offsets
    row = torch.repeat_interleave(lengths)
    labels = indices.new_full((rows, max(1, int(lengths.max()))), -1)
    labels[row, torch.arange(len(indices), device=indices.device) - offsets[row]] = indices
    return labels
