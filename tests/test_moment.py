"""MomentSampler under the contract of sampler_contract.py, against blocks of plain lists, then the laws of its own."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rfsoftmax as rf
from rfsoftmax import moment_kernels, tree
from rfsoftmax.samplers import MomentSampler, moment
from sampler_contract import (
    DIM,
    DOUBLE,
    SINGLE,
    TAU,
    Options,
    SamplerContract,
    all_log_probs,
    assert_near,
    exclusions,
    problem,
    seeded,
    settle,
    without,
)

Backend = Literal["numba", "torch"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
BLOCK_SIZES = (1, 2, 7, 64, None)
on_both_backends = pytest.mark.parametrize("backend", BACKENDS)
on_every_block_size = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def naive_block_masses(sampler: MomentSampler, weight: Tensor, query: Tensor, excluded: set[int]) -> list[float]:
    """A exp(tau (h - h_bar).mu) of each block of the sampler's order, over its classes that are not excluded."""
    order, size, masses = sampler.order.tolist(), sampler.leaves.block_size, []
    anchor = sampler.anchor.double()
    for start in range(0, len(order), size):
        members = [i for i in order[start : start + size] if i not in excluded]
        weights = [math.exp(TAU * float(anchor @ weight[i])) for i in members]
        total = sum(weights)
        parts = (a / total * weight[i] for a, i in zip(weights, members, strict=True))
        centroid = sum(parts, start=torch.zeros(DIM).double())
        masses.append(total * math.exp(TAU * float((query - anchor) @ centroid)))
    return masses


def naive_inside(sampler: MomentSampler, weight: Tensor, query: Tensor, excluded: set[int]) -> list[float]:
    """p(i | block) of each class: the softmax among the classes of its block that are not excluded."""
    order, size, p = sampler.order.tolist(), sampler.leaves.block_size, [0.0] * len(weight)
    for start in range(0, len(order), size):
        members = [i for i in order[start : start + size] if i not in excluded]
        shares = [math.exp(TAU * float(query @ weight[i])) for i in members]
        for i, share in zip(members, shares, strict=True):
            p[i] = share / sum(shares)
    return p


class TestMoment(SamplerContract):
    variants: ClassVar[dict[str, Options]] = {
        f"b{block_size}-{backend}": {"block_size": block_size, "backend": backend}
        for block_size, backend in itertools.product(BLOCK_SIZES, BACKENDS)
    }
    drawn = ("b1-torch", "b2-numba", "b7-torch", "b64-numba", "bNone-numba", "bNone-torch")

    def make_sampler(self, num_classes: int, *, seed: int = 0, **options: Any) -> MomentSampler:
        return MomentSampler(DIM, tau=TAU, **options)

    def exact_probs(
        self, sampler: rf.Sampler, weight: Tensor, hidden: Tensor, exclude: Tensor | None, shared: bool
    ) -> Tensor:
        assert isinstance(sampler, MomentSampler)
        weight, hidden = weight.double(), hidden.double()
        excluded = exclude.reshape(len(hidden), -1).tolist() if exclude is not None else [[]] * len(hidden)
        gone = [set(ids) for ids in excluded]
        masses = [naive_block_masses(sampler, weight, h, e) for h, e in zip(hidden, gone, strict=True)]
        blocks = without(torch.tensor(masses, dtype=torch.float64), None)
        if shared:
            blocks, hidden, gone = blocks.mean(0, keepdim=True), hidden.mean(0, keepdim=True), [set()]
        inside = [naive_inside(sampler, weight, h, e) for h, e in zip(hidden, gone, strict=True)]
        return torch.tensor(inside, dtype=torch.float64) * blocks[:, sampler.position[:-1] // sampler.leaves.block_size]


def made(num_classes: int, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[MomentSampler, Tensor, Tensor]:
    return TestMoment().settled(num_classes, options, dtype)


def softmax_without(weight: Tensor, hidden: Tensor, exclude: Tensor | None) -> Tensor:
    return without((TAU * hidden @ weight.T).exp(), exclude)


# What q is


@on_both_backends
@pytest.mark.parametrize("block_size", [1, 65, 300])
def test_blocks_of_one_class_and_a_block_of_all_classes_are_the_softmax(block_size: int, backend: Backend) -> None:
    sampler, weight, hidden = made(65, block_size=block_size, backend=backend)
    for exclude in (None, exclusions(65)):
        expected = softmax_without(weight, hidden, exclude)
        assert_near(all_log_probs(sampler, hidden, exclude), expected.log().float())


@on_both_backends
@pytest.mark.parametrize("block_size", [2, 7, 64])
def test_blocks_of_equal_classes_are_the_softmax(block_size: int, backend: Backend) -> None:
    """Where the classes of a block agree, the centroid is all there is to know of it."""
    generator = seeded(0)
    weight = torch.randn(5, DIM, dtype=torch.float64, generator=generator).repeat_interleave(block_size, 0)
    hidden = torch.randn(4, DIM, dtype=torch.float64, generator=generator)
    sampler = TestMoment().make_sampler(len(weight), block_size=block_size, backend=backend).double()
    settle(sampler, weight, hidden)
    exclude = torch.tensor([0, -1, 3, 2 * block_size])
    assert_near(all_log_probs(sampler, hidden, exclude), softmax_without(weight, hidden, exclude).log().float())


def test_q_is_the_softmax_where_the_query_is_the_anchor() -> None:
    """Whatever the blocks: then the class weights are all of it."""
    sampler, weight, hidden = made(300, block_size=64)
    anchor = sampler.anchor[None].expand(4, -1)
    torch.testing.assert_close(anchor, hidden.mean(0, keepdim=True).expand(4, -1))
    exclude = exclusions(300)
    assert_near(all_log_probs(sampler, anchor, exclude), softmax_without(weight, anchor, exclude).log().float())


def test_block_masses_are_lower_bounds_of_the_true_ones() -> None:
    sampler, weight, hidden = made(300, block_size=7)
    _, query = next(sampler._queries(hidden, torch.empty(4, 0).long(), False, 1))
    true = F.pad(TAU * hidden @ weight[sampler.order].T, (0, 1), value=-torch.inf).view(4, 43, 7).logsumexp(2)
    assert (query.features < true + 1e-9).all()
    assert (query.features < true - 0.1).any()


def test_larger_blocks_and_an_anchor_bring_q_closer_to_the_softmax() -> None:
    """By chi2 = sum p^2 / q - 1, on average over queries that share a direction.

    What the centroids miss is alike for large blocks, and what is alike for all of them cancels.
    """
    generator = seeded(0)
    weight = F.normalize(torch.randn(1000, 32, generator=generator), dim=1)
    common = F.normalize(torch.randn(32, generator=generator), dim=0)
    hidden = F.normalize(common + 0.08 * torch.randn(200, 32, generator=generator), dim=1)
    p = (rf.DEFAULT_TAU * hidden @ weight.T).double().softmax(1)

    def chi2(sampler: rf.Sampler) -> float:
        return float((p.square() / all_log_probs(sampler, hidden).double().exp()).sum(1).mean() - 1)

    of_size = [chi2(settle(MomentSampler(32, b), weight, hidden)) for b in (4, 16, 64)]
    assert of_size[0] > 2 * of_size[1] > 4 * of_size[2]
    without_anchor = MomentSampler(32, 64).eval()
    without_anchor.rebuild(weight)
    assert of_size[-1] < chi2(without_anchor) / 2


# What is drawn


@on_every_block_size
def test_the_backends_draw_the_same(block_size: int | None) -> None:
    for n, dtype in [*itertools.product((1, 2, 65, 300), [torch.float64]), (65, torch.float32)]:
        (first, _, hidden), (second, _, _) = (made(n, dtype, block_size=block_size, backend=b) for b in BACKENDS)
        exclude = exclusions(n)
        num, least, close = (20, 1.0, DOUBLE) if dtype == torch.float64 else (250, 0.999, SINGLE)
        (ids, log_q), (other_ids, other_log_q) = (
            s.sample(hidden, num, exclude, generator=seeded(0)) for s in (first, second)
        )
        same = ids == other_ids
        assert same.double().mean() >= least
        assert_near(log_q[same], other_log_q[same], close)
        few = ids[:, :1]
        assert_near(first.log_prob(hidden, few, exclude), second.log_prob(hidden, few, exclude), close)


@pytest.mark.parametrize("name", ["draw", "log_prob", "exclude"])
def test_the_torch_backend_runs_no_kernel_and_auto_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*_: object) -> None:
        raise AssertionError("a kernel ran")

    sampler, _, hidden = made(300, backend="torch")
    monkeypatch.setattr(moment_kernels, name, kernel)
    ids = torch.zeros(4).long()
    calls: dict[str, Callable[[], object]] = {
        "draw": lambda: sampler.sample(hidden, 3),
        "log_prob": lambda: sampler.log_prob(hidden, ids),
        "exclude": lambda: sampler.sample(hidden, 3, ids),
    }
    calls[name]()
    sampler.backend = "auto"
    with pytest.raises(AssertionError, match="a kernel ran"):
        calls[name]()


@on_both_backends
@pytest.mark.parametrize("shared", [False, True])
def test_draws_do_not_depend_on_how_many_queries_fit_at_once(
    monkeypatch: pytest.MonkeyPatch, shared: bool, backend: Backend
) -> None:
    sampler, _, hidden = made(65, block_size=7, backend=backend)
    exclude = None if shared else exclusions(65)
    few = torch.arange(2).expand(1 if shared else 4, -1)

    def results() -> tuple[Tensor, ...]:
        drawn = sampler.sample(hidden, 50, exclude, generator=seeded(0), shared=shared)
        return *drawn, all_log_probs(sampler, hidden, exclude, shared), sampler.log_prob(hidden, few, exclude, shared)

    expected = results()
    for elements in (1, 3 * 65):
        monkeypatch.setattr(tree, "CHUNK_ELEMENTS", elements)
        torch.testing.assert_close(results(), expected)


@on_both_backends
def test_draws_at_the_ends_of_the_uniforms_have_probability(backend: Backend) -> None:
    """A uniform that rounding leaves past the end means the last class with mass, in the last block with mass."""
    sampler, _, hidden = made(20, block_size=3, backend=backend)
    order = sampler.order.tolist()
    exclude = torch.tensor([order[:4] + order[-5:]]).expand(4, -1)
    ends = torch.tensor([[0.0, 1 - 2.0**-53]], dtype=torch.float64).expand(4, -1).contiguous()
    ids, log_q = sampler._draw(hidden, exclude, ends, None, False)
    assert ids.tolist() == [[order[4], order[-6]]] * 4
    assert torch.isfinite(log_q).all()


@on_both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_excluding_nearly_all_the_weight_of_a_block_leaves_q_exact(dtype: torch.dtype, backend: Backend) -> None:
    """The excluded class weighs 1, the others of its block e^-60: of 1 + e^-60 - 1 nothing would remain."""
    weight, _ = problem(65, dtype=dtype)
    weight[1:] -= (weight[1:] @ weight[0]).unsqueeze(1) * weight[0] / weight[0].square().sum()
    hidden = 8 * weight[:1]
    sampler = MomentSampler(DIM, 7, tau=60 / float(weight[0] @ hidden[0]), backend=backend).to(dtype)
    settle(sampler, weight, hidden)
    exclude = torch.tensor([0])
    expected = without((sampler.tau * hidden @ weight.T).exp(), exclude)  # the query is the anchor
    assert_near(all_log_probs(sampler, hidden, exclude), expected.log().float(), SINGLE)
    samples = sampler.sample(hidden, 1000, exclude, generator=seeded(0))
    assert_near(samples.log_q, sampler.log_prob(hidden, samples.ids, exclude), SINGLE)


@on_both_backends
@pytest.mark.parametrize("scale", [0.0, 12.0, 1000.0])
def test_vectors_may_be_of_any_length(scale: float, backend: Backend) -> None:
    weight, hidden = problem(65)
    sampler = settle(TestMoment().make_sampler(65, block_size=7, backend=backend), scale * weight, hidden)
    for exclude in (None, exclusions(65)):
        assert (all_log_probs(sampler, hidden, exclude).double().exp().sum(1) - 1).abs().max() < 1e-5
        assert torch.isfinite(sampler.sample(hidden, 20, exclude).log_q).all()


# The size of a block


@pytest.mark.parametrize(
    ("num_classes", "num_negatives", "block_size"),
    [(1, 1, 8), (1600, 100, 8), (10_000, 100, 20), (10**6, 100, 200), (10**6, 10, 632), (10**8, 1, 1024)],
)
def test_the_default_block_size_costs_a_quarter_more_than_the_cheapest(
    num_classes: int, num_negatives: int, block_size: int
) -> None:
    assert moment.default_block_size(num_classes, num_negatives) == block_size
    if 8 < block_size < 1024:
        cost = {b: num_classes / b + num_negatives * b for b in range(1, 1025)}
        assert cost[block_size] == pytest.approx(1.25 * min(cost.values()), rel=0.01)


def test_block_size_follows_the_classes_unless_it_is_given() -> None:
    weight = torch.randn(2000, DIM, generator=seeded(0))
    for block_size, num_negatives, expected in ((None, 5, 40), (3, 5, 3), (None, 100, 9)):
        sampler = MomentSampler(DIM, block_size, num_negatives=num_negatives)
        sampler.rebuild(weight)
        assert sampler.leaves.block_size == expected
        assert sampler.centroids.shape == (-(-2000 // expected), DIM)


# The anchor


def test_only_draws_in_training_are_observed() -> None:
    sampler, _, hidden = made(65)
    other = hidden.flip(1)
    before = sampler.query_mean.clone()
    sampler.sample(other, 3)
    sampler.train()
    all_log_probs(sampler, other)
    assert torch.equal(sampler.query_mean, before)
    sampler.sample(other, 3)
    torch.testing.assert_close(sampler.query_mean, (before + other.mean(0)) / 2)


def test_a_rebuild_moves_anchor_and_order_and_nothing_else_does() -> None:
    sampler, weight, hidden = made(300, block_size=7)
    other = -hidden
    sampler.train()
    before, anchor, order = all_log_probs(sampler, other), sampler.anchor.clone(), sampler.order.clone()
    sampler.sample(other, 3)
    sampler.update(torch.arange(3), weight[:3])
    assert torch.equal(sampler.anchor, anchor)
    assert torch.equal(sampler.order, order)
    assert_near(all_log_probs(sampler, other), before)
    sampler.sample(other, 3)
    sampler.rebuild(weight)
    torch.testing.assert_close(sampler.anchor, (hidden.mean(0) + 2 * other.mean(0)) / 3)
    assert sampler.order.tolist() == sorted(range(300), key=lambda i: -float(weight[i] @ sampler.anchor))
    assert sampler.order[sampler.position[:-1]].tolist() == list(range(300))
    assert sampler.position[-1] == -1
    assert not torch.allclose(all_log_probs(sampler, other), before, atol=0.01)


def test_a_rebuild_keeps_anchor_and_order_if_told_to_but_not_for_other_classes() -> None:
    sampler, weight, hidden = made(65)
    sampler.train().sample(-hidden, 3)
    anchor, order = sampler.anchor.clone(), sampler.order.clone()
    sampler.keep_order = True
    sampler.rebuild(weight.flip(0))
    assert torch.equal(sampler.anchor, anchor)
    assert torch.equal(sampler.order, order)
    assert not sampler.keep_order
    sampler.keep_order, sampler.num_classes = True, 0
    sampler.rebuild(weight[:9])
    assert torch.equal(sampler.anchor, sampler.query_mean)
    assert len(sampler.order) == 9


def test_a_state_dict_holds_anchor_and_order_and_no_sums() -> None:
    sampler, _, _ = made(65)
    assert set(sampler.state_dict()) == {"anchor", "query_mean", "batches_seen", "order"}


# At the door


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dim": 0}, "dim: expected at least 1, got 0"),
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"num_negatives": 0}, "num_negatives: expected at least 1, got 0"),
        ({"backend": "cuda"}, "backend: expected one of ('auto', 'torch', 'numba'), got 'cuda'"),
    ],
)
def test_bad_options_are_refused_by_name(options: Options, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        MomentSampler(**{"dim": DIM, **options})


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hidden", lambda s, wide: s.train().sample(wide, 3)),
        ("hidden", lambda s, wide: s.log_prob(wide, torch.tensor([0, 1]))),
        ("rows", lambda s, wide: s.update(torch.tensor([0, 1]), wide)),
        ("weight", lambda s, wide: s.rebuild(wide.repeat(3, 1)[:5])),
    ],
    ids=["sample", "log_prob", "update", "rebuild"],
)
def test_vectors_of_another_dim_are_refused_by_name(name: str, call: Callable[[rf.Sampler, Tensor], object]) -> None:
    sampler, _, hidden = made(5)
    before, mean = all_log_probs(sampler, hidden), sampler.query_mean.clone()
    for wide in (torch.ones(2, DIM + 1), torch.ones(2, 1)):
        rows = 5 if name == "weight" else 2
        shapes = rf"expected shape \(rows, {DIM}\), got \({rows}, {wide.shape[1]}\)"
        with pytest.raises(ValueError, match=f"^{name}: {shapes}$"):
            call(sampler, wide)
        assert torch.equal(all_log_probs(sampler, hidden), before)
        assert torch.equal(sampler.query_mean, mean)


def test_it_is_made_by_name_with_its_options() -> None:
    options: Options = {"block_size": 3, "num_negatives": 7, "backend": "torch", "stratified": False}
    sampler = rf.make_sampler("moment", num_classes=9, dim=DIM, tau=5.0, **options)
    assert isinstance(sampler, MomentSampler)
    assert {name: getattr(sampler, name) for name in options} == options
    assert (sampler.dim, sampler.tau) == (DIM, 5.0)
    weight, hidden = problem(9)
    sampler.rebuild(weight)
    assert sampler.sample(hidden, 3).ids.shape == (4, 3)


def test_a_head_trains_with_it() -> None:
    head = rf.SoftmaxHead(DIM, 50, sampler=MomentSampler(DIM, num_negatives=5), num_negatives=5)
    optimizer = torch.optim.SparseAdam(head.parameters(), lr=0.05)
    hidden, target = torch.randn(64, DIM, generator=seeded(0)), torch.arange(64) % 50
    first = head.eval()(hidden, target).item()
    for _ in range(30):
        loss = head.train()(hidden, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert head.eval()(hidden, target).item() < first - 0.5
