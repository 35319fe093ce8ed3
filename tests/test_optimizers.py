"""The compiled SparseAdam against torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rfsoftmax as rf
from rfsoftmax import threads

# torch's own optimizer makes tensors without saying whether they are to be checked.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

KINDS = (torch.optim.SparseAdam, rf.SparseAdam)


def gradient(shape: tuple[int, ...], step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A sparse gradient of a third of the rows, some of them twice."""
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(shape[0], (1, shape[0] // 3), generator=g)
    values = torch.randn(ids.shape[1], *shape[1:], generator=g, dtype=dtype)
    return torch.sparse_coo_tensor(ids, values, shape, check_invariants=True)


def parameters(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=dtype)
    return [nn.Parameter(value.clone()) for _ in KINDS]


@pytest.mark.parametrize("shape", [(6, 1), (30,), (507, 7), (40, 3, 5), (20_000, 64)])
@pytest.mark.parametrize("options", [{}, {"maximize": True, "lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}])
def test_steps_and_state_are_those_of_torch(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    pair = parameters(shape)
    optimizers = [kind([p], **options) for kind, p in zip(KINDS, pair, strict=True)]
    for step in range(4):
        for p, optimizer in zip(pair, optimizers, strict=True):
            p.grad = gradient(shape, step)
            optimizer.step()
    torch.testing.assert_close(pair[1], pair[0], rtol=1e-12, atol=1e-12)
    theirs, ours = (optimizer.state_dict() for optimizer in optimizers)
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-12, atol=1e-12)
    assert ours["param_groups"] == theirs["param_groups"]


def test_float32_is_no_less_exact_than_torch() -> None:
    truth = parameters((300, 16))[0]
    rounded = parameters((300, 16), torch.float32)
    for p, kind in ((truth, KINDS[0]), *zip(rounded, KINDS, strict=True)):
        optimizer = kind([p], lr=0.01)
        for step in range(10):
            p.grad = gradient((300, 16), step).to(p.dtype)
            optimizer.step()
    errors = [float((p.detach().double() - truth.detach()).abs().max()) for p in rounded]
    assert errors[1] <= 2 * errors[0] + 1e-7


def test_a_checkpoint_of_torch_goes_on_here() -> None:
    pair = parameters((50, 4))
    optimizers = [torch.optim.SparseAdam([p], lr=0.05) for p in pair]
    for p, optimizer in zip(pair, optimizers, strict=True):
        p.grad = gradient((50, 4), 1)
        optimizer.step()
    ours = rf.SparseAdam([pair[1]], lr=0.9)
    ours.load_state_dict(optimizers[1].state_dict())
    for p, optimizer in zip(pair, (optimizers[0], ours), strict=True):
        p.grad = gradient((50, 4), 2)
        optimizer.step()
    torch.testing.assert_close(pair[1], pair[0], rtol=1e-12, atol=1e-12)


def test_rows_without_a_gradient_stay_as_they_are() -> None:
    p = parameters((40, 3))[0]
    before, p.grad = p.detach().clone(), gradient((40, 3), 0)
    rf.SparseAdam([p], lr=0.1).step()
    touched = (p.grad.to_dense() != 0).any(1)
    assert torch.equal((p != before).any(1), touched)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_gradient_counts_as_a_step_and_moves_nothing(kind: Any) -> None:
    p = parameters((9, 2))[0]
    before, optimizer = p.detach().clone(), kind([p])
    p.grad = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 2).double(), (9, 2))
    optimizer.step()
    assert torch.equal(p, before)
    assert optimizer.state[p]["step"] == 1


def test_a_dense_gradient_is_refused_as_by_torch() -> None:
    p = parameters((9, 2))[0]
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="dense gradients"):
        rf.SparseAdam([p]).step()


def test_what_it_does_not_suit_is_left_to_torch() -> None:
    pair = [nn.Parameter(p.detach().to(torch.bfloat16)) for p in parameters((30, 4))]
    for p, kind in zip(pair, KINDS, strict=True):
        p.grad = gradient((30, 4), 0, torch.bfloat16)
        kind([p], lr=0.1).step()
    assert torch.equal(*pair)


def test_the_closure_is_called_with_gradients_on_and_its_loss_returned() -> None:
    table = nn.Embedding(20, 3, sparse=True)
    optimizer = rf.SparseAdam(table.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = table(torch.tensor([1, 2])).sum()
        loss.backward()
        return loss

    before = table.weight.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(float(before[1:3].sum()))
    assert not torch.equal(table.weight, before)


def test_gradients_of_the_closure_decide_what_is_left_to_torch() -> None:
    pair = [nn.Parameter(p.detach().to(torch.bfloat16)) for p in parameters((30, 4))]
    for p, kind in zip(pair, KINDS, strict=True):

        def closure(p: nn.Parameter = p) -> float:
            p.grad = gradient((30, 4), 0, torch.bfloat16)
            return 7.0

        assert kind([p], lr=0.1).step(closure) == 7.0
    assert torch.equal(*pair)
    dense = parameters((9, 2))[0]
    with pytest.raises(RuntimeError, match="dense gradients"):
        rf.SparseAdam([dense]).step(lambda: dense.sum().backward())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_run_once_a_step(dtype: torch.dtype) -> None:
    p = parameters((30, 4), dtype)[0]
    torch.optim.SparseAdam([p])  # the first one has torch wrap the step that ours may be left to
    optimizer, calls = rf.SparseAdam([p]), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    p.grad = gradient((30, 4), 0, dtype)
    optimizer.step()
    assert calls == ["before", "after"]


def test_a_schedule_and_a_tensor_learning_rate_are_followed() -> None:
    pair = parameters((30, 4))
    for p, kind in zip(pair, KINDS, strict=True):
        optimizer = kind([p], lr=torch.tensor(0.1, dtype=torch.float64))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(3):
            p.grad = gradient((30, 4), step)
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(pair[1], pair[0], rtol=1e-12, atol=1e-12)


def test_the_result_does_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = parameters((500, 8))
    for p, least in zip(pair, (10**9, 1), strict=True):
        monkeypatch.setattr(threads, "_MIN_WORK_PER_THREAD", least)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        p.grad = gradient((500, 8), 0)
        rf.SparseAdam([p]).step()
    assert torch.equal(*pair)
