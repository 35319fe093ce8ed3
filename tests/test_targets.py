import re

import pytest
import torch
from torch import Tensor

from rfsoftmax.targets import as_labels

NUM_CLASSES = 10
IGNORE = -100


def labels_of(target: object, *batch_shape: int, ignore_index: int = IGNORE) -> Tensor:
    return as_labels(target, torch.Size(batch_shape), NUM_CLASSES, ignore_index)  # type: ignore[arg-type]


def sets_of(labels: Tensor) -> list[list[int]]:
    """The labels of each row in order, repeats kept."""
    return [sorted(label for label in row if label >= 0) for row in labels.tolist()]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (3, 1, 2)])
def test_one_class_each_becomes_one_column_of_int64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    target = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)
    labels = labels_of(target, *shape)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [[i] for i in range(target.numel())]


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3, 1000])
def test_only_ignore_index_is_left_out_of_one_class_each(ignore_index: int) -> None:
    target = torch.tensor([2, ignore_index, 9, ignore_index])
    labels = labels_of(target, 4, ignore_index=ignore_index)
    assert labels.tolist() == [[2], [-1], [9], [-1]]
    assert target.tolist() == [2, ignore_index, 9, ignore_index]


def test_a_square_target_of_a_square_batch_is_one_class_each() -> None:
    target = torch.tensor([[1, 2], [3, IGNORE]])
    assert labels_of(target, 2, 2).tolist() == [[1], [2], [3], [-1]]


def test_padded_positives_are_kept_once_each_wherever_the_padding_is() -> None:
    target = torch.tensor([[3, -1, 7, 3], [-1, -1, -1, -1], [0, 0, 0, 0], [-1, 9, 8, -1]])
    assert sets_of(labels_of(target, 4)) == [[3, 7], [], [0], [8, 9]]


def test_ignore_index_is_for_one_class_each_only() -> None:
    assert sets_of(labels_of(torch.tensor([[3, 5]]), 1, ignore_index=3)) == [[3, 5]]
    assert sets_of(labels_of((torch.tensor([3, 5]), torch.tensor([0])), 1, ignore_index=3)) == [[3, 5]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "bags", [[[1]], [[], []], [[3, 1, 2], [], [4], []], [[], [5, 5, 6]], [list(range(NUM_CLASSES))] * 3, [[], [], [0]]]
)
def test_indices_with_offsets_are_the_padded_form(bags: list[list[int]], dtype: torch.dtype) -> None:
    indices = torch.tensor([i for bag in bags for i in bag], dtype=dtype)
    lengths = torch.tensor([0] + [len(bag) for bag in bags[:-1]])
    width = max(1, *map(len, bags), 1)
    padded = torch.tensor([bag + [-1] * (width - len(bag)) for bag in bags])
    labels = labels_of((indices, lengths.cumsum(0).to(dtype)), len(bags))
    assert labels.dtype == torch.int64
    assert torch.equal(labels, labels_of(padded, len(bags)))


def test_indices_with_offsets_serve_any_batch_shape_and_may_come_as_a_list() -> None:
    pair = [torch.tensor([1, 2, 3]), torch.tensor([0, 0, 1, 3])]  # a DataLoader's collation makes lists of pairs
    assert sets_of(labels_of(pair, 2, 2)) == [[], [1], [2, 3], []]


def test_a_padded_target_may_have_no_columns() -> None:
    assert sets_of(labels_of(torch.empty(2, 0, dtype=torch.int64), 2)) == [[], []]


def test_indices_with_offsets_may_be_of_no_rows() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert labels_of((nothing, nothing), 0).shape == (0, 1)


OK = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (torch.tensor([1, 10]), ValueError, "target: expected class ids in [0, 10), got 10"),
        (torch.tensor([1, -1]), ValueError, "target: expected class ids in [0, 10), got -1"),
        (torch.tensor([1, -7]), ValueError, "target: expected class ids in [0, 10), got -7"),
        (torch.tensor([[1, 10], [2, 3]]), ValueError, "target: expected class ids in [-1, 10), got 10"),
        (torch.tensor([[1, IGNORE], [2, 3]]), ValueError, "target: expected class ids in [-1, 10), got -100"),
        (torch.tensor([1.0, 2.0]), TypeError, "target: expected int64 class ids, got torch.float32"),
        (torch.tensor([True, False]), TypeError, "target: expected int64 class ids, got torch.bool"),
        (torch.tensor([[1.0], [2.0]]), TypeError, "target: expected int64 class ids, got torch.float32"),
        (torch.tensor([1, 2, 3]), ValueError, "target: expected shape (2,), (B, P) padded with -1, or a pair"),
        (torch.tensor(1), ValueError, "or a pair (indices, offsets), got ()"),
        (torch.ones(3, 2, dtype=torch.int64), ValueError, "got (3, 2)"),
        (torch.ones(2, 1, 1, dtype=torch.int64), ValueError, "got (2, 1, 1)"),
        (None, TypeError, "target: expected a tensor or a pair (indices, offsets) of tensors, got <class 'NoneType'>"),
        (3, TypeError, "got <class 'int'>"),
        ((OK,), TypeError, "target: expected a tensor or a pair (indices, offsets) of tensors"),
        ((OK, OK, OK), TypeError, "target: expected a tensor or a pair (indices, offsets) of tensors"),
        ((OK, [0, 1]), TypeError, "target: expected a tensor or a pair (indices, offsets) of tensors"),
        ((OK[:, None], torch.tensor([0, 1])), ValueError, "target: expected indices of shape (K,)"),
        ((torch.tensor(1), torch.tensor([0, 1])), ValueError, "target: expected indices of shape (K,)"),
        ((OK, torch.tensor([0])), ValueError, "offsets of shape (2,), got (2,) and (1,)"),
        ((OK, torch.tensor([0, 1, 2])), ValueError, "offsets of shape (2,), got (2,) and (3,)"),
        ((OK, torch.tensor([0.0, 1.0])), TypeError, "target[1] (offsets): expected int64, got torch.float32"),
        ((OK, torch.tensor([1, 2])), ValueError, "target[1] (offsets): expected to start at 0"),
        ((OK, torch.tensor([0, 3])), ValueError, "to end at 2 or before, got row 1 from 3 to 2"),
        ((OK, torch.tensor([0, -1])), ValueError, "never to fall and to end at 2 or before, got row 0 from 0 to -1"),
        ((OK.float(), torch.tensor([0, 1])), TypeError, "target[0] (indices): expected int64 class ids"),
        ((torch.tensor([1, 10]), torch.tensor([0, 1])), ValueError, "target[0] (indices): expected class ids"),
        ((torch.tensor([1, -1]), torch.tensor([0, 1])), ValueError, "in [0, 10), got -1"),
    ],
)
def test_a_bad_target_is_named_with_what_was_expected(target: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        labels_of(target, 2)


def test_indices_of_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("target[0] (indices): expected none for no rows, got 2")):
        labels_of((OK, torch.empty(0, dtype=torch.int64)), 0)


def test_a_padded_target_is_for_a_batch_of_one_dimension() -> None:
    with pytest.raises(ValueError, match=re.escape("target: expected shape (2, 3), (B, P) padded with -1")):
        labels_of(torch.ones(6, 2, dtype=torch.int64), 2, 3)
