"""The compiled `gathered_logits` and `gathered_rows` against their twins in `losses`."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rfsoftmax import logit_kernels, losses

FORMS = [
    {"normalize": normalize, "absolute": absolute, "sparse": sparse}
    for normalize in (False, True)
    for absolute in (False, True)
    for sparse in (False, True)
]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    batch, num, num_classes, dim = shape
    g = torch.Generator().manual_seed(batch + num_classes)
    hidden = torch.randn(batch, dim, generator=g, dtype=dtype)
    weight = torch.randn(num_classes, dim, generator=g, dtype=dtype)
    bias = torch.randn(num_classes, generator=g, dtype=dtype)
    return hidden, weight, bias, torch.randint(num_classes, (batch, num), generator=g)


def value_and_grads(
    module: Any, hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, **form: Any
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    logits = module.gathered_logits(leaves[0], leaves[1], ids, bias=leaves[2], tau=3.0, **form)
    (logits * logits.detach().cos()).sum().backward()
    return [logits.detach(), *(leaf.grad.to_dense() for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 5, 3), (7, 40, 9, 5), (300, 101, 507, 64)])
def test_logits_and_gradients_are_those_of_the_plain_twin(form: dict[str, Any], shape: tuple[int, ...]) -> None:
    made = inputs(shape, torch.float64)
    for found, expected in zip(
        value_and_grads(logit_kernels, *made, **form), value_and_grads(losses, *made, **form), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalize", [False, True])
def test_float32_is_no_less_exact_than_the_plain_twin(normalize: bool) -> None:
    made = inputs((20, 60, 30, 64), torch.float64)
    truth = value_and_grads(losses, *made, normalize=normalize)
    single = [x.float() if x.is_floating_point() else x for x in made]
    errors = [
        max(float((a.double() - b).abs().max()) for a, b in zip(found, truth, strict=True))
        for found in (value_and_grads(module, *single, normalize=normalize) for module in (logit_kernels, losses))
    ]
    assert errors[0] <= 2 * errors[1] + 1e-6


@pytest.mark.parametrize("normalize", [False, True])
def test_gradcheck(normalize: bool) -> None:
    hidden, weight, _, ids = inputs((3, 4, 5, 3), torch.float64)

    def logits(hidden: Tensor, weight: Tensor) -> Tensor:
        return logit_kernels.gathered_logits(hidden, weight, ids, normalize=normalize, sparse=False)

    assert torch.autograd.gradcheck(logits, (hidden.requires_grad_(), weight.requires_grad_()))


def test_a_sparse_gradient_holds_each_class_that_occurs_once_in_order() -> None:
    hidden, weight, _, ids = inputs((6, 8, 20, 4), torch.float32)
    weight.requires_grad_()
    logit_kernels.gathered_logits(hidden, weight, ids, normalize=True).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad._indices()[0], ids.unique())


def test_a_zero_row_is_normalised_as_by_torch() -> None:
    hidden, weight, bias, ids = inputs((4, 6, 3, 5), torch.float64)
    weight[1] = 0.0
    for found, expected in zip(
        value_and_grads(logit_kernels, hidden, weight, bias, ids, normalize=True),
        value_and_grads(losses, hidden, weight, bias, ids, normalize=True),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    made, before = inputs((300, 100, 5000, 64), torch.float32), torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(value_and_grads(logit_kernels, *made, normalize=True))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, _, ids = inputs((3, 4, 5, 3), torch.float32)
    (weight if frozen == "hidden" else hidden).requires_grad_()
    logit_kernels.gathered_logits(hidden, weight, ids).sum().backward()
    assert ((hidden if frozen == "hidden" else weight).grad) is None


def test_what_it_does_not_take_it_refuses() -> None:
    single, double = torch.zeros(1, 2), torch.zeros(1, 2).double()
    assert logit_kernels.suits(single, single)
    assert logit_kernels.suits(double, double)
    assert not logit_kernels.suits(single, double)
    assert not logit_kernels.suits(single.bfloat16(), single.bfloat16())
    assert not logit_kernels.suits(single, torch.empty(1, 2, device="meta"))


@pytest.mark.parametrize("most", [0, 5, 2**31, 2**62])
@pytest.mark.parametrize("size", [0, 1, 2, 507, 4096])
def test_ids_are_sorted_with_their_places(size: int, most: int) -> None:
    ids = np.random.default_rng(size).integers(0, most, size, endpoint=True)
    found, places = logit_kernels._sorted(ids)
    expected = np.argsort(ids, kind="stable")
    assert np.array_equal(places, expected)
    assert np.array_equal(found, ids[expected])


def rows_and_grad(module: Any, weight: Tensor, ids: Tensor, **form: Any) -> tuple[Tensor, Tensor]:
    leaf = weight.clone().requires_grad_()
    rows = module.gathered_rows(leaf, ids, dtype=weight.dtype, **form)
    (rows * rows.detach().cos()).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.is_sparse == form["sparse"]
    return rows.detach(), leaf.grad.to_dense()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [(1,), (40,), (3, 50)])
def test_rows_and_their_gradient_are_those_of_the_plain_twin(
    shape: tuple[int, ...], normalize: bool, sparse: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    weight, ids = torch.randn(30, 7, generator=g, dtype=torch.float64), torch.randint(30, shape, generator=g)
    weight[ids.flatten()[0]] = 0.0
    found, expected = (
        rows_and_grad(module, weight, ids, normalize=normalize, sparse=sparse) for module in (logit_kernels, losses)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gradcheck_of_rows() -> None:
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    ids, form = torch.tensor([[0, 3], [3, 4]]), {"normalize": True, "sparse": False}
    assert torch.autograd.gradcheck(
        lambda w: logit_kernels.gathered_rows(w, ids, dtype=torch.float64, **form), (weight,)
    )


@pytest.mark.parametrize("num", [40, 2_000])
def test_gradient_rows_begin_where_a_line_of_the_cache_does(num: int) -> None:
    hidden, weight, _, ids = inputs((4, num, 9_000, 64))
    weight.requires_grad_()
    logit_kernels.gathered_logits(hidden, weight, ids).sum().backward()
    assert weight.grad is not None
    assert weight.grad._values().data_ptr() % 64 == 0
