"""What the ranks of a process group check together: run by test_sharded.py, one process a rank.

Each function named check_* is called on all ranks at once, with the process's place in the group and a directory that
all groups share. Problems and draws come from fixed seeds. Statistical checks use SIGMAS and FALSE_ALARM of
sampler_contract: a correct head fails one of them with probability below 1e-4 in all.
"""

import copy
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

import rfsoftmax as rf
from rfsoftmax.groups import restored
from rfsoftmax.losses import repeated
from sampler_contract import FALSE_ALARM, SIGMAS, p_value, seeded

N, DIM, TAU = 43, 6, 3.0
TIMEOUT = timedelta(seconds=120)
MOST = 4  # processes
SIZES = (3, 1, 0, 4)  # rows of each rank


class World(NamedTuple):
    """The place of a process among those of a check; with all four of them the group is the default one."""

    rank: int
    num: int
    group: Any
    shared: Path


class Problem(NamedTuple):
    """The same on all ranks: class embeddings and biases, and the rows of all ranks one after another."""

    weight: Tensor
    bias: Tensor
    hidden: Tensor
    labels: Tensor
    sizes: list[int]

    def own(self, rank: int) -> slice:
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


def problem(world: World, num_classes: int = N, width: int = 1, seed: int = 0, low: int = 0) -> Problem:
    g = seeded(seed)
    sizes = [3] if world.num == 1 else list(SIZES[: world.num])
    rows = sum(sizes)
    labels = torch.stack([torch.randperm(num_classes, generator=g)[:width] for _ in range(rows)]).clamp(min=low)
    if width > 1:
        labels[::2, 1:] = -1
    normal: dict[str, Any] = {"generator": g, "dtype": torch.float64}
    weight, hidden = torch.randn(num_classes, DIM, **normal), torch.randn(rows, DIM, **normal)
    return Problem(weight, torch.randn(num_classes, **normal), hidden, labels, sizes)


def make_head(world: World, given: Problem, sampler: Any = None, **options: Any) -> Any:
    """A head in float64 with the problem's classes."""
    options = {"tau": TAU, "num_negatives": 12, "process_group": world.group, **options}
    head = rf.ShardedSoftmaxHead(DIM, len(given.weight), sampler, **options).double()
    state = {"weight": given.weight, **({"bias": given.bias} if head.bias is not None else {})}
    head.load_state_dict(state)
    return head


def gathered(world: World, thing: Any) -> list[Any]:
    everything: list[Any] = [None] * world.num
    dist.all_gather_object(everything, thing, group=world.group)
    return everything


@contextmanager
def recorded(head: Any) -> Iterator[list[rf.Samples]]:
    """What the sampler of this rank draws."""
    drawn: list[rf.Samples] = []
    sample = head.sampler._sample

    def record(*arguments: Any) -> rf.Samples:
        drawn.append(sample(*arguments))
        return drawn[-1]

    head.sampler._sample = record
    yield drawn
    head.sampler._sample = sample


def all_draws(world: World, head: Any, samples: rf.Samples) -> rf.Samples:
    """The draws of all ranks beside each other, in ids of all classes, as M draws with one q: M q = m_r q_r."""
    parts = gathered(world, (samples.ids + head.classes.start, samples.log_q.double() + math.log(samples.ids.shape[1])))
    ids = torch.cat([ids for ids, _ in parts], 1)
    return rf.Samples(ids, torch.cat([log_q for _, log_q in parts], 1) - math.log(ids.shape[1]))


def plain_logits(weight: Tensor, bias: Tensor | None, hidden: Tensor, kind: dict[str, Any]) -> Tensor:
    if kind.get("normalize", True):
        hidden, weight = F.normalize(hidden, dim=1), F.normalize(weight, dim=1)
    logits = TAU * hidden @ weight.T + (0 if bias is None else bias)
    return logits.abs() if kind.get("loss") == "absolute" else logits


def sets_of(head: Any, hidden: Tensor) -> Tensor:
    """The row of the draws that holds the negatives of each row of hidden."""
    order, sizes = head.shard._sets(F.normalize(hidden, dim=1) if head.shard.normalize else hidden)
    rows = torch.arange(len(hidden))
    return rows if sizes is None else restored(repeated(torch.arange(len(sizes)), sizes), order)


def plain_loss(logits: Tensor, labels: Tensor, draws: rf.Samples, sets: Tensor) -> Tensor:
    """(N,) losses of the rows, by the library's pure functions on all draws; labels (N, P)."""
    ids, log_q = draws.ids[sets], draws.log_q[sets]
    hit = (ids.unsqueeze(1) == labels.unsqueeze(-1)).any(1)
    negatives = logits.gather(1, ids).masked_fill(hit, -torch.inf)
    targets = logits.gather(1, labels.clamp(min=0))
    each = rf.sampled_softmax_loss(targets, negatives, log_q, reduction="none")
    return each.where(labels >= 0, 0.0).sum(1)


KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "shared": {"negatives": "shared", "sampler": "rff"},
    "groups": {"negatives": 3, "sampler": "rff"},
    "bias, even": {"bias": True, "allocation": "even", "sampler": "moment"},
    "lengths, dense": {"normalize": False, "sparse": False, "sampler": "uniform"},
    "absolute": {"loss": "absolute", "sampler": "quadratic"},
}


def check_loss_and_gradients_are_those_of_one_process_with_the_same_draws(world: World) -> None:
    for name, kind in KINDS.items():
        for width in (1, 5):
            given = problem(world, width=width)
            head = make_head(world, given, **kind)
            own, is_bias = given.own(world.rank), head.bias is not None
            hidden: Any = given.hidden[own].clone().requires_grad_()
            with recorded(head) as drawn:
                loss = head(hidden, given.labels[own] if width > 1 else given.labels[own, 0])
            loss.backward()
            draws = all_draws(world, head, drawn[0])
            whole: list[Any] = [x.clone().requires_grad_() for x in (given.weight, given.bias, given.hidden)]
            logits = plain_logits(whole[0], whole[1] if is_bias else None, whole[2], kind)
            expected = plain_loss(logits, given.labels, draws, sets_of(head, given.hidden)).mean()
            expected.backward()
            near(loss, expected, name)
            classes = slice(head.classes.start, head.classes.stop)
            near(head.weight.grad, whole[0].grad[classes], name)
            if is_bias:
                near(head.bias.grad, whole[1].grad[classes], name)
            # DDP would divide by the number of ranks.
            near(hidden.grad / world.num, whole[2].grad[own], name)
            assert head.weight.grad.is_sparse == head.sparse


def near(found: Any, expected: Any, name: str = "", within: float = 1e-7) -> None:
    found = found.to_dense() if found.is_sparse else found
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=within, atol=within, msg=lambda m: f"{name}: {m}"
    )


def check_nce_is_that_of_one_process_with_the_same_draws(world: World) -> None:
    for negatives in ("per_example", "shared"):
        given = problem(world)
        head = make_head(world, given, "exact", loss="nce", bias=True, negatives=negatives)
        own, classes = given.own(world.rank), slice(head.classes.start, head.classes.stop)
        hidden: Any = given.hidden[own].clone().requires_grad_()
        with recorded(head) as drawn:
            loss = head(hidden, given.labels[own, 0])
        loss.backward()
        draws, m = all_draws(world, head, drawn[0]), drawn[0].ids.shape[1]
        queries, shared = F.normalize(given.hidden, dim=1), negatives == "shared"
        ids = torch.arange(len(head.classes)).expand(1 if shared else len(queries), -1)
        log_q = gathered(world, head.sampler.log_prob(queries, ids, shared=shared) + math.log(m))
        total = sum(gathered(world, m))
        target_log_q = (torch.cat(log_q, 1).expand(len(queries), -1) - math.log(total)).gather(1, given.labels)[:, 0]
        whole: list[Any] = [x.clone().requires_grad_() for x in (given.weight, given.bias, given.hidden)]
        logits = plain_logits(whole[0], whole[1], whole[2], {})
        chosen = logits.gather(1, draws.ids.expand(len(logits), -1))
        expected = rf.nce_loss(logits.gather(1, given.labels)[:, 0], chosen, target_log_q, draws.log_q)
        expected.backward()
        near(loss, expected, negatives, 1e-6)
        near(head.weight.grad, whole[0].grad[classes], negatives, 1e-6)
        near(hidden.grad / world.num, whole[2].grad[own], negatives, 1e-6)


def check_an_encoder_in_ddp_has_the_gradient_of_one_process(world: World) -> None:
    given = problem(world, seed=3)
    torch.manual_seed(5)
    encoder = nn.Linear(DIM, DIM).double()
    single = copy.deepcopy(encoder)
    parallel = DistributedDataParallel(encoder, process_group=world.group)
    head, own = make_head(world, given), given.own(world.rank)
    with recorded(head) as drawn:
        # A factor on the loss, as of a GradScaler, reaches all gradients.
        (8 * head(parallel(given.hidden[own]), given.labels[own, 0])).backward()
    draws = all_draws(world, head, drawn[0])
    logits = plain_logits(given.weight, None, single(given.hidden), {})
    (8 * plain_loss(logits, given.labels, draws, sets_of(head, given.hidden)).mean()).backward()
    for found, expected in zip(encoder.parameters(), single.parameters(), strict=True):
        near(found.grad, expected.grad)


def check_reductions_count_the_rows_of_all_ranks(world: World) -> None:
    given = problem(world, seed=4)
    target = given.labels[:, 0].clone()
    target[0] = -100
    own = given.own(world.rank)
    found = {}
    for reduction in ("none", "sum", "mean"):
        head = make_head(world, given, "exact", reduction=reduction).eval()
        hidden: Any = given.hidden[own].clone().requires_grad_()
        found[reduction] = head(hidden, target[own])
        found[reduction].sum().backward()
        single: Any = rf.SoftmaxHead(DIM, N, tau=TAU, reduction=reduction).double().eval()
        single.load_state_dict({"weight": given.weight}, strict=False)
        whole: Any = given.hidden.clone().requires_grad_()
        expected = single(whole, target)
        # Of "none" the mean over ranks of what they make of it, here the sum of their rows, is what counts.
        (expected.sum() / (world.num if reduction == "none" else 1)).backward()
        near(found[reduction], expected[own] if reduction == "none" else expected, reduction)
        near(hidden.grad / world.num, whole.grad[own], reduction)
        near(head.weight.grad, single.weight.grad[head.classes.start : head.classes.stop], reduction)
    assert found["none"].shape == (given.sizes[world.rank],)
    assert found["none"][: 1 if world.rank == 0 else 0].sum() == 0


def check_exact_loss_log_prob_and_topk_are_those_of_one_process(world: World) -> None:
    for kind in (
        {},
        {"bias": True, "labels": "pick_one"},
        {"normalize": False},
        {"loss": "absolute", "sampler": "quadratic"},
    ):
        given = problem(world, width=4, seed=1)
        head, own = make_head(world, given, **kind).eval(), given.own(world.rank)
        single: Any = rf.SoftmaxHead(DIM, N, tau=TAU, **kind).double().eval()
        single.load_state_dict({"weight": given.weight, "bias": given.bias}, strict=False)
        classes = slice(head.classes.start, head.classes.stop)
        near(head(given.hidden[own], given.labels[own]), single(given.hidden, given.labels))
        near(
            head.log_prob(given.hidden[own], given.labels[own, 0]),
            single.log_prob(given.hidden, given.labels[:, 0])[own],
        )
        loss = head.log_prob(given.hidden[own], given.labels[own, :2].clamp(min=0)).sum()
        loss.backward()
        (single.log_prob(given.hidden, given.labels[:, :2].clamp(min=0)).sum() / world.num).backward()
        near(head.weight.grad, single.weight.grad[classes])
        for k in (1, 5, N):
            scores, ids = head.topk(given.hidden[own], k)
            expected = single.topk(given.hidden, k)
            near(scores, expected[0][own])
            assert torch.equal(ids, expected[1][own])


def check_targets_in_all_forms_give_the_same_loss(world: World) -> None:
    given = problem(world, width=5, seed=2)
    head, own = make_head(world, given).eval(), given.own(world.rank)
    labels = given.labels[own]
    bags = [row[row >= 0] for row in labels]
    offsets = torch.tensor([0, *(len(bag) for bag in bags)])[:-1].cumsum(0)[: len(bags)]
    flat = torch.cat([*bags, torch.empty(0, dtype=torch.int64)])
    near(head(given.hidden[own], (flat, offsets)), head(given.hidden[own], labels))
    one = labels[:, :1]
    near(head(given.hidden[own], one), head(given.hidden[own], one[:, 0]))
    near(head(given.hidden[own][:, None], one), head(given.hidden[own], one[:, 0]))


def check_a_label_that_is_picked_is_learned_and_all_are_kept_out(world: World) -> None:
    given = problem(world, width=6, seed=6)
    head, own = make_head(world, given, labels="pick_one", num_negatives=30), given.own(world.rank)
    batches, sampled_loss = [], head._sampled_loss

    def record(batch: Any, *arguments: Any) -> Tensor:
        batches.append(batch)
        return sampled_loss(batch, *arguments)

    head._sampled_loss = record
    for _ in range(60):
        with recorded(head) as drawn:
            head(given.hidden[own], given.labels[own])
        assert not (drawn[0].ids.unsqueeze(1) == head._local(given.labels).unsqueeze(-1)).any()
    assert all(batch.targets.shape[1] == 1 for batch in batches)
    targets = torch.cat([batch.targets for batch in batches], 1)
    assert [set(row.tolist()) for row in targets] == [set(row[row >= 0].tolist()) for row in given.labels]


def check_rows_whose_labels_are_all_of_a_ranks_classes(world: World) -> None:
    """Nothing is left to draw there: the loss is over the other ranks' classes, and finite with its gradient."""
    if world.num == 1:
        return
    given = problem(world)
    for negatives in ("per_example", "shared"):
        for rank in range(world.num):
            head = make_head(world, given, "exact", num_negatives=42, negatives=negatives)
            ranges = gathered(world, head.classes)
            labels = torch.tensor(list(ranges[rank])).expand(2, -1)
            hidden = given.hidden[:2].clone().requires_grad_()
            loss = head(hidden, labels)
            loss.backward()
            assert hidden.grad is not None
            assert hidden.grad.isfinite().all()
            assert head.weight.grad.to_dense().isfinite().all()
            exact = head.eval()(hidden, labels)
            assert abs(float(loss.detach() - exact.detach())) < 0.15 * float(exact.detach())


def check_large_logits_do_not_overflow(world: World) -> None:
    given = problem(world, seed=12)
    head, own = make_head(world, given, tau=1e5, num_negatives=40).float(), given.own(world.rank)
    single: Any = rf.SoftmaxHead(DIM, N, tau=1e5).eval()
    single.load_state_dict({"weight": given.weight}, strict=False)
    hidden = given.hidden[own].float().requires_grad_()
    for training in (True, False):
        loss = head.train(training)(hidden, given.labels[own, 0])
        loss.backward()
        assert hidden.grad is not None
        assert all(x.to_dense().isfinite().all() for x in (hidden.grad, head.weight.grad))
        assert 1e4 < loss.detach() < 2e5
    near(loss, single(given.hidden.float(), given.labels[:, 0]), within=1e-5)


def check_few_classes_and_ranks_of_one(world: World) -> None:
    for num_classes in {1: (2, 3), 2: (2, 3), 3: (3, 5, 7), 4: (4, 7, 10, 13)}[world.num]:
        given = problem(world, num_classes)
        head, own = make_head(world, given, num_negatives=1, bias=True), given.own(world.rank)
        assert sum(gathered(world, len(head.classes))) == num_classes
        for _ in range(3):
            head(given.hidden[own], given.labels[own, 0]).backward()
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter -= 0.1 * parameter.grad.to_dense()
                    parameter.grad = None
        assert head.eval()(given.hidden[own], given.labels[own, 0]).isfinite()


def check_no_rows_at_all_give_no_gradient_and_no_error(world: World) -> None:
    for training in (True, False):
        head = make_head(world, problem(world)).train(training)
        hidden = torch.zeros(2, DIM, dtype=torch.float64, requires_grad=True)
        loss = head(hidden, torch.full((2,), -100))
        assert math.isnan(loss.detach())
        loss.backward()
        empty = torch.zeros(0, DIM, dtype=torch.float64)
        assert head.topk(empty, 2)[1].shape == (0, 2)
        assert head.log_prob(empty, torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)


def sampler_of(name: str) -> Callable[[range], rf.Sampler]:
    counts = torch.arange(1, N + 1)
    known: dict[str, dict[str, Any]] = {
        "lsh": {"num_bits": 2},
        "mixture": {"samplers": ["log_uniform", "exact"]},
        "midx": {"num_codewords": 3},
        **{key: {"num_features": 64, "block_size": 4} for key in ("rff", "orf", "sorf", "maclaurin", "positive")},
    }

    def make(classes: range) -> rf.Sampler:
        part = counts[classes.start : classes.stop]
        size: dict[str, Any] = {"num_classes": len(classes), "first": classes.start, "counts": part}
        return rf.make_sampler(name, **size, dim=DIM, tau=TAU, stratified=False, **known.get(name, {}))

    return make


SAMPLERS = [
    *("uniform", "log_uniform", "unigram", "in_batch", "exact", "moment", "midx", "lsh", "mixture"),
    *("rff", "orf", "sorf", "quadratic", "maclaurin", "positive"),
]


def check_draws_follow_log_q_and_the_partition_function_is_unbiased(world: World) -> None:
    """One query over and over, with each sampler: of one batch of many rows, or of many shared sets."""
    for name in SAMPLERS if world.num == 2 else SAMPLERS[world.num :: 5]:
        draws_of(world, name, "per_example", 10, rows=1500, times=1)
    for name in ("unigram", "moment", "midx", "rff", "lsh") if world.num == 2 else ("rff",):
        draws_of(world, name, "shared", 30, rows=1, times=100)


def draws_of(world: World, name: str, negatives: str, num: int, rows: int, times: int) -> None:
    """The draws of a rank by chi-square, their log_q against log_prob, and on rank 0 the mean of Z'."""
    given, shared = problem(world, seed=7), negatives == "shared"
    query, target = given.hidden[0], given.labels[0]
    head = make_head(world, given, sampler_of(name), num_negatives=num, reduction="none", negatives=negatives)
    head._shares[:] = torch.arange(1, world.num + 1) ** 2  # not even, whatever was seen
    head.sampler.eval()  # q stays as it is
    own = rows if world.rank == 0 else 1
    with recorded(head) as drawn, torch.no_grad():
        losses = [head(query.expand(own, -1), target.expand(own)) for _ in range(times)]
    # Of different numbers at each step, as the allocation moves.
    ids, log_q = (torch.cat([part.flatten() for part in parts]) for parts in zip(*drawn, strict=True))
    what = f"{name}, {negatives}, rank {world.rank}"
    excluded, classes = None if shared else head._local(target), torch.arange(len(head.classes))[None]
    known = head.sampler.log_prob(F.normalize(query[None], dim=1), classes, exclude=excluded, shared=shared)
    near(log_q, known[0, ids], what, 1e-4)
    assert p_value(ids, known[0].exp()) > FALSE_ALARM, what
    if world.rank == 0:
        logits = plain_logits(given.weight, None, query[None], {})[0]
        estimates, exact = (torch.cat(losses) + logits[target]).exp(), logits.exp().sum()
        error = estimates.std() / math.sqrt(len(estimates))
        assert error < 0.1 * exact, what
        assert abs(estimates.mean() - exact) < SIGMAS * error + 1e-6 * exact, what


def check_the_allocation_by_mass_finds_the_rank_with_the_mass(world: World) -> None:
    given = problem(world, seed=8)
    hidden = given.weight[0].expand(2, -1) + 0.01 * given.hidden[:1]
    for allocation in ("mass", "even"):
        head = make_head(world, given, "exact", num_negatives=40, tau=12.0, allocation=allocation)
        target = torch.full((2,), N - 1)
        for _ in range(5):
            head(hidden, target)
        with recorded(head) as drawn:
            head(hidden, target)
        counts = gathered(world, drawn[0].ids.shape[1])
        assert sum(counts) == 40
        assert min(counts) >= 1
        if allocation == "even":
            assert max(counts) - min(counts) <= 1
        elif world.num > 1:
            assert counts[0] > 30, counts


def check_the_sampler_follows_the_weight_on_every_rank(world: World) -> None:
    """Also on ranks that never have a target."""
    given = problem(world, seed=9)
    own = given.own(world.rank)
    target = torch.zeros(given.sizes[world.rank], dtype=torch.int64)
    for optimizer in (torch.optim.SparseAdam, torch.optim.SGD):
        head = make_head(world, given, "exact", num_negatives=20, bias=True)
        step = optimizer(list(head.parameters()), lr=0.1)
        for _ in range(4):
            step.zero_grad()
            head(given.hidden[own], target).backward()
            step.step()
        head.shard._freshen()
        near(head.sampler.weight, F.normalize(head.weight, dim=1), within=1e-6)
        near(head.sampler.bias, head.bias, within=1e-6)
        assert not torch.equal(head.weight, given.weight[head.classes.start : head.classes.stop])


def check_ranks_have_random_numbers_of_their_own_and_repeat_them(world: World) -> None:
    def draws() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(11)
        head = rf.ShardedSoftmaxHead(
            DIM, 40 * world.num, "uniform", 2 * world.num, allocation="even", process_group=world.group
        )
        hidden, target = torch.ones(5, DIM), torch.zeros(5, dtype=torch.int64)
        with recorded(head) as drawn:
            head(hidden, target)
        return head.weight.detach()[:20], drawn[0].ids, torch.rand(3)

    first, second = draws(), draws()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    weights, ids, after = zip(*gathered(world, first), strict=True)
    for other in range(world.num):
        if other != world.rank:
            assert not torch.equal(weights[other], first[0])
            assert not torch.equal(ids[other], first[1])
    # torch's own numbers are as far on all ranks: seeded alike, encoders stay alike.
    assert all(torch.equal(some, after[0]) for some in after)


def check_bytes_do_not_depend_on_the_number_of_classes(world: World) -> None:
    rows, dim, width = 5, 8, 3
    sent = {}
    for num_classes in (100, 5000):
        head = rf.ShardedSoftmaxHead(dim, num_classes, num_negatives=10, process_group=world.group)
        hidden = torch.randn(rows, dim, requires_grad=True)
        labels = torch.stack([torch.randperm(num_classes)[:width] for _ in range(rows)])
        counted, collectives = [], cast(Any, dist)
        send = collectives.all_to_all_single

        def count(output: Tensor, rows: Tensor, receive: list[int], send_sizes: list[int], **kind: Any) -> Any:
            own = send_sizes[world.rank]
            counted.append((len(rows) - own) * rows.element_size() * math.prod(rows.shape[1:]))  # noqa: B023
            return send(output, rows, receive, send_sizes, **kind)  # noqa: B023

        collectives.all_to_all_single = count
        before = head.ranks.bytes_sent
        head(hidden, labels).backward()
        collectives.all_to_all_single = send
        assert sum(counted) == head.ranks.bytes_sent - before
        sent[num_classes] = sum(counted)
    assert sent[100] == sent[5000]
    # The formula of docs/distributed.md.
    others = world.num - 1
    assert sent[100] == others * (8 * rows * (dim + 2 * width + 1) + 8 * world.num + 20)


def check_a_state_dict_goes_through_a_copy_and_a_whole_weight(world: World) -> None:
    given = problem(world)
    head = make_head(world, given, bias=True)
    assert set(head.state_dict()) == {"weight", "bias"}
    assert head.state_dict()["weight"].shape == given.weight.shape
    other = rf.ShardedSoftmaxHead(DIM, N, tau=TAU, bias=True, process_group=world.group).double()
    other.load_state_dict(head.state_dict())
    near(other.weight, head.weight)
    single = rf.SoftmaxHead(DIM, N, tau=TAU, bias=True).double()
    other.load_state_dict(single.state_dict())  # with its sampler and counts, which are not taken
    near(other.weight, single.weight[other.classes.start : other.classes.stop])
    twin = copy.deepcopy(head)
    own = given.own(world.rank)
    near(twin.eval()(given.hidden[own], given.labels[own]), head.eval()(given.hidden[own], given.labels[own]))
    for wrong in ({"weight": given.weight[:-1], "bias": given.bias}, {"weight": given.weight}):
        with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
            head.load_state_dict(wrong)


def check_checkpoints_load_on_any_number_of_ranks(world: World) -> None:
    """Written by 4 ranks, which come first, read by 3, 2 and 1; and one of a single process, written by the test."""
    torch.manual_seed(3)
    model = trained_model(world)
    if world.num == 4:
        take_steps(world, model, 3)
        rf.save_checkpoint(world.shared / "of-4", model.net, model.optimizers)
        if world.rank == 0:
            torch.save({"before": evaluated(world, model)}, world.shared / "losses.pt")
        else:
            evaluated(world, model)
        take_steps(world, model, 1)
        after = evaluated(world, model)
        if world.rank == 0:
            torch.save({**torch.load(world.shared / "losses.pt"), "after": after}, world.shared / "losses.pt")
        return
    rf.load_checkpoint(world.shared / "of-4", model.net, model.optimizers, process_group=world.group)
    expected = torch.load(world.shared / "losses.pt")
    near(evaluated(world, model), expected["before"], within=1e-6)
    # The optimizers go on where they were: a step more of the full softmax is the step that was taken.
    take_steps(world, model, 1)
    near(evaluated(world, model), expected["after"], within=1e-6)
    rf.load_checkpoint(world.shared / "single", model.net, model.optimizers, process_group=world.group)
    near(evaluated(world, model), torch.load(world.shared / "single.pt"), within=1e-6)


class Model(NamedTuple):
    net: Any
    optimizers: list[torch.optim.Optimizer]


def trained_model(world: World | None) -> Model:
    """An encoder with Adam and a head with SparseAdam; without a world it is no sharded one."""
    kind: dict[str, Any] = {"tau": TAU, "bias": True}
    head: Any = (
        rf.SoftmaxHead(DIM, N, **kind)
        if world is None
        else rf.ShardedSoftmaxHead(DIM, N, process_group=world.group, **kind)
    )
    net: Any = nn.ModuleDict({"encoder": nn.Linear(DIM, DIM), "head": head})
    sparse = torch.optim.SparseAdam(list(head.parameters()), lr=0.05)
    return Model(net, [torch.optim.Adam(net["encoder"].parameters(), lr=0.05), sparse])


def rows_of(world: World | None) -> tuple[Tensor, Tensor]:
    """Twelve rows, cut into as many parts as there are ranks."""
    hidden, target = torch.randn(12, DIM, generator=seeded(1)), torch.arange(12) * 3
    own = slice(None) if world is None else slice(world.rank * 12 // world.num, (world.rank + 1) * 12 // world.num)
    return hidden[own], target[own]


def take_steps(world: World | None, model: Model, num: int) -> None:
    """Steps of the exact loss, which are the same on any number of ranks; sparse optimizers get all rows."""
    hidden, target = rows_of(world)
    for _ in range(num):
        for optimizer in model.optimizers:
            optimizer.zero_grad()
        model.net.eval()["head"](model.net["encoder"](hidden), target).backward()
        for parameter in model.net["encoder"].parameters():
            if world is not None:
                dist.all_reduce(parameter.grad, group=world.group)
                parameter.grad /= world.num  # as DDP does
        for parameter in model.net["head"].parameters():
            parameter.grad = parameter.grad.to_sparse(1)
        for optimizer in model.optimizers:
            optimizer.step()


@torch.no_grad()
def evaluated(world: World | None, model: Model) -> Tensor:
    hidden, target = rows_of(world)
    loss: Tensor = model.net.eval()["head"](model.net["encoder"](hidden), target)
    return loss


def main(rank: int, shared: str) -> None:
    """All checks with 4 processes, then with the first 3 of them, 2 and 1; the results go to `shared`."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    store = FileStore(str(Path(shared) / "store"), MOST)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MOST, timeout=TIMEOUT)
    groups = {num: dist.new_group(list(range(num))) if num < MOST else None for num in range(MOST, 0, -1)}
    for num, group in groups.items():
        if rank < num:
            run_checks(World(rank, num, group, Path(shared)))
    dist.destroy_process_group()


def run_checks(world: World) -> None:
    for name, check in [(name, check) for name, check in globals().items() if name.startswith("check_")]:
        error = ""
        try:
            check(world)
            dist.barrier(group=world.group)
        except BaseException:
            error = f"rank {world.rank} of {world.num}:\n{traceback.format_exc()}"
        (world.shared / f"{name}-{world.num}-{world.rank}").write_text(error)
        if error:
            os._exit(1)  # which tells the others, that may be waiting for this rank


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
