"""Class biases, o_i = tau h.c_i + b_i: in the losses, in the samplers that follow them, in the head."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rfsoftmax as rf
from rfsoftmax import losses
from rfsoftmax.diagnostics import diagnose
from rfsoftmax.samplers.anchor import AnchoredSampler
from sampler_contract import DIM, DOUBLE, FALSE_ALARM, TAU, all_log_probs, assert_near, p_value, problem, seeded

N, BATCH = 130, 5


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (B, d), weight (n, d), bias (n,), float64, and target (B,)."""
    weight, hidden = problem(N, BATCH, dtype=torch.float64)
    bias = 2 * torch.randn(N, generator=seeded(5), dtype=torch.float64)
    return hidden, weight, bias, torch.randint(N, (BATCH,), generator=seeded(6))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("absolute", [False, True])
def test_the_full_softmax_with_a_bias_is_cross_entropy_in_value_and_gradient(normalize: bool, absolute: bool) -> None:
    hidden, weight, bias, target = inputs()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    logits = TAU * hidden @ (F.normalize(weight, dim=1) if normalize else weight).T + bias
    expected = F.cross_entropy(logits.abs() if absolute else logits, target)
    found = rf.full_softmax_loss(
        hidden, weight, target, bias=bias, tau=TAU, normalize=normalize, absolute=absolute, chunk_size=17
    )
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("sparse", [False, True])
def test_gathered_and_shared_logits_add_the_bias_and_pass_its_gradient_on(sparse: bool) -> None:
    hidden, weight, bias, _ = inputs()
    logits = TAU * hidden @ weight.T + bias
    ids = torch.tensor([[3, 3, 9]]).expand(BATCH, 3)
    for function, chosen in ((losses.gathered_logits, ids), (losses.shared_logits, ids[0])):
        leaf = bias.clone().requires_grad_()
        found = function(hidden, weight, chosen, bias=leaf, tau=TAU, sparse=sparse)
        torch.testing.assert_close(found, logits.gather(1, ids))
        found.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.is_sparse == sparse
        expected = torch.zeros(N, dtype=torch.float64).index_put(
            (torch.tensor([3, 9]),), torch.tensor([10.0, 5.0]).double()
        )
        torch.testing.assert_close(leaf.grad.to_dense() if sparse else leaf.grad, expected)


def test_a_bias_of_another_length_is_refused() -> None:
    hidden, weight, bias, target = inputs()
    with pytest.raises(ValueError, match=r"bias: expected shape \(n,\) with n = 130, got \(129,\)"):
        rf.full_softmax_loss(hidden, weight, target, bias=bias[1:])
    sampler = rf.ExactSampler()
    with pytest.raises(ValueError, match=r"bias: expected floating shape \(130,\), one a row, got \(129,\)"):
        sampler.rebuild(weight, bias[1:])
    with pytest.raises(ValueError, match="bias: expected finite values, got nan for row 7"):
        sampler.rebuild(weight, bias.index_fill(0, torch.tensor([7]), torch.nan))


# Samplers


def kernel(block_size: int, anchor: bool, leaf: rf.samplers.kernel.Leaf = "exact", backend: str = "auto") -> rf.Sampler:
    kind = rf.OrthogonalFourier(DIM, 32, nu=2.0, generator=seeded(3)).double()
    return rf.KernelSampler(kind, block_size, leaf, anchor, tau=TAU, backend=backend).double()  # type: ignore[arg-type]


MAKERS: dict[str, Callable[[], rf.Sampler]] = {
    "exact": lambda: rf.ExactSampler(tau=TAU),
    "anchored": lambda: kernel(8, True),
    "anchored, torch": lambda: kernel(8, True, backend="torch"),
    "anchored, kernel leaves": lambda: kernel(8, True, "kernel"),
    "the paper's": lambda: kernel(1, False, "kernel"),
    "plain, exact leaves": lambda: kernel(8, False),
    "plain, torch": lambda: kernel(8, False, backend="torch"),
    "quadratic": lambda: rf.KernelSampler(rf.Quadratic(DIM).double(), 8, tau=TAU).double(),
    "moment": lambda: rf.MomentSampler(DIM, 8, tau=TAU).double(),
    "moment, torch": lambda: rf.MomentSampler(DIM, 8, tau=TAU, backend="torch").double(),
    "mixture": lambda: rf.MixtureSampler([rf.UniformSampler(N), rf.ExactSampler(tau=TAU)]),
}
all_makers = pytest.mark.parametrize("name", list(MAKERS))


def settled(name: str) -> tuple[rf.Sampler, Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias, target = inputs()
    sampler = MAKERS[name]()
    sampler.rebuild(weight, bias)
    sampler.sample(hidden, 1, generator=seeded(1))
    sampler.rebuild(weight, bias)
    return sampler.eval(), hidden, weight, bias, target


@all_makers
def test_draws_follow_log_q_which_sums_to_one_with_a_bias(name: str) -> None:
    sampler, hidden, _, _, target = settled(name)
    log_q = all_log_probs(sampler, hidden, target)
    assert_near(log_q.double().exp().sum(1), torch.ones(BATCH, dtype=torch.float64), (0, 1e-5))
    samples = sampler.sample(hidden[:1].expand(2000, -1), 50, target[:1].expand(2000), seeded(2))
    assert p_value(samples.ids, log_q[0].exp()) > FALSE_ALARM
    assert_near(samples.log_q, log_q[:1].expand(2000, -1).gather(1, samples.ids))


@all_makers
def test_an_update_of_biases_equals_a_rebuild(name: str) -> None:
    sampler, hidden, weight, bias, target = settled(name)
    again = settled(name)[0]
    ids = torch.tensor([0, 5, 64, 129])
    moved, rows = bias.clone(), weight.clone()
    moved[ids] += torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
    rows[ids] = rows[ids].flip(1)
    sampler.update(ids, rows[ids], moved[ids])
    for module in again.modules():
        if isinstance(module, AnchoredSampler):
            module.keep_order = True
    again.rebuild(rows, moved)
    assert_near(all_log_probs(sampler, hidden, target), all_log_probs(again, hidden, target), (1e-5, 1e-5))


@all_makers
def test_an_update_without_biases_keeps_them(name: str) -> None:
    sampler, hidden, weight, _, target = settled(name)
    before, ids = all_log_probs(sampler, hidden, target), torch.tensor([0, 5, 64, 129])
    sampler.update(ids, weight[ids])
    assert_near(all_log_probs(sampler, hidden, target), before, (1e-5, 1e-5))


@pytest.mark.parametrize("name", ["exact", "anchored", "moment", "plain, exact leaves"])
def test_one_block_of_all_classes_is_the_softmax_with_its_biases(name: str) -> None:
    hidden, weight, bias, target = inputs()
    whole: dict[str, Callable[[], rf.Sampler]] = {
        "exact": MAKERS["exact"],
        "anchored": lambda: kernel(N, True),
        "plain, exact leaves": lambda: kernel(N, False),
        "moment": lambda: rf.MomentSampler(DIM, N, tau=TAU).double(),
    }
    sampler = whole[name]()
    sampler.rebuild(weight, bias)
    logits = (TAU * hidden @ weight.T + bias).scatter(1, target.unsqueeze(1), -torch.inf)
    assert_near(all_log_probs(sampler, hidden, target).double(), logits.log_softmax(1), DOUBLE)


@pytest.mark.parametrize("sampler", [rf.MomentSampler(DIM, N, tau=TAU), kernel(N, False).float()])
def test_biases_of_a_sampler_that_became_double_reach_its_leaves(sampler: rf.Sampler) -> None:
    hidden, weight, bias, target = inputs()
    sampler.rebuild(weight.float())
    sampler.double().update(torch.arange(N), weight, bias)
    logits = (TAU * hidden @ weight.T + bias).scatter(1, target.unsqueeze(1), -torch.inf)
    assert_near(all_log_probs(sampler, hidden, target).double(), logits.log_softmax(1), (1e-5, 1e-5))


@pytest.mark.parametrize("name", ["anchored", "moment"])
def test_knowing_the_biases_brings_q_closer_to_the_softmax(name: str) -> None:
    sampler, hidden, weight, bias, target = settled(name)
    log_p = (TAU * hidden @ weight.T + bias).scatter(1, target.unsqueeze(1), -torch.inf).log_softmax(1)

    def chi2() -> Tensor:
        log_q = all_log_probs(sampler, hidden, target).double()
        return torch.where(log_p > -torch.inf, (2 * log_p - log_q).exp(), 0.0).sum(1) - 1

    with_bias = chi2()
    sampler.rebuild(weight)
    assert (with_bias < 0.5).all()
    assert (chi2() > 4 * with_bias).all()


# The head


def test_a_head_learns_its_biases_and_the_sampler_follows() -> None:
    head = rf.SoftmaxHead(DIM, N, num_negatives=20, bias=True)
    hidden, _, _, target = inputs()
    hidden = hidden.float()
    assert head.bias is not None
    optimizer = torch.optim.SparseAdam(list(head.parameters()), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        head(hidden, target, generator=seeded(1)).backward()
        optimizer.step()
    assert (head.bias.detach()[target] > 0).all()
    head(hidden, target, generator=seeded(1))  # the sampler looks at what has moved before it draws
    sampler = head.sampler
    assert isinstance(sampler, rf.KernelSampler)
    torch.testing.assert_close(sampler.bias[sampler.position[:-1]], head.bias.detach())


@pytest.mark.parametrize("name", ["orf", "exact"])
def test_a_bias_that_is_no_number_is_refused_before_the_sampler_takes_it(name: str) -> None:
    head = rf.SoftmaxHead(DIM, N, name, num_negatives=20, bias=True)
    hidden, _, _, target = inputs()
    head(hidden.float(), target)
    assert head.bias is not None
    with torch.no_grad():
        head.bias[target[0]] = torch.nan
    with pytest.raises(ValueError, match=f"bias: expected finite values, got NaN or inf for class {int(target[0])}"):
        head(hidden.float(), target)


def test_a_frozen_weight_with_a_trained_bias_is_followed_too() -> None:
    head = rf.SoftmaxHead(DIM, N, num_negatives=20, bias=True)
    head.weight.requires_grad_(False)
    hidden, _, _, target = inputs()
    assert head.bias is not None
    sampler = head.sampler
    assert isinstance(sampler, rf.KernelSampler)
    sampler.tolerance = 0.0  # the default would let small moves wait
    head(hidden.float(), target).backward()
    with torch.no_grad():
        assert head.bias.grad is not None
        head.bias.sub_(head.bias.grad.to_dense())
    head(hidden.float(), target)
    torch.testing.assert_close(sampler.bias[sampler.position[:-1]], head.bias.detach())


def test_the_exact_loss_log_prob_and_topk_of_a_head_have_the_bias() -> None:
    hidden, _, bias, target = inputs()
    head = rf.SoftmaxHead(DIM, N, num_negatives=20, bias=True).double().eval()
    assert head.bias is not None
    head.bias.data.copy_(bias)
    logits = head.tau * F.normalize(hidden, dim=1) @ F.normalize(head.weight, dim=1).T + bias
    torch.testing.assert_close(head(hidden, target), F.cross_entropy(logits, target))
    torch.testing.assert_close(head.log_prob(hidden, target), logits.log_softmax(1).gather(1, target[:, None])[:, 0])
    scores, ids = head.topk(hidden, 3)
    torch.testing.assert_close(scores, logits.topk(3).values)
    assert torch.equal(ids, logits.topk(3).indices)
    assert (diagnose(head, hidden, target).chi2 < 5).all()


def test_a_state_dict_holds_the_bias() -> None:
    first, second = (rf.SoftmaxHead(DIM, N, bias=True) for _ in range(2))
    assert first.bias is not None
    assert second.bias is not None
    first.bias.data.normal_(generator=seeded(0))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.bias, second.bias)
    assert rf.SoftmaxHead(DIM, N).bias is None


def test_a_bias_with_the_absolute_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="bias: expected False with loss='absolute'"):
        rf.SoftmaxHead(DIM, N, bias=True, loss="absolute")
