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
    if not isinstance(target, Tensor):
        labels = _from_bags(target, batch_shape.numel(), num_classes)
    elif target.shape == batch_shape:
        labels = _from_classes(target.reshape(-1, 1), num_classes, ignore_index)
    elif len(batch_shape) == 1 and target.dim() == 2 and len(target) == batch_shape[0]:
        check_ids("target", target, num_classes, lowest=-1)
        labels = target
    else:
        forms = f"{tuple(batch_shape)}, (B, P) padded with -1, or a pair (indices, offsets)"
        raise ValueError(f"target: expected shape {forms}, got {tuple(target.shape)}")
    return once_each(labels.long())


def _from_classes(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    if target.dtype == torch.int64 and target.numel() and not 0 <= ignore_index < num_classes:
        low, high = (int(bound) for bound in target.aminmax())
        if low >= 0 and high < num_classes:  # as nearly always: none to ignore, and one call in place of five
            return target
    ignored = target == ignore_index
    # -1 is no padding here, but a class out of range unless it is the ignore_index.
    check_ids("target", target.masked_fill(ignored, 0), num_classes)
    return target.masked_fill(ignored, -1)


def _from_bags(target: tuple[Tensor, Tensor], rows: int, num_classes: int) -> Tensor:
    if not isinstance(target, tuple | list) or [isinstance(part, Tensor) for part in target] != [True, True]:
        raise TypeError(f"target: expected a tensor or a pair (indices, offsets) of tensors, got {type(target)}")
    indices, offsets = target
    if indices.dim() != 1 or offsets.shape != (rows,):
        shapes = f"{tuple(indices.shape)} and {tuple(offsets.shape)}"
        raise ValueError(f"target: expected indices of shape (K,) and offsets of shape ({rows},), got {shapes}")
    check_ids("target[0] (indices)", indices, num_classes)
    if offsets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target[1] (offsets): expected int64, got {offsets.dtype}")
    if not rows:
        if len(indices):
            raise ValueError(f"target[0] (indices): expected none for no rows, got {len(indices)}")
        return indices.new_empty(0, 1)
    ends = torch.cat([offsets[1:], offsets.new_tensor([len(indices)])])
    wrong = ends < offsets
    wrong[0] |= offsets[0] != 0
    if bool(wrong.any()):
        bag = int(wrong.nonzero()[0])
        need = f"to start at 0, never to fall and to end at {len(indices)} or before"
        raise ValueError(f"target[1] (offsets): expected {need}, got row {bag} from {offsets[bag]} to {ends[bag]}")
    lengths = ends - offsets
    row = torch.repeat_interleave(lengths)
    labels = indices.new_full((rows, max(1, int(lengths.max()))), -1)
    labels[row, torch.arange(len(indices), device=indices.device) - offsets[row]] = indices
    return labels
