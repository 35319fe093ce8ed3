"""The laws of SoftmaxHead.

A statistical test compares a mean of independent draws with the truth and allows SIGMAS standard errors: a false alarm
once in 1.7 million comparisons for a normal mean, and there are about 20 of them. Seeds are fixed.
"""

import copy
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import rfsoftmax as rf
from rfsoftmax import losses
from rfsoftmax.head import _MAX_VISITS

SIGMAS = 5.0
DIM = 6
NUM_CLASSES = 37
MODES = ["per_example", "shared", 3]
KINDS = ["softmax", "absolute", "nce"]

modes = pytest.mark.parametrize("negatives", MODES)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def make_head(num_classes: int = NUM_CLASSES, dim: int = DIM, seed: int = 0, **options: Any) -> rf.SoftmaxHead:
    torch.manual_seed(seed)
    return rf.SoftmaxHead(dim, num_classes, **{"tau": 3.0, "num_negatives": 5, **options})


def small_rff(dim: int = DIM, seed: int = 0, tau: float = 3.0, **options: Any) -> rf.KernelSampler:
    """A tree of some depth even for few classes."""
    return rf.KernelSampler(rf.RandomFourier(dim, 64, 2.0, generator=seeded(seed)), 4, tau=tau, **options)


def hidden_of(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, DIM, generator=seeded(seed), dtype=dtype)


def target_of(*shape: int, num_classes: int = NUM_CLASSES, seed: int = 2) -> Tensor:
    return torch.randint(num_classes, shape, generator=seeded(seed))


def dense_logits(head: rf.SoftmaxHead, hidden: Tensor) -> Tensor:
    hidden, weight = (F.normalize(x, dim=-1) if head.normalize else x for x in (hidden, head.weight))
    logits = head.tau * hidden @ weight.T
    return logits.abs() if head.loss == "absolute" else logits


def bags_of(padded: Tensor) -> tuple[Tensor, Tensor]:
    """(indices, offsets) of a padded target."""
    lengths = (padded >= 0).sum(1)
    return padded[padded >= 0], lengths.cumsum(0) - lengths


def record_draws(head: rf.SoftmaxHead, monkeypatch: pytest.MonkeyPatch) -> list[rf.Samples]:
    """What the head's sampler draws from now on."""
    return record_calls(head.sampler, "_sample", monkeypatch)


def record_calls(module: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a method returns from now on."""
    results: list[Any] = []
    method = getattr(module, name)

    def recorder(*args: Any, **kwargs: Any) -> Any:
        results.append(method(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(module, name, recorder)
    return results


def positives_of(target: Tensor) -> list[set[int]]:
    rows = target.tolist() if target.dim() == 2 else [[t] for t in target.tolist()]
    return [{t for t in row if t >= 0} for row in rows]


def sets_of(head: rf.SoftmaxHead, hidden: Tensor) -> list[int]:
    """The row of the samples that holds the negatives of each row of hidden."""
    order, sizes = head._sets((F.normalize(hidden, dim=1) if head.normalize else hidden).detach())
    if sizes is None:
        return list(range(len(hidden)))
    sets = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return torch.empty_like(sets).index_copy(0, torch.arange(len(hidden))[order], sets).tolist()


def naive_losses(head: rf.SoftmaxHead, hidden: Tensor, target: Tensor, samples: rf.Samples | None) -> list[Tensor]:
    """For each row the losses of its positives, by loops; over all classes without samples."""
    rows = []
    for row, (logits, positives) in enumerate(zip(dense_logits(head, hidden), positives_of(target), strict=True)):
        if samples is None:
            terms = [logits[i].exp() for i in range(head.num_classes) if i not in positives]
        else:
            at = sets_of(head, hidden)[row]
            drawn = zip(samples.ids[at].tolist(), samples.log_q[at], strict=True)
            terms = [logits[i].exp() / (head.num_negatives * q.double().exp()) for i, q in drawn if i not in positives]
        rest = torch.stack([*terms, logits.new_zeros(())]).sum()
        rows.append(torch.stack([(logits[p].exp() + rest).log() - logits[p] for p in sorted(positives)]))
    return rows


def naive_nce(head: rf.SoftmaxHead, hidden: Tensor, target: Tensor, samples: rf.Samples) -> Tensor:
    logits, m = dense_logits(head, hidden), head.num_negatives
    queries = (F.normalize(hidden, dim=1) if head.normalize else hidden).detach()
    everything = torch.arange(head.num_classes)
    sets = torch.tensor(sets_of(head, hidden))
    log_q = head.sampler.log_prob(queries, everything.expand(len(hidden), -1))
    if head.negatives != "per_example":
        log_q = torch.cat([head.sampler.log_prob(queries[sets == k], everything[None], shared=True) for k in sets])
    odds = logits - log_q - math.log(m)
    ids = samples.ids[sets]
    noise = torch.log(1 - torch.sigmoid(odds.gather(1, ids))).sum(1)
    return -torch.log(torch.sigmoid(odds.gather(1, target[:, None])[:, 0])) - noise


def log_q_of_all(head: rf.SoftmaxHead, sampler: rf.Sampler, hidden: Tensor) -> Tensor:
    ids = torch.arange(head.num_classes).expand(len(hidden), -1)
    return sampler.log_prob(F.normalize(hidden, dim=1) if head.normalize else hidden, ids)


def staleness(head: rf.SoftmaxHead) -> float:
    """The largest error of the sampler's log q against one built from the weight as it is."""
    fresh = copy.deepcopy(head.sampler)
    weight = head.weight.detach()
    fresh.rebuild(F.normalize(weight, dim=1) if head.normalize else weight)
    queries = hidden_of(5, seed=9)
    return (log_q_of_all(head, fresh, queries) - log_q_of_all(head, head.sampler, queries)).abs().max().item()


FRESH = 1e-3  # float32 sums of the tree; a step of the tests below moves log q by more than STALE
STALE = 0.05


# --- eval: the exact loss ---


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(), (1,), (9,), (4, 3)])
def test_eval_loss_and_gradients_are_those_of_cross_entropy(
    shape: tuple[int, ...], reduction: Any, normalize: bool
) -> None:
    head = make_head(reduction=reduction, normalize=normalize).eval().double()
    hidden = hidden_of(*shape, dtype=torch.float64).requires_grad_()
    target = target_of(*shape)
    target.view(-1)[1::3] = -100
    expected = F.cross_entropy(
        dense_logits(head, hidden).view(-1, NUM_CLASSES), target.view(-1), ignore_index=-100, reduction=reduction
    )
    loss = head(hidden, target)
    assert loss.shape == (shape if reduction == "none" else ())
    torch.testing.assert_close(loss.view(-1), expected.view(-1))
    inputs = (hidden, head.weight)
    for got, truth in zip(
        torch.autograd.grad(loss.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(got, truth)


@pytest.mark.parametrize("ignore_index", [-1, 0, 3])
def test_ignore_index_may_be_any_number(ignore_index: int) -> None:
    head = make_head(ignore_index=ignore_index).eval()
    hidden, target = hidden_of(6), torch.tensor([1, ignore_index, 5, 2, ignore_index, 9])
    expected = F.cross_entropy(dense_logits(head, hidden), target, ignore_index=ignore_index)
    torch.testing.assert_close(head(hidden, target), expected)


def test_eval_loss_of_absolute_is_cross_entropy_of_absolute_logits() -> None:
    head = make_head(loss="absolute").eval()
    hidden, target = hidden_of(7), target_of(7)
    logits = 3.0 * F.normalize(hidden) @ F.normalize(head.weight).T
    torch.testing.assert_close(head(hidden, target), F.cross_entropy(logits.abs(), target))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_batch_of_ignored_rows_gives_what_cross_entropy_gives_and_no_gradient(reduction: Any, train: bool) -> None:
    head = make_head(reduction=reduction).train(train)
    target = torch.full((2,), -100)
    loss = head(hidden_of(2), target)  # hidden asks for no gradient: a frozen encoder
    expected = F.cross_entropy(torch.zeros(2, NUM_CLASSES), target, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    loss.sum().backward()
    assert head.weight.grad is None or not head.weight.grad.to_dense().any()


@modes
def test_ignored_rows_change_neither_draws_nor_losses_of_the_others(negatives: Any) -> None:
    head = make_head(negatives=negatives, reduction="none", sampler=small_rff())
    hidden, target = hidden_of(6), target_of(6)
    kept = torch.tensor([True, False, True, True, False, True])
    loss = head(hidden, target.masked_fill(~kept, -100), generator=seeded())
    assert torch.equal(loss[~kept], torch.zeros(2))
    torch.testing.assert_close(loss[kept], head(hidden[kept], target[kept], generator=seeded()))
    head.reduction = "mean"
    mean = head(hidden, target.masked_fill(~kept, -100), generator=seeded())
    torch.testing.assert_close(mean, loss[kept].mean())


# --- train: the sampled loss ---


@pytest.mark.parametrize("shape", [(), (8,), (4, 2)])
@pytest.mark.parametrize("num_negatives", [1, 20])
def test_the_exact_sampler_makes_the_sampled_loss_the_full_loss(num_negatives: int, shape: tuple[int, ...]) -> None:
    head = make_head(sampler="exact", num_negatives=num_negatives, reduction="none")
    hidden, target = hidden_of(*shape), target_of(*shape)
    sampled = head(hidden, target, generator=seeded())
    torch.testing.assert_close(sampled, head.eval()(hidden, target), rtol=1e-4, atol=1e-4)


def test_per_example_z_is_unbiased() -> None:
    head = make_head(sampler=small_rff(), reduction="none")
    hidden, target = hidden_of(4), target_of(4)
    logits = dense_logits(head, hidden).detach()
    many = 4000
    with torch.no_grad():
        loss = head(hidden.repeat(many, 1), target.repeat(many), generator=seeded()).view(many, 4)
    assert_unbiased_z(loss, logits, target)


@pytest.mark.parametrize("negatives", ["shared", 2])
def test_shared_z_is_unbiased_in_each_row_with_its_hits_masked(negatives: Any) -> None:
    # So few classes that most sets hold a positive of some row.
    head = make_head(num_classes=9, sampler=small_rff(), negatives=negatives, reduction="none")
    hidden, target = hidden_of(4), target_of(4, num_classes=9)
    logits = dense_logits(head, hidden).detach()
    generator = seeded()
    with torch.no_grad():
        loss = torch.stack([head(hidden, target, generator=generator) for _ in range(1000)])
    assert_unbiased_z(loss, logits, target)


def assert_unbiased_z(loss: Tensor, logits: Tensor, target: Tensor) -> None:
    """loss (draws, B): Z' = e^{loss + o_t}."""
    z = (loss + logits.gather(1, target[:, None])[:, 0]).double().exp()
    error = z.mean(0) - logits.double().exp().sum(1)
    assert (z.std(0) > 0.01 * z.mean(0)).all()  # they are random
    assert (error.abs() < SIGMAS * z.std(0) / math.sqrt(len(z))).all()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("loss", KINDS)
@modes
def test_loss_and_gradients_are_those_of_a_naive_loop_over_the_same_draws(
    negatives: Any, loss: Any, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(
        num_classes=9,
        sampler=small_rff(absolute=loss == "absolute"),
        negatives=negatives,
        loss=loss,
        normalize=normalize,
        reduction="none",
    ).double()
    draws = record_draws(head, monkeypatch)
    hidden, target = hidden_of(8, dtype=torch.float64).requires_grad_(), target_of(8, num_classes=9)
    got = head(hidden, target, generator=seeded())
    if loss == "nce":
        expected = naive_nce(head, hidden, target, draws[0])
    else:
        expected = torch.cat(naive_losses(head, hidden, target, draws[0]))
    torch.testing.assert_close(got, expected)
    inputs, scale = (hidden, head.weight), torch.arange(1.0, 9.0, dtype=torch.float64)
    grads = torch.autograd.grad(got @ scale, inputs), torch.autograd.grad(expected @ scale, inputs)
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours.to_dense(), truth)


def test_shared_negatives_are_one_set_and_a_row_never_meets_its_own_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(num_classes=3, num_negatives=2, sampler="uniform", negatives="shared", reduction="none").double()
    draws = record_draws(head, monkeypatch)
    hidden, target = hidden_of(3, dtype=torch.float64).requires_grad_(), torch.tensor([0, 1, 2])
    num_hits = 0
    for seed in range(10):
        loss = head(hidden, target, generator=seeded(seed))
        assert draws[-1].ids.shape == (1, 2)
        hits = (draws[-1].ids == target[:, None]).all(1)
        num_hits += int(hits.sum())
        assert torch.equal(loss[hits], torch.zeros_like(loss[hits]))  # no negative left: Z' = e^{o_t}
        expected = torch.cat(naive_losses(head, hidden, target, draws[-1]))
        torch.testing.assert_close(loss, expected)
        grads = (torch.autograd.grad(x.sum(), (hidden, head.weight)) for x in (loss, expected))
        for ours, truth in zip(*grads, strict=True):
            torch.testing.assert_close(ours.to_dense(), truth)
    assert num_hits > 0


@pytest.mark.parametrize("name", ["uniform", "log_uniform", "exact", "rff", "quadratic"])
def test_positives_are_never_drawn_for_their_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(num_classes=6, sampler=name, num_negatives=5)
    draws = record_draws(head, monkeypatch)
    target = torch.tensor([[0, 1, 2, 3], [5, -1, -1, 5], [2, 4, -1, -1], [1, 3, 5, 0]])
    for seed in range(20):
        head(hidden_of(4, seed=seed), target, generator=seeded(seed))
        assert not (draws[-1].ids[:, None, :] == target[:, :, None]).any()
    assert len(torch.stack([d.ids for d in draws])[:, 0].unique()) == 2


# --- gradients ---


@modes
def test_a_sparse_gradient_holds_the_touched_rows_and_no_others(negatives: Any, monkeypatch: Any) -> None:
    head = make_head(num_classes=200, negatives=negatives, sampler=small_rff())
    draws = record_draws(head, monkeypatch)
    target = torch.tensor([[7, -1, 9], [3, -1, -1], [-1, -1, -1], [150, 2, 3]])
    head(hidden_of(4), target, generator=seeded()).backward()
    assert head.weight.grad is not None
    assert head.weight.grad.is_sparse
    touched = torch.cat([draws[0].ids.flatten(), target[target >= 0]]).unique()
    assert 0 not in touched  # where padding could leave a trace
    assert torch.equal(head.weight.grad.coalesce().indices()[0], touched)


@pytest.mark.parametrize("loss", KINDS)
@modes
def test_the_dense_gradient_is_the_sparse_one(negatives: Any, loss: Any) -> None:
    grads = []
    for sparse in (True, False):
        sampler = small_rff(absolute=loss == "absolute")
        head = make_head(negatives=negatives, loss=loss, sparse=sparse, sampler=sampler)
        head(hidden_of(8), target_of(8), generator=seeded()).backward()
        assert head.weight.grad is not None
        assert head.weight.grad.is_sparse == sparse
        grads.append(head.weight.grad.to_dense())
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("loss", KINDS)
@modes
def test_gradcheck_where_q_does_not_move_with_the_inputs(negatives: Any, loss: Any) -> None:
    head = make_head(
        num_classes=7, sampler="uniform", negatives=negatives, loss=loss, sparse=False, reduction="none"
    ).double()
    target = torch.tensor([1, -100, 4])

    def fn(hidden: Tensor, _: Tensor) -> Tensor:
        loss: Tensor = head(hidden, target, generator=seeded())
        return loss

    assert torch.autograd.gradcheck(fn, (hidden_of(3, dtype=torch.float64).requires_grad_(), head.weight))


@pytest.mark.parametrize("labels", ["pick_all", "pick_one"])
@modes
def test_gradcheck_with_the_draws_of_a_kernel_sampler_held(
    negatives: Any, labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(num_classes=9, sampler=small_rff(), negatives=negatives, labels=labels, sparse=False).double()
    hidden = hidden_of(3, dtype=torch.float64).requires_grad_()
    target = torch.tensor([[1, 5, -1], [0, -1, -1], [2, 2, 8]])
    draws = record_draws(head, monkeypatch)
    head(hidden, target, generator=seeded())
    monkeypatch.setattr(head.sampler, "_sample", lambda *_, **__: draws[0])

    def fn(hidden: Tensor, _: Tensor) -> Tensor:
        loss: Tensor = head(hidden, target, generator=seeded())
        return loss

    assert torch.autograd.gradcheck(fn, (hidden, head.weight))


# --- freshness ---


def train_step(head: rf.SoftmaxHead, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    """One step after a forward and backward for each seed."""
    optimizer.zero_grad()
    for seed in seeds:
        head(hidden_of(3, seed=seed), target_of(3, seed=seed), generator=seeded(seed)).backward()
    optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.5),
    "SGD": lambda params: torch.optim.SGD(params, lr=5.0),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.5),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by torch's own Adagrad
@pytest.mark.parametrize("sampler", [small_rff, lambda: rf.ExactSampler(tau=3.0)])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_sampler_follows_the_optimizer(optimizer: str, normalize: bool, sampler: Callable[[], rf.Sampler]) -> None:
    head = make_head(sampler=sampler(), normalize=normalize)
    steps = OPTIMIZERS[optimizer]([head.weight])
    for seed in range(4):
        train_step(head, steps, seed)
        assert staleness(head) > STALE
        head._freshen()
        assert staleness(head) < FRESH


@pytest.mark.parametrize("fused", [False, True])
def test_the_sampler_follows_steps_that_leave_no_trace_in_the_version(fused: bool) -> None:
    head = make_head(sampler=small_rff(), sparse=False)
    optimizer, version = torch.optim.SGD([head.weight], lr=5.0, fused=fused), head.weight._version
    if fused:
        train_step(head, optimizer, 0)
    else:
        head(hidden_of(3), target_of(3)).backward()
        assert head.weight.grad is not None
        head.weight.data.sub_(5.0 * head.weight.grad)
    assert head.weight._version == version
    assert staleness(head) > STALE
    head._freshen()
    assert staleness(head) < FRESH


@pytest.mark.parametrize("update_every", [1, 2, 3, 5])
def test_gradient_accumulation_refreshes_the_rows_of_every_forward(update_every: int) -> None:
    head = make_head(num_classes=200, sampler=small_rff(), update_every=update_every)
    optimizer = torch.optim.SGD([head.weight], lr=5.0)
    for first in range(0, 12, 2):
        train_step(head, optimizer, first, first + 1)
    head.update_every = 1
    head._freshen()
    assert staleness(head) < FRESH


@pytest.mark.parametrize(("rows", "followed_every"), [(204, 1), (205, 2), (2000, 3)])
def test_of_thousands_of_negatives_the_sampler_looks_at_those_of_every_third_query_in_turn(
    rows: int, followed_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(sampler=small_rff(follow_every=3))
    head._following = 3  # five negatives a row: 1,024 in all are reached with 205 rows
    drawn: list[Tensor] = []
    draw = head._draw

    def noted(*arguments: Any) -> rf.Samples:
        samples = draw(*arguments)
        drawn.append(samples.ids)
        return samples

    monkeypatch.setattr(head, "_draw", noted)
    for forward in range(4):
        head(hidden_of(rows), target_of(rows))
        expected = torch.cat([drawn[-1][forward % followed_every :: followed_every].flatten(), target_of(rows)])
        assert torch.equal(head._visits[-1].ids, expected)


def test_the_faster_classes_move_the_more_of_them_the_sampler_looks_at() -> None:
    head = make_head(sampler=small_rff(follow_every=8))
    found: list[int] = []
    for step in (0.0, 1e-3, 1e-3, 1e-3, 1e-3, 1.0, 1.0, 1e-3):  # before each forward, of every class
        direction = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(len(found)))
        head.weight.data += step * F.normalize(direction, dim=1)
        head(hidden_of(300), target_of(300))
        found.append(head._following)
    assert found == [1, 2, 4, 8, 8, 4, 2, 4]
    copy = make_head(sampler=small_rff(follow_every=8))
    copy.load_state_dict(head.state_dict())
    assert copy._following == 4


def test_a_rebuild_between_forward_and_step_loses_no_row() -> None:
    head = make_head(num_classes=200, sampler=small_rff(), rebuild_every=3)
    optimizer = torch.optim.SGD([head.weight], lr=5.0)
    train_step(head, optimizer, 0, 1, 2, 3, 4)  # the fourth forward rebuilds
    head._freshen()
    assert staleness(head) < FRESH


def test_a_forward_that_is_never_stepped_hides_no_later_step() -> None:
    head = make_head(num_classes=200, sampler=small_rff())
    head(hidden_of(3), target_of(3))
    train_step(head, torch.optim.SGD([head.weight], lr=5.0), 3)
    head._freshen()
    assert staleness(head) < FRESH


def test_forwards_that_are_never_stepped_do_not_pile_up() -> None:
    head = make_head(sampler="uniform", rebuild_every=4)
    for _ in range(30):
        head(hidden_of(3), target_of(3))
    assert len(head._visits) <= 2 * 4


@pytest.mark.parametrize("update_every", [1, 40])
def test_the_rows_kept_of_forwards_without_a_step_are_bounded_and_none_is_lost(update_every: int) -> None:
    head = make_head(num_classes=200, sampler=small_rff(), update_every=update_every)
    visits = max(_MAX_VISITS, update_every)
    for seed in range(3 * visits):
        head(hidden_of(3, seed=seed), target_of(3, num_classes=200, seed=seed), generator=seeded(seed)).backward()
        assert len(head._visits) <= visits
        assert sum(len(visit.ids) for visit in head._visits) <= 200 + visits * 3 * (5 + 1)
    torch.optim.SGD([head.weight], lr=5.0).step()
    assert staleness(head) > STALE
    head.update_every = 1
    head._freshen()
    assert staleness(head) < FRESH


def test_update_every_lets_the_sampler_look_at_every_third_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(sampler=small_rff(), update_every=3)
    updates = record_calls(head.sampler, "_follow", monkeypatch)
    optimizer = torch.optim.SGD([head.weight], lr=1.0)
    counts = []
    for seed in range(8):
        train_step(head, optimizer, seed)
        counts.append(len(updates))
    assert counts == [0, 0, 0, 1, 1, 1, 2, 2]


def test_no_step_means_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(sampler=small_rff())
    updates = record_calls(head.sampler, "_follow", monkeypatch)
    for _ in range(3):
        head(hidden_of(3), target_of(3)).backward()
    assert updates == []


def test_rebuilds_are_frequent_at_first_and_then_every_so_many_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(sampler="uniform", rebuild_every=300)
    built: list[int] = []
    monkeypatch.setattr(head.sampler, "rebuild", lambda *_: built.append(head._all_forwards))
    hidden, target = torch.randn(2, DIM, generator=seeded(0)), torch.tensor([0, 1])
    for _ in range(1000):
        head(hidden, target)
    assert built == [0, 16, 80, 336, 636, 936]


def test_rebuild_every_counts_forwards_since_the_last_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(sampler=small_rff(), rebuild_every=3)
    rebuilds = record_calls(head.sampler, "rebuild", monkeypatch)
    counts = []
    for i in range(10):
        if i == 5:
            head.rebuild()
        head(hidden_of(3), target_of(3))
        counts.append(len(rebuilds))
    assert counts == [1, 1, 1, 2, 2, 3, 3, 3, 4, 4]


def test_rebuild_takes_in_rows_that_moved_untouched() -> None:
    head = make_head(sampler=small_rff())
    head(hidden_of(3), target_of(3))
    with torch.no_grad():
        nn.init.normal_(head.weight, generator=seeded(5))
    assert staleness(head) > STALE
    head.rebuild()
    assert staleness(head) < FRESH


def test_the_first_forward_sees_what_was_done_to_the_weight_after_construction() -> None:
    head = make_head(sampler=small_rff())
    nn.init.normal_(head.weight, generator=seeded(5))
    head(hidden_of(3), target_of(3))
    assert staleness(head) < FRESH


def test_a_frozen_head_trains_the_encoder_and_never_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(sampler=small_rff())
    head.weight.requires_grad_(False)
    before = head.weight.clone()
    encoder = nn.Linear(DIM, DIM)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3)
    updates = record_calls(head.sampler, "_follow", monkeypatch)
    hidden, target = hidden_of(8), target_of(8)
    start = head.eval()(encoder(hidden), target).item()
    head.train()
    for seed in range(40):
        optimizer.zero_grad()
        head(encoder(hidden), target, generator=seeded(seed)).backward()
        optimizer.step()
    assert head.eval()(encoder(hidden), target).item() < start - 0.5
    assert torch.equal(head.weight, before)
    assert head.weight.grad is None
    assert updates == []


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradient_sample_and_leave_training_as_it_was(
    context: Callable[[], Any], anchor: bool
) -> None:
    head = make_head(sampler=small_rff(anchor=anchor))
    with context():
        first = head(hidden_of(3), target_of(3), generator=seeded())
    assert head._visits == []
    assert torch.equal(first, head(hidden_of(3), target_of(3), generator=seeded()))
    optimizer = torch.optim.SGD([head.weight], lr=5.0)
    train_step(head, optimizer, 4)
    with context():
        head(hidden_of(3), target_of(3))  # updates
    assert anchor or staleness(head) < FRESH
    train_step(head, optimizer, 5)
    train_step(head, optimizer, 6)


# --- copies and checkpoints ---


def next_draws(head: rf.SoftmaxHead, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    with monkeypatch.context() as patch:
        draws = record_draws(head, patch)
        loss = head(hidden_of(16, seed=7), target_of(16, seed=8), generator=seeded(3))
    return draws[0].ids, draws[0].log_q, loss.detach()


def assert_same_draws(
    head: rf.SoftmaxHead, expected: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, log_q, loss = next_draws(head, monkeypatch)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(log_q, expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, expected[2], rtol=1e-4, atol=1e-4)


def trained(num_steps: int = 3, seed: int = 0, **options: Any) -> rf.SoftmaxHead:
    head = make_head(seed=seed, **options)
    optimizer = torch.optim.SGD([head.weight], lr=5.0)
    for step in range(num_steps):
        train_step(head, optimizer, step)
    return head


SAMPLERS: dict[str, Callable[[int], rf.Sampler | str]] = {
    "rff": lambda seed: small_rff(seed=seed),
    "anchored": lambda seed: small_rff(seed=seed, anchor=True),
    "positive": lambda _: "positive",
    "exact": lambda _: "exact",
    "unigram": lambda seed: rf.UnigramSampler(target_of(NUM_CLASSES, seed=seed) + 1),
}
all_samplers = pytest.mark.parametrize("sampler", SAMPLERS)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda head: torch.load(saved(head), weights_only=False)])
def test_a_copy_draws_the_same_and_is_independent(
    duplicate: Callable[[rf.SoftmaxHead], rf.SoftmaxHead], num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = trained(num_steps, sampler=small_rff())  # after the last step the sampler has rows to catch up with
    other, untouched = duplicate(head), duplicate(head)
    expected = next_draws(head, monkeypatch)
    train_step(head, torch.optim.SGD([head.weight], lr=5.0), 9)
    next_draws(head, monkeypatch)
    assert_same_draws(other, expected, monkeypatch)
    train_step(other, torch.optim.SGD([other.weight], lr=5.0), 10)
    next_draws(other, monkeypatch)
    assert_same_draws(untouched, expected, monkeypatch)
    assert staleness(untouched) < FRESH


def saved(thing: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("num_steps", [0, 2, 3])  # the third step rebuilds, and what it rebuilds must be loaded
@pytest.mark.parametrize("warm", [False, True])
@all_samplers
def test_a_loaded_head_draws_what_the_saved_one_draws(
    sampler: str, warm: bool, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = trained(num_steps, sampler=SAMPLERS[sampler](0), rebuild_every=2)
    other = trained(2 if warm else 0, sampler=SAMPLERS[sampler](1), rebuild_every=2, seed=1)
    state = torch.load(saved(head.state_dict()))
    other.load_state_dict(state)
    for _ in range(4):  # rebuilds among them
        assert_same_draws(other, next_draws(head, monkeypatch), monkeypatch)
    assert torch.equal(head.weight, other.weight)


def test_a_sampler_that_is_loaded_by_itself_is_built_from_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    head, other = trained(sampler=small_rff()), trained(sampler=small_rff(seed=1))
    other.sampler.load_state_dict(head.sampler.state_dict())
    with torch.no_grad():
        other.weight.copy_(head.weight)
    assert_same_draws(other, next_draws(head, monkeypatch), monkeypatch)


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: trained(num_classes=50, sampler=small_rff(seed=1)), "weight"),
        (lambda: make_head(num_classes=50, sampler=small_rff(seed=1)), "weight"),
        (lambda: make_head(dim=DIM + 1, sampler=small_rff(DIM + 1)), "weight"),
        (lambda: trained(seed=1, sampler=rf.KernelSampler(rf.RandomFourier(DIM, 32, 2.0), tau=3.0)), "frequencies"),
        (lambda: make_head(num_classes=50, sampler="uniform"), "weight"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_and_loses_nothing(
    other: Callable[[], rf.SoftmaxHead],
    named: str,
    nested: bool,
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = trained(num_steps, sampler=small_rff(anchor=True))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    expected = next_draws(copy.deepcopy(head), monkeypatch)
    target, source = (nn.Sequential(head), nn.Sequential(other())) if nested else (head, other())
    with pytest.raises(RuntimeError, match=rf"size mismatch for \S*{named}"):
        target.load_state_dict(source.state_dict())
    for name, value in head.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert_same_draws(head, expected, monkeypatch)


def test_a_checkpoint_of_another_sampler_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    head = trained(sampler=small_rff())
    with pytest.raises(RuntimeError, match=r"Missing key.*sampler\.feature_map\.frequencies"):
        head.load_state_dict(make_head(sampler="uniform", seed=1).state_dict())
    next_draws(head, monkeypatch)
    assert staleness(head) < FRESH


# --- precision ---


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.01)])
@modes
def test_a_half_precision_head_gives_a_float32_loss_close_to_its_twin(
    negatives: Any, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, target = hidden_of(8), target_of(8)
    for sampler in ("uniform", "exact"):
        head = make_head(sampler=sampler, negatives=negatives)
        expected = head(hidden, target, generator=seeded())
        loss = head.to(dtype)(hidden.to(dtype), target, generator=seeded())
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=0, atol=tolerance)
    assert head.eval()(hidden.to(dtype), target).dtype == torch.float32


# torch has no sum of two sparse float16 gradients on the CPU.
@pytest.mark.parametrize(("dtype", "sparse"), [(torch.bfloat16, True), (torch.float16, False), (torch.float64, True)])
@modes
def test_a_head_of_any_precision_trains(negatives: Any, dtype: torch.dtype, sparse: bool) -> None:
    head = make_head(sampler=small_rff(), negatives=negatives, sparse=sparse)
    optimizer = torch.optim.SGD([head.weight], lr=2.0)
    train_step(head, optimizer, 0)
    head.to(dtype)  # with rows still to be seen by the sampler
    hidden, target = hidden_of(8).to(dtype), target_of(8)
    start = head.eval()(hidden, target).item()
    head.train()
    for seed in range(30):
        optimizer.zero_grad()
        head(hidden, target, generator=seeded(seed)).backward()
        assert head.weight.grad is not None
        assert head.weight.grad.dtype == dtype
        optimizer.step()
    assert head.eval()(hidden, target).item() < start - 1.0


@modes
def test_under_autocast_the_loss_is_float32_and_goes_backward(negatives: Any) -> None:
    head = make_head(sampler="exact", negatives=negatives)
    encoder = nn.Linear(DIM, DIM)
    hidden, target = hidden_of(8), target_of(8)
    expected = head(encoder(hidden), target, generator=seeded())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoded = encoder(hidden)
        assert encoded.dtype == torch.bfloat16
        loss = head(encoded, target, generator=seeded())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0, atol=0.05)
    loss.backward()
    assert encoder.weight.grad is not None
    assert torch.isfinite(encoder.weight.grad).all()
    head.eval()
    exact = head(encoded.float(), target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head(encoded, target), exact)
        torch.testing.assert_close(head.log_prob(encoded, target).mean(), -exact)


# --- topk and log_prob ---


@pytest.fixture(params=["one chunk", "many chunks"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many chunks":
        monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", 1)
        monkeypatch.setattr(losses, "_MIN_CHUNK_SIZE", 4)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("k", [1, 5, NUM_CLASSES])
@pytest.mark.parametrize("loss", ["softmax", "absolute"])
@pytest.mark.parametrize("normalize", [True, False])
def test_topk_is_that_of_dense_logits(shape: tuple[int, ...], k: int, loss: Any, normalize: bool) -> None:
    head = make_head(loss=loss, normalize=normalize).double()
    hidden = hidden_of(*shape, dtype=torch.float64)
    scores, ids = head.topk(hidden, k)
    expected = dense_logits(head, hidden).topk(k)
    torch.testing.assert_close(scores, expected.values)
    assert torch.equal(ids, expected.indices)
    assert not scores.requires_grad


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("extra", [(), (1,), (4,)])
@pytest.mark.parametrize("loss", ["softmax", "absolute"])
def test_log_prob_and_its_gradients_are_those_of_log_softmax(
    shape: tuple[int, ...], extra: tuple[int, ...], loss: Any
) -> None:
    head = make_head(loss=loss).double()
    hidden, ids = hidden_of(*shape, dtype=torch.float64).requires_grad_(), target_of(*shape, *extra)
    log_prob = head.log_prob(hidden, ids)
    dense = dense_logits(head, hidden).log_softmax(-1)
    expected = dense.gather(-1, ids.view(*shape, -1)).reshape(shape + extra)
    torch.testing.assert_close(log_prob, expected)
    inputs = (hidden, head.weight)
    for got, truth in zip(
        torch.autograd.grad(log_prob.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(got.to_dense(), truth)


# --- several labels ---

# A row without labels, repeats, padding anywhere.
PADDED = torch.tensor([[3, 7, -1, 1], [-1, -1, -1, -1], [5, 5, -1, 5], [-1, 0, 8, 8], [6, -1, -1, -1]])


def several_labels(**options: Any) -> tuple[rf.SoftmaxHead, Tensor]:
    head = make_head(num_classes=9, sampler=small_rff(), reduction="none", **options).double()
    return head, hidden_of(len(PADDED), dtype=torch.float64)


@pytest.mark.parametrize("train", [True, False])
@modes
def test_padded_labels_and_indices_with_offsets_are_one(negatives: Any, train: bool) -> None:
    head, hidden = several_labels(negatives=negatives)
    head.train(train)
    padded, bags = (head(hidden, target, generator=seeded()) for target in (PADDED, bags_of(PADDED)))
    torch.testing.assert_close(padded, bags)


@pytest.mark.parametrize("labels", ["pick_all", "pick_one"])
def test_eval_loss_of_several_labels_is_that_of_a_naive_loop(labels: Any) -> None:
    head, hidden = several_labels(labels=labels)
    rows = naive_losses(head, hidden[PADDED.amax(1) >= 0], PADDED[PADDED.amax(1) >= 0], None)
    expected = torch.zeros(len(PADDED), dtype=torch.float64)
    expected[PADDED.amax(1) >= 0] = torch.stack([row.sum() if labels == "pick_all" else row.mean() for row in rows])
    torch.testing.assert_close(head.eval()(hidden, PADDED), expected)
    head.reduction = "mean"
    torch.testing.assert_close(head(hidden, PADDED), expected.sum() / 4)  # the row without labels does not count


@modes
def test_train_loss_of_pick_all_is_the_sum_over_the_labels(negatives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = several_labels(negatives=negatives)
    draws = record_draws(head, monkeypatch)
    loss = head(hidden, PADDED, generator=seeded())
    kept = PADDED.amax(1) >= 0
    rows = naive_losses(head, hidden[kept], PADDED[kept], draws[0])
    torch.testing.assert_close(loss[kept], torch.stack([row.sum() for row in rows]))
    assert loss[~kept].tolist() == [0.0]
    head.reduction = "mean"
    torch.testing.assert_close(head(hidden, PADDED, generator=seeded()), loss.sum() / 4)


@modes
def test_train_loss_of_pick_one_is_that_of_one_of_the_labels(negatives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = several_labels(negatives=negatives, labels="pick_one")
    draws = record_draws(head, monkeypatch)
    kept = PADDED.amax(1) >= 0
    picked = set()
    for seed in range(10):
        loss = head(hidden, PADDED, generator=seeded(seed))
        for row, choices in enumerate(naive_losses(head, hidden[kept], PADDED[kept], draws[-1])):
            error = (choices - loss[kept][row]).abs()
            assert error.min() < 1e-6
            picked.add((row, int(error.argmin())))
    assert len(picked) == 3 + 1 + 2 + 1


def test_pick_one_picks_each_label_equally_often() -> None:
    # With the exact sampler the loss does not depend on the negatives drawn, so it tells which label was picked.
    head = make_head(sampler="exact", labels="pick_one", reduction="none").double()
    hidden, target = hidden_of(1, dtype=torch.float64), torch.tensor([[4, -1, 20, 11, -1, 4]])
    choices = naive_losses(head, hidden, target, None)[0]
    many = 6000
    loss = head(hidden.expand(many, -1), target.expand(many, -1), generator=seeded())
    error = (loss[:, None] - choices).abs()
    assert error.amin(1).max() < 1e-4
    counts = error.argmin(1).bincount(minlength=3)
    spread = math.sqrt(many * (1 / 3) * (2 / 3))
    assert ((counts - many / 3).abs() < SIGMAS * spread).all()


def test_a_row_whose_labels_are_all_classes_has_no_loss_where_it_needs_no_negatives() -> None:
    head = make_head(num_classes=3, num_negatives=2, negatives="shared", sampler=small_rff())
    target = torch.tensor([[0, 1, 2]])
    assert head(hidden_of(1), target).item() == 0.0
    assert head.eval()(hidden_of(1), target).item() == 0.0


# --- learning ---


def test_nce_learns() -> None:
    head = make_head(sampler="uniform", loss="nce", normalize=False, tau=1.0, num_negatives=20)
    hidden, target = hidden_of(16), target_of(16)
    optimizer = torch.optim.SparseAdam([head.weight], lr=0.05)
    start = head.eval()(hidden, target).item()
    head.train()
    for seed in range(60):
        optimizer.zero_grad()
        head(hidden, target, generator=seeded(seed)).backward()
        optimizer.step()
    assert head.eval()(hidden, target).item() < start - 1.0


@modes
def test_the_default_sampler_learns_as_the_exact_one_does(negatives: Any) -> None:
    num_classes, dim, num_steps, batch = 2000, 16, 200, 64
    g = seeded(1)
    groups = F.normalize(torch.randn(40, dim, generator=g), dim=1)[torch.randint(40, (num_classes,), generator=g)]
    prototypes = F.normalize(groups + 0.15 * torch.randn(num_classes, dim, generator=g), dim=1)
    target = torch.randint(num_classes, (num_steps, batch), generator=g)
    hidden = prototypes[target] + 0.05 * torch.randn(num_steps, batch, dim, generator=g)
    final = {}
    for sampler in (None, "exact"):
        torch.manual_seed(0)
        head = rf.SoftmaxHead(dim, num_classes, sampler, num_negatives=16, negatives=negatives)
        optimizer = torch.optim.SparseAdam([head.weight], lr=0.1)
        for h, t in zip(hidden, target, strict=True):
            optimizer.zero_grad()
            head(h, t, generator=g).backward()
            optimizer.step()
        with torch.no_grad():
            final[sampler] = head.eval()(prototypes, torch.arange(num_classes)).item()
    assert final[None] < math.log(num_classes) - 4
    # The uniform sampler ends 0.4 above the exact one with negatives of each row's own.
    assert final[None] < final["exact"] + 0.15


@pytest.mark.parametrize(("num_classes", "num_negatives"), [(2, 1), (50, 49), (5000, 100)])
@modes
def test_the_defaults_fit_any_number_of_classes(negatives: Any, num_classes: int, num_negatives: int) -> None:
    torch.manual_seed(0)
    head = rf.SoftmaxHead(DIM, num_classes, negatives=negatives)
    assert head.num_negatives == num_negatives
    loss = head(hidden_of(4), target_of(4, num_classes=num_classes))
    loss.backward()
    assert 0 < loss.item() < 50
    assert f"num_classes={num_classes}" in repr(head)


@pytest.mark.parametrize(("num_classes", "num_features"), [(99_999, 128), (100_000, 64)])
def test_the_default_has_fewer_features_where_its_tree_is_large(num_classes: int, num_features: int) -> None:
    sampler: Any = rf.SoftmaxHead(2, num_classes).sampler
    assert sampler.feature_map.num_features == num_features


# --- errors ---

HIDDEN = hidden_of(2)
TARGET = torch.tensor([1, 2])


def with_bad(value: float) -> Tensor:
    hidden = HIDDEN.clone()
    hidden[1, 3] = value
    return hidden


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim: expected at least 1, got 0"),
        ({"num_classes": 1}, "num_classes: expected at least 2, got 1"),
        ({"num_negatives": 0}, "num_negatives: expected 1 to 36, fewer than the classes"),
        ({"num_negatives": 37}, "num_negatives: expected 1 to 36, fewer than the classes"),
        ({"num_negatives": 100}, "(else use the full softmax), got 100"),
        ({"tau": 0.0}, "tau: expected a positive finite number, got 0.0"),
        ({"tau": -1.0}, "tau: expected a positive finite number, got -1.0"),
        ({"tau": math.inf}, "tau: expected a positive finite number, got inf"),
        ({"tau": math.nan}, "tau: expected a positive finite number, got nan"),
        ({"negatives": "some"}, "negatives: expected 'per_example', 'shared' or a number of groups, got 'some'"),
        ({"negatives": 0}, "negatives: expected 'per_example', 'shared' or a number of groups, got 0"),
        ({"negatives": True}, "negatives: expected 'per_example', 'shared' or a number of groups, got True"),
        ({"loss": "hinge"}, "loss: expected one of ('softmax', 'absolute', 'nce'), got 'hinge'"),
        ({"labels": "pick_two"}, "labels: expected one of ('pick_all', 'pick_one'), got 'pick_two'"),
        ({"reduction": "max"}, "reduction: expected one of ('mean', 'sum', 'none'), got 'max'"),
        ({"update_every": 0}, "update_every: expected at least 1, got 0"),
        ({"rebuild_every": 0}, "rebuild_every: expected at least 1, got 0"),
        ({"sampler": "best"}, "name: expected one of uniform"),
        ({"sampler": rf.UniformSampler(36)}, "sampler: expected one for 37 classes, got one for 36"),
        ({"sampler": small_rff(DIM + 1)}, "sampler: expected one of dim 6, got one of dim 7"),
    ],
)
def test_a_bad_option_is_named_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_head(**options)


def test_what_is_no_sampler_is_named_at_construction() -> None:
    with pytest.raises(TypeError, match=r"^sampler: expected a Sampler or the name of one, got RandomFourier$"):
        make_head(sampler=rf.RandomFourier(DIM, 8, 2.0))


OTHER_TAU = "tau=3.0 as in the head.*make_sampler(..., tau=3.0); got tau=5.0"


@pytest.mark.parametrize(
    ("sampler", "loss", "message"),
    [
        (lambda: small_rff(tau=5.0), "softmax", OTHER_TAU),
        (lambda: rf.MomentSampler(DIM, tau=5.0), "softmax", OTHER_TAU),
        (lambda: rf.MIDXSampler(4, tau=5.0), "softmax", OTHER_TAU),
        (lambda: rf.MixtureSampler([rf.UniformSampler(37), rf.ExactSampler(tau=5.0)] * 2), "softmax", OTHER_TAU),
        (lambda: rf.ExactSampler(tau=3.0), "absolute", "make_sampler(..., absolute=True); got absolute=False"),
        (lambda: small_rff(absolute=True), "nce", "make_sampler(..., absolute=False); got absolute=True"),
    ],
)
def test_a_sampler_for_other_logits_brings_one_warning(
    sampler: Callable[[], rf.Sampler], loss: str, message: str
) -> None:
    with pytest.warns(UserWarning, match=re.escape(message).replace(r"\.\*", ".*", 1)) as found:
        make_head(sampler=sampler(), loss=loss)
    assert [each.filename for each in found] == [__file__]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: rf.UniformSampler(37),
        lambda: rf.ExactSampler(quadratic=2.0),
        lambda: rf.KernelSampler(rf.Quadratic(DIM), leaf="kernel"),
        lambda: rf.MomentSampler(DIM, tau=3),
        lambda: rf.MixtureSampler([rf.UniformSampler(37), rf.ExactSampler(tau=3.0, absolute=True)]),
    ],
)
def test_a_sampler_that_fits_or_has_no_tau_brings_none(sampler: Callable[[], rf.Sampler]) -> None:
    make_head(sampler=sampler(), loss="absolute")


BAD_CALLS: dict[str, tuple[Callable[[rf.SoftmaxHead], Any], type[Exception], str]] = {
    "hidden, last dimension": (
        lambda head: head(HIDDEN[:, :-1], TARGET),
        ValueError,
        "hidden: expected shape (..., 6), got (2, 5)",
    ),
    "hidden, no dimension": (
        lambda head: head(torch.tensor(1.0), TARGET),
        ValueError,
        "hidden: expected shape (..., 6), got ()",
    ),
    "hidden, dtype": (
        lambda head: head(HIDDEN.long(), TARGET),
        TypeError,
        "hidden: expected a floating dtype, got torch.int64",
    ),
    "hidden, NaN": (
        lambda head: head(with_bad(math.nan), TARGET),
        ValueError,
        "hidden: expected finite values, got NaN or inf in row 1",
    ),
    "hidden, inf": (
        lambda head: head(with_bad(-math.inf), TARGET),
        ValueError,
        "hidden: expected finite values, got NaN or inf in row 1",
    ),
    "empty batch": (
        lambda head: head(HIDDEN[:0], TARGET[:0]),
        ValueError,
        "hidden: expected shape (rows, dim) with at least one row, got (0, 6)",
    ),
    "target, range": (
        lambda head: head(HIDDEN, torch.tensor([1, 37])),
        ValueError,
        "target: expected class ids in [0, 37), got 37",
    ),
    "target, dtype": (
        lambda head: head(HIDDEN, TARGET.float()),
        TypeError,
        "target: expected int64 class ids, got torch.float32",
    ),
    "target, shape": (
        lambda head: head(HIDDEN, torch.tensor([1, 2, 3])),
        ValueError,
        "target: expected shape (2,), (B, P) padded with -1",
    ),
    "target, offsets": (
        lambda head: head(HIDDEN, (TARGET, torch.tensor([0, 3]))),
        ValueError,
        "target[1] (offsets): expected to start at 0",
    ),
    "target, all classes": (
        lambda head: head(HIDDEN, torch.arange(37).expand(2, 37)),
        ValueError,
        "target: expected a class left for a negative in each row, got all 37",
    ),
    "topk, k of 0": (lambda head: head.topk(HIDDEN, 0), ValueError, "k: expected 1 to 37, got 0"),
    "topk, k above n": (lambda head: head.topk(HIDDEN, 38), ValueError, "k: expected 1 to 37, got 38"),
    "topk, hidden": (lambda head: head.topk(with_bad(math.nan), 1), ValueError, "hidden: expected finite values"),
    "log_prob, hidden": (lambda head: head.log_prob(HIDDEN[:, :2], TARGET), ValueError, "hidden: expected shape"),
    "log_prob, rows": (
        lambda head: head.log_prob(HIDDEN, torch.tensor([1])),
        ValueError,
        "ids: expected shape (2,) or with one more dimension, got (1,)",
    ),
    "log_prob, dimensions": (
        lambda head: head.log_prob(HIDDEN, TARGET[:, None, None]),
        ValueError,
        "ids: expected shape (2,) or with one more dimension, got (2, 1, 1)",
    ),
    "log_prob, dtype": (lambda head: head.log_prob(HIDDEN, TARGET.float()), TypeError, "ids: expected int64"),
    "log_prob, range": (lambda head: head.log_prob(HIDDEN, TARGET - 3), ValueError, "in [0, 37), got -2"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named_and_loses_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, error, message = BAD_CALLS[case]
    head = trained(sampler=small_rff())
    expected = next_draws(copy.deepcopy(head), monkeypatch)
    with pytest.raises(error, match=re.escape(message)):
        call(head)
    if not case.startswith("target, all"):
        with pytest.raises(error, match=re.escape(message)):
            call(copy.deepcopy(head).eval())
    assert_same_draws(head, expected, monkeypatch)


def test_nce_with_several_targets_a_row_is_refused() -> None:
    head = make_head(loss="nce")
    with pytest.raises(ValueError, match="target: expected one class a row with loss='nce'"):
        head(HIDDEN, torch.tensor([[1, 2], [3, 4]]))
    loss = make_head(loss="nce", labels="pick_one")(HIDDEN, torch.tensor([[1, 2], [3, 4]]))
    assert torch.isfinite(loss)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_class_that_is_no_longer_finite_is_named_and_the_rest_is_kept(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = trained(sampler=small_rff())
    expected = next_draws(copy.deepcopy(head), monkeypatch)
    row = int(target_of(3, seed=2)[1])  # a target of the last step
    good = head.weight.detach()[row].clone()
    for again in (lambda: head(HIDDEN, TARGET), head.rebuild):
        head.weight.data[row, 0] = bad
        with pytest.raises(ValueError, match=f"weight: expected finite values, got NaN or inf in row {row}$"):
            again()
        head.weight.data[row] = good
    assert_same_draws(head, expected, monkeypatch)
