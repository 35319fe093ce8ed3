"""The laws that every sampler keeps: one abstract test case, inherited in test_samplers.py by a class for each sampler.

A sampler's class gives two hooks, `make_sampler` and `exact_probs`, and the `variants` (options of `make_sampler`) that
the laws are to hold for. Laws that need no statistics are tested on all variants, most over sizes from 1 to 300; the
statistical ones on those variants that `drawn` names.

False alarms: a chi-square fails a correct sampler with probability FALSE_ALARM, a mean or variance with at most 7e-6
(SIGMAS standard errors). There are about 110 of the former and 80 of the latter, so all of them together fail by chance
less than once in a thousand seeds. Seeds are fixed.
"""

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from rfsoftmax import Sampler, Samples
from rfsoftmax.samplers.anchor import AnchoredSampler

Options = dict[str, Any]

FALSE_ALARM = 1e-6
SIGMAS = 4.5
DIM = 6
TAU = 3.0
# log_q is handed out in float32, so that much of it is rounding even where all else is float64.
DOUBLE = (1e-6, 4e-6)  # relative, absolute
SINGLE = (1e-5, 1e-4)


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def problem(num_classes: int, batch: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Class embeddings (n, DIM) and queries (B, DIM) of lengths 0.5 to 1.2; the queries share a mean direction."""
    generator = seeded(seed)
    weight = torch.randn(num_classes, DIM, generator=generator, dtype=dtype)
    hidden = torch.randn(batch, DIM, generator=generator, dtype=dtype) + weight[:1]
    return tuple(
        torch.nn.functional.normalize(x, dim=1) * (0.5 + 0.7 * torch.rand(len(x), 1, generator=generator, dtype=dtype))
        for x in (weight, hidden)
    )


def exclusions(num_classes: int, batch: int = 4) -> Tensor:
    """(B, P): in turn nothing is excluded, class 0 twice, every third class, and all but one (or the 64 before it)."""
    kinds: list[list[int]] = [[], [0, 0], list(range(0, num_classes, 3))[:64], list(range(num_classes - 1))[-64:]]
    if num_classes == 1:
        kinds = [[]]
    exclude = torch.full((batch, 2 + max(len(kind) for kind in kinds)), -1)
    for row in range(batch):
        kind = kinds[row % len(kinds)]
        exclude[row, 1 : 1 + len(kind)] = torch.tensor(kind, dtype=torch.int64)  # padding on both sides
    return exclude


def assert_near(found: Tensor, expected: Tensor, within: tuple[float, float] = DOUBLE) -> None:
    torch.testing.assert_close(found, expected, rtol=within[0], atol=within[1])


def without(probs: Tensor, exclude: Tensor | None) -> Tensor:
    """probs (B, n) with excluded classes at 0 and the rest scaled to sum to 1."""
    if exclude is None:
        return probs / probs.sum(1, keepdim=True)
    probs = probs.clone()
    for row, ids in zip(probs, exclude.reshape(len(exclude), -1), strict=True):
        row[ids[ids >= 0]] = 0.0
    return probs / probs.sum(1, keepdim=True)


def settle(sampler: Sampler, weight: Tensor, hidden: Tensor) -> Sampler:
    """The sampler as after some training: it has seen queries and was rebuilt since, so an anchor is in its place."""
    sampler.rebuild(weight)
    sampler.train()
    sampler.sample(hidden, 1, generator=seeded(99))
    sampler.rebuild(weight)
    return sampler.eval()


def all_log_probs(sampler: Sampler, hidden: Tensor, exclude: Tensor | None = None, shared: bool = False) -> Tensor:
    """log q (B, n) of every class."""
    rows = 1 if shared else len(hidden)
    return sampler.log_prob(hidden, torch.arange(sampler.num_classes).expand(rows, -1), exclude, shared)


def p_value(ids: Tensor, probs: Tensor) -> float:
    """Of the chi-square of draws against probs (n,); cells that expect fewer than 5, or the least, are pooled to 5."""
    observed = torch.bincount(ids.flatten(), minlength=len(probs)).double().numpy()
    expected = (probs.double() * ids.numel()).numpy()
    if observed[expected == 0].any():
        return 0.0
    rising = np.argsort(expected)
    small = max(int(np.searchsorted(np.cumsum(expected[rising]), 5.0)) + 1, int((expected < 5).sum()))
    pooled = [np.append(x[rising[small:]], x[rising[:small]].sum()) for x in (observed, expected)]
    if len(pooled[0]) == 1:
        return 1.0
    return float(scipy.stats.chi2.sf(((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum(), len(pooled[0]) - 1))


@dataclass(frozen=True)
class Draws:
    """Many rows (R, m) of draws for one query, whose target is excluded, both ways."""

    probs: Tensor  # (n,) float64: exp(log_prob)
    logits: Tensor  # (n,) float64
    target: int
    independent: Samples
    stratified: Samples

    def partition(self, samples: Samples) -> Tensor:
        """Z' = e^{o_t} + sum_i e^{o_i} / (m q_i) of each row."""
        return self.logits[self.target].exp() + (self.logits[samples.ids] - samples.log_q.double()).exp().mean(1)


class BadCall(NamedTuple):
    """A call of a sampler of 5 classes, and how it is refused."""

    method: str
    arguments: tuple[Any, ...]
    error: type[Exception]
    text: str


def _bad_matrices() -> Iterator[tuple[str, Tensor, type[Exception], str]]:
    yield "integers", torch.ones(2, DIM).long(), TypeError, "expected a floating dtype, got torch.int64"
    for what, matrix in (("a vector", torch.ones(DIM)), ("no rows", torch.ones(0, DIM))):
        shape = tuple(matrix.shape)
        yield what, matrix, ValueError, f"expected shape (rows, dim) with at least one row, got {shape}"
    for value in (torch.nan, torch.inf, -torch.inf):
        matrix = torch.ones(2, DIM)
        matrix[1, 2] = value
        yield f"with {value}", matrix, ValueError, "expected finite values, got NaN or inf in row 1"


def _bad_ids(lowest: int) -> Iterator[tuple[str, Tensor, type[Exception], str]]:
    yield "floats", torch.zeros(2), TypeError, "expected int64 class ids, got torch.float32"
    yield "too high", torch.tensor([0, 5]), ValueError, f"expected class ids in [{lowest}, 5), got 5"
    yield "too low", torch.tensor([0, lowest - 1]), ValueError, f"expected class ids in [{lowest}, 5), got {lowest - 1}"


def _bad_calls() -> Iterator[tuple[str, BadCall]]:
    rows, ids, cube = torch.ones(2, DIM), torch.tensor([1, 3]), torch.zeros(2, 1, 1).long()
    for what, matrix, error, text in _bad_matrices():
        yield f"sample, hidden {what}", BadCall("sample", (matrix, 3), error, f"hidden: {text}")
        yield f"log_prob, hidden {what}", BadCall("log_prob", (matrix, ids), error, f"hidden: {text}")
        yield f"rebuild, weight {what}", BadCall("rebuild", (matrix,), error, f"weight: {text}")
        if what != "no rows":  # an update of nothing is nothing
            yield f"update, rows {what}", BadCall("update", (ids, matrix), error, f"rows: {text}")
    for what, bad, error, text in _bad_ids(-1):
        yield f"sample, exclude {what}", BadCall("sample", (rows, 3, bad), error, f"exclude: {text}")
        yield f"log_prob, exclude {what}", BadCall("log_prob", (rows, ids, bad), error, f"exclude: {text}")
    for what, bad, error, text in _bad_ids(0):
        yield f"log_prob, ids {what}", BadCall("log_prob", (rows, bad), error, f"ids: {text}")
        yield f"update, ids {what}", BadCall("update", (bad, rows), error, f"ids: {text}")
    for what, bad in (("too many", torch.tensor([0, 1, 2])), ("of three axes", cube)):
        text = f"expected shape (2,) or (2, P), got {tuple(bad.shape)}"
        yield f"sample, exclude {what}", BadCall("sample", (rows, 3, bad), ValueError, f"exclude: {text}")
        yield f"log_prob, exclude {what}", BadCall("log_prob", (rows, ids, bad), ValueError, f"exclude: {text}")
        yield f"log_prob, ids {what}", BadCall("log_prob", (rows, bad), ValueError, f"ids: {text}")
        text = f"ids: expected shape (2,), one for each of rows, got {tuple(bad.shape)}"
        yield f"update, ids {what}", BadCall("update", (bad, rows), ValueError, text)
    text = "ids: expected each class once, got some twice"
    yield "update, ids twice", BadCall("update", (torch.tensor([3, 3]), rows), ValueError, text)
    text = "weight: expected 5 rows, one a class, got 4"
    yield "rebuild, weight of other classes", BadCall("rebuild", (torch.ones(4, DIM),), ValueError, text)
    yield "sample, num 0", BadCall("sample", (rows, 0), ValueError, "num: expected at least 1, got 0")
    text = "exclude: expected at least one of 5 classes left to draw, got none"
    every = torch.arange(5).repeat(2, 2)
    yield "sample, exclude all", BadCall("sample", (rows, 3, every), ValueError, text)
    yield "log_prob, exclude all", BadCall("log_prob", (rows, ids, every), ValueError, text)
    text = "exclude: expected None with shared=True (mask accidental hits instead), got a tensor"
    yield "sample, exclude if shared", BadCall("sample", (rows, 3, ids, None, True), ValueError, text)
    yield "log_prob, exclude if shared", BadCall("log_prob", (rows, ids[:1], ids, True), ValueError, text)
    text = "ids: expected shape (1,) or (1, P), got (2,)"
    yield "log_prob, ids per row if shared", BadCall("log_prob", (rows, ids, None, True), ValueError, text)


BAD_CALLS = dict(_bad_calls())


class SamplerContract(ABC):
    """Inherit, fill in the two hooks, and every law below is tested."""

    variants: ClassVar[dict[str, Options]] = {"default": {}}
    drawn: ClassVar[tuple[str, ...]] = ("default",)
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 3, 5, 64, 65, 300)
    # Whether the sampler learns its classes by `rebuild` alone.
    needs_rebuild: ClassVar[bool] = True
    # Whether a class takes one interval of the uniforms: samplers by inversion of a CDF, but not by alias tables.
    one_interval_per_class: ClassVar[bool] = True
    # How many stratified draws share a uniform: they are the noisier, by so many times at most.
    draws_per_uniform: ClassVar[int] = 1

    @abstractmethod
    def make_sampler(self, num_classes: int, *, seed: int = 0, **options: Any) -> Sampler:
        """A sampler not yet built; its own random numbers come from `seed`."""

    @abstractmethod
    def exact_probs(
        self, sampler: Sampler, weight: Tensor, hidden: Tensor, exclude: Tensor | None, shared: bool
    ) -> Tensor:
        """The q (B, n), or (1, n) if shared, that the sampler should have, naively and in float64."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "options" in metafunc.fixturenames:
            metafunc.parametrize("options", list(self.variants.values()), ids=list(self.variants))
        if "drawn_options" in metafunc.fixturenames:
            some = [self.variants[name] for name in self.drawn]
            metafunc.parametrize("drawn_options", some, ids=list(self.drawn), scope="class")

    def settled(self, num_classes: int, options: Options, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        """A sampler in use, its class embeddings and four queries."""
        weight, hidden = problem(num_classes, dtype=dtype)
        sampler = self.make_sampler(num_classes, **options)
        if dtype == torch.float64:
            sampler.double()
        return settle(sampler, weight, hidden), weight, hidden

    # What q is

    def test_log_prob_is_that_of_the_naive_formula(self, options: Options) -> None:
        for n in self.sizes:
            sampler, weight, hidden = self.settled(n, options, torch.float64)
            exclude = exclusions(n)
            expected = self.exact_probs(sampler, weight, hidden, exclude, shared=False).log().float()
            found = all_log_probs(sampler, hidden, exclude)
            assert_near(found, expected)

    def test_shared_log_prob_is_that_of_the_naive_formula(self, options: Options) -> None:
        for n in (1, 5, 65):
            sampler, weight, hidden = self.settled(n, options, torch.float64)
            expected = self.exact_probs(sampler, weight, hidden, None, shared=True).log().float()
            assert_near(all_log_probs(sampler, hidden, shared=True), expected)

    def test_probabilities_sum_to_one_over_classes_not_excluded(self, options: Options) -> None:
        for n in self.sizes:
            sampler, _, hidden = self.settled(n, options)
            for exclude in (None, torch.tensor([0, -1, n - 1, n // 2]) if n > 1 else None, exclusions(n)):
                probs = all_log_probs(sampler, hidden, exclude).double().exp()
                assert (probs.sum(1) - 1).abs().max() < 1e-5, f"{n} classes"
                if exclude is not None:
                    gone = without(torch.ones_like(probs), exclude) == 0
                    assert ((probs == 0) == gone).all(), f"{n} classes: q must be 0 for excluded ones and only them"
            assert abs(all_log_probs(sampler, hidden, shared=True).double().exp().sum() - 1) < 1e-5

    def test_probabilities_hold_where_the_target_has_nearly_all_the_mass(self, options: Options) -> None:
        weight, _ = problem(65, seed=1)
        hidden = 4 * weight[:2]
        exclude = torch.tensor([0, 1])
        sampler = settle(self.make_sampler(65, **options), weight, hidden)
        probs = all_log_probs(sampler, hidden, exclude).double().exp()
        assert (probs.sum(1) - 1).abs().max() < 1e-5
        samples = sampler.sample(hidden, 1000, exclude, generator=seeded(1))
        assert not (samples.ids == exclude[:, None]).any()
        assert_near(samples.log_q, sampler.log_prob(hidden, samples.ids, exclude), SINGLE)

    def test_a_batch_of_one_shares_its_own_distribution(self, drawn_options: Options) -> None:
        sampler, _, hidden = self.settled(65, drawn_options, torch.float64)
        alone = all_log_probs(sampler, hidden[:1])
        assert_near(all_log_probs(sampler, hidden[:1], shared=True), alone)
        assert_near(all_log_probs(sampler, hidden[:1].expand(3, -1), shared=True), alone)

    def test_log_prob_of_a_few_classes_is_that_among_many(self, options: Options) -> None:
        for n in (5, 300):
            sampler, _, hidden = self.settled(n, options, torch.float64)
            exclude = torch.tensor([0, -1, n - 1, 2])
            among_many = all_log_probs(sampler, hidden, exclude)
            for ids in (torch.tensor([0, 0, n - 2, 3]), torch.tensor([[1, 0, 1]]).expand(4, -1)):
                found = sampler.log_prob(hidden, ids, exclude)
                assert found.shape == ids.shape
                expected = among_many.gather(1, ids.reshape(4, -1)).view(ids.shape)
                assert_near(found, expected)

    # What is drawn

    def test_log_q_of_draws_is_log_prob_and_excluded_classes_are_never_drawn(self, options: Options) -> None:
        for n in self.sizes:
            sampler, _, hidden = self.settled(n, options)
            exclude = exclusions(n)
            samples = sampler.sample(hidden, 40, exclude, generator=seeded(n))
            assert samples.ids.shape == samples.log_q.shape == (4, 40)
            assert samples.ids.dtype == torch.int64
            assert samples.log_q.dtype == torch.float32
            assert samples.ids.min() >= 0
            assert samples.ids.max() < n
            assert not (samples.ids[:, :, None] == exclude[:, None]).any(), f"{n} classes: an excluded one was drawn"
            assert_near(samples.log_q, sampler.log_prob(hidden, samples.ids, exclude), SINGLE)
            for queries, shared in ((hidden[:1], False), (hidden, True)):
                one = sampler.sample(queries, 7, generator=seeded(n), shared=shared)
                assert one.ids.shape == (1, 7)
                assert_near(one.log_q, sampler.log_prob(queries, one.ids, shared=shared), SINGLE)

    def test_each_of_several_sets_follows_the_distribution_that_its_rows_share(self, options: Options) -> None:
        sampler, _, hidden = self.settled(65, options)
        sizes, none = [1, 2, 1], torch.empty(1, 0, dtype=torch.int64)
        samples = sampler._sample(hidden, 40, none, seeded(2), sizes)
        assert samples.ids.shape == samples.log_q.shape == (3, 40)
        for rows, ids, log_q in zip(hidden.split(sizes), samples.ids.split(1), samples.log_q.split(1), strict=True):
            assert_near(log_q, sampler.log_prob(rows, ids, shared=True), SINGLE)
            if self.one_interval_per_class:
                counts = torch.zeros(1, 65).scatter_add_(1, ids, torch.ones(1, 40))
                expected = 40 * all_log_probs(sampler, rows, shared=True).exp()
                assert (counts - expected).abs().max() < 2.01

    def test_stratified_draws_of_a_class_number_m_times_q_within_two(self, options: Options) -> None:
        """A class that takes an interval of length q holds all but the ends of m q strata of length 1/m.

        Where several draws share a uniform, this holds of the first ones, the second ones and so on.
        """
        if not self.one_interval_per_class:
            pytest.skip("a class takes many intervals of the uniforms")
        num = 500
        sampler, _, hidden = self.settled(65, options)
        for exclude, shared in ((exclusions(65), False), (None, True)):
            ids = sampler.sample(hidden, num, exclude, generator=seeded(3), shared=shared).ids
            counts = torch.zeros(len(ids), 65).scatter_add_(1, ids, torch.ones(ids.shape))
            expected = num * all_log_probs(sampler, hidden, exclude, shared).exp()
            several = 1 if shared else self.draws_per_uniform  # of the last ones not all may be wanted
            assert (counts - expected).abs().max() < 2.01 * several + (several - 1)

    def test_the_same_generator_draws_the_same_and_no_other_is_touched(self, options: Options) -> None:
        sampler, _, hidden = self.settled(65, options)
        exclude = exclusions(65)
        state = torch.get_rng_state()
        first = sampler.sample(hidden, 30, exclude, generator=seeded(5))
        again = sampler.sample(hidden, 30, exclude, generator=seeded(5))
        other = sampler.sample(hidden, 30, exclude, generator=seeded(6))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first.ids, again.ids)
        assert torch.equal(first.log_q, again.log_q)
        assert not torch.equal(first.ids, other.ids)

    # The statistics of many draws

    @pytest.fixture(scope="class")
    @classmethod
    def draws(cls, drawn_options: Options) -> Draws:
        target, rows, num = 3, 6400, 16  # 102,400 draws
        made: list[Samples] = []
        for stratified in (False, True):
            weight, hidden = problem(65)
            sampler = settle(cls().make_sampler(65, stratified=stratified, **drawn_options), weight, hidden)
            exclude = torch.tensor([[target, -1, target]])
            every = hidden[:1].expand(rows, -1), num, exclude.expand(rows, -1)
            made.append(sampler.sample(*every, generator=seeded(7)))
        probs = all_log_probs(sampler, hidden[:1], exclude)[0].double().exp()
        return Draws(probs, TAU * (weight @ hidden[0]).double(), target, *made)

    def test_independent_draws_follow_q(self, draws: Draws) -> None:
        assert draws.independent.ids.numel() >= 100_000
        assert p_value(draws.independent.ids, draws.probs) > FALSE_ALARM

    def test_stratified_draws_spread_no_wider_than_independent_ones(self, draws: Draws) -> None:
        assert p_value(draws.stratified.ids, draws.probs) > FALSE_ALARM

    def test_each_stratified_draw_alone_follows_q(self, draws: Draws) -> None:
        ids = draws.stratified.ids
        worst = min(p_value(ids[:, place], draws.probs) for place in range(ids.shape[1]))
        assert worst > FALSE_ALARM / ids.shape[1]

    def test_shared_draws_follow_their_log_prob(self, drawn_options: Options) -> None:
        weight, hidden = problem(65)
        sampler = settle(self.make_sampler(65, stratified=False, **drawn_options), weight, hidden)
        generator = seeded(8)
        ids = torch.cat([sampler.sample(hidden, 10_240, generator=generator, shared=True).ids for _ in range(10)])
        assert p_value(ids, all_log_probs(sampler, hidden, shared=True)[0].exp()) > FALSE_ALARM

    def test_the_mean_of_the_sampled_partition_function_is_the_partition_function(self, draws: Draws) -> None:
        for samples in (draws.independent, draws.stratified):
            partition = draws.partition(samples)
            error = partition.std() / len(partition) ** 0.5
            assert (partition.mean() - draws.logits.exp().sum()).abs() <= SIGMAS * error + 1e-6 * partition.mean()

    def test_stratified_draws_do_not_raise_the_variance_of_the_sampled_partition_function(self, draws: Draws) -> None:
        (independent, its_error), (stratified, other_error) = (
            _variance(draws.partition(samples)) for samples in (draws.independent, draws.stratified)
        )
        margin = SIGMAS * (its_error**2 + other_error**2) ** 0.5
        assert stratified <= self.draws_per_uniform * (independent + margin) + 1e-9

    # What changes q

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors],  # each heir runs it
    )
    @given(data=st.data())
    def test_any_sequence_of_updates_equals_a_rebuild(self, data: st.DataObject) -> None:
        options = self.variants[data.draw(st.sampled_from(list(self.variants)), "variant")]
        n = data.draw(st.integers(1, 300), "num_classes")
        sampler, weight, hidden = self.settled(n, options, torch.float64)
        id_lists = st.lists(st.integers(0, n - 1), max_size=40, unique=True)
        for ids in data.draw(st.lists(id_lists, min_size=1, max_size=4), "updates"):
            seed = data.draw(st.integers(0, 9), "seed")
            rows = torch.randn(len(ids), DIM, dtype=torch.float64, generator=seeded(seed))
            weight[ids] = rows
            sampler.update(torch.tensor(ids, dtype=torch.int64), rows)
        rebuilt = copy.deepcopy(sampler)
        if isinstance(rebuilt, AnchoredSampler):
            rebuilt.keep_order = True  # a rebuild may move anchor and order, after which q is another
        rebuilt.rebuild(weight)
        exclude = torch.tensor([0, -1, n - 1, n // 2]) if n > 1 else None
        expected = all_log_probs(rebuilt, hidden, exclude)
        assert_near(all_log_probs(sampler, hidden, exclude), expected)
        found, drawn = (s.sample(hidden, 5, exclude, generator=seeded(1)) for s in (sampler, rebuilt))
        assert torch.equal(found.ids, drawn.ids)
        assert_near(found.log_q, all_log_probs(sampler, hidden, exclude).gather(1, found.ids))

    def test_a_weight_changed_in_place_changes_nothing_before_an_update(self, drawn_options: Options) -> None:
        sampler, weight, hidden = self.settled(65, drawn_options)
        rows = weight[:3] + 1
        sampler.update(torch.arange(3), rows)
        before = all_log_probs(sampler, hidden)
        weight.zero_()
        rows.zero_()
        assert torch.equal(all_log_probs(sampler, hidden), before)

    def test_an_update_of_nothing_changes_nothing(self) -> None:
        sampler, _, hidden = self.settled(5, next(iter(self.variants.values())))
        before = all_log_probs(sampler, hidden)
        sampler.update(torch.empty(0, dtype=torch.int64), torch.empty(0, DIM))
        assert torch.equal(all_log_probs(sampler, hidden), before)

    # A module among others

    def test_a_deep_copy_draws_the_same_and_stands_alone(self, drawn_options: Options) -> None:
        sampler, weight, hidden = self.settled(65, drawn_options)
        expected = sampler.sample(hidden, 20, generator=seeded(4))
        twin = copy.deepcopy(sampler)
        torch.testing.assert_close(twin.sample(hidden, 20, generator=seeded(4)), expected, rtol=0, atol=0)
        twin.update(torch.arange(65), weight.flip(0))
        torch.testing.assert_close(sampler.sample(hidden, 20, generator=seeded(4)), expected, rtol=0, atol=0)

    def test_a_sampler_loaded_from_a_state_dict_and_rebuilt_draws_the_same(self, drawn_options: Options) -> None:
        sampler, weight, hidden = self.settled(65, drawn_options, torch.float64)
        weight[:9] = weight[:9].flip(0)
        sampler.update(torch.arange(9), weight[:9])
        sampler.train().sample(hidden.flip(1), 1)  # its running mean is now ahead of its anchor
        built = self.settled(65, {**drawn_options, "seed": 1}, torch.float64)[0]
        for loaded in (self.make_sampler(65, seed=1, **drawn_options).double(), built):
            loaded.load_state_dict(copy.deepcopy(sampler.state_dict()))
            loaded.rebuild(weight)
            exclude = exclusions(65)
            expected = all_log_probs(sampler, hidden, exclude)
            assert_near(all_log_probs(loaded, hidden, exclude), expected)
            first, second = (s.sample(hidden, 20, exclude, generator=seeded(2)) for s in (sampler, loaded))
            assert torch.equal(first.ids, second.ids)

    def test_half_precision_around_it_leaves_q_as_it_was(self, drawn_options: Options) -> None:
        sampler, _, hidden = self.settled(65, drawn_options)
        expected = sampler.sample(hidden, 20, generator=seeded(2))
        for dtype in (torch.float16, torch.bfloat16):
            torch.nn.Sequential(sampler).to(dtype)
            found = sampler.sample(hidden, 20, generator=seeded(2))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            query = hidden.to(dtype)
            rounded = all_log_probs(sampler, query.float())
            assert_near(all_log_probs(sampler, query), rounded, SINGLE)

    def test_a_built_sampler_can_change_its_precision(self, drawn_options: Options) -> None:
        sampler, weight, hidden = self.settled(65, drawn_options)
        expected = all_log_probs(sampler, hidden)
        sampler.double()
        assert_near(all_log_probs(sampler, hidden), expected, SINGLE)
        sampler.float()
        sampler.update(torch.arange(2), weight[:2])
        samples = sampler.sample(hidden, 20, generator=seeded(2))
        assert_near(samples.log_q, expected.gather(1, samples.ids), SINGLE)
        assert (all_log_probs(sampler, hidden, torch.zeros(4).long()).double().exp().sum(1) - 1).abs().max() < 1e-5

    def test_ids_may_be_int32(self) -> None:
        sampler, weight, hidden = self.settled(5, next(iter(self.variants.values())))
        ids, exclude = torch.tensor([[0, 1, 4]]).expand(4, -1), torch.tensor([0, 3, -1, 2])
        assert torch.equal(sampler.log_prob(hidden, ids.int(), exclude.int()), sampler.log_prob(hidden, ids, exclude))
        first, second = (sampler.sample(hidden, 9, x, generator=seeded(0)) for x in (exclude, exclude.int()))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        sampler.update(ids[0].int(), weight[ids[0]])

    def test_draws_carry_no_gradient(self) -> None:
        sampler, weight, hidden = self.settled(5, next(iter(self.variants.values())))
        weight, hidden = weight.requires_grad_(), hidden.requires_grad_()
        sampler.rebuild(weight)
        sampler.update(torch.arange(2), weight[:2])
        assert not sampler.sample(hidden, 3).log_q.requires_grad
        assert not all_log_probs(sampler, hidden).requires_grad
        assert not any(buffer.requires_grad for buffer in sampler.buffers())

    # Bad input

    @pytest.mark.parametrize("name", list(BAD_CALLS))
    def test_bad_input_is_refused_by_name_and_harms_nothing(self, name: str) -> None:
        method, arguments, error, text = BAD_CALLS[name]
        sampler, _, hidden = self.settled(5, next(iter(self.variants.values())))
        before = all_log_probs(sampler, hidden)
        with pytest.raises(error, match=f"^{re.escape(text)}$"):
            getattr(sampler, method)(*arguments)
        assert torch.equal(all_log_probs(sampler, hidden), before)

    def test_one_class_cannot_be_excluded_from_itself(self) -> None:
        sampler, _, hidden = self.settled(1, next(iter(self.variants.values())))
        with pytest.raises(ValueError, match=r"^exclude: expected at least one of 1 classes left to draw, got none$"):
            sampler.sample(hidden, 3, torch.tensor([-1, -1, 0, -1]))

    def test_a_sampler_without_classes_asks_for_a_rebuild(self) -> None:
        sampler, _, hidden = self.settled(5, next(iter(self.variants.values())))
        fresh = self.make_sampler(5, **next(iter(self.variants.values())))
        ids = torch.zeros(4, dtype=torch.int64)
        if not self.needs_rebuild:
            assert fresh.sample(hidden, 3).ids.shape == (4, 3)
            return
        loaded = copy.deepcopy(fresh)
        loaded.load_state_dict(sampler.state_dict())
        for empty in (fresh, loaded):
            text = rf"^{type(empty).__name__} knows no classes yet: call rebuild\(weight\) first$"
            for call in (
                lambda s=empty: s.sample(hidden, 3),
                lambda s=empty: s.log_prob(hidden, ids),
                lambda s=empty: s.update(ids[:1], hidden[:1]),
            ):
                with pytest.raises(RuntimeError, match=text):
                    call()


def _variance(values: Tensor) -> tuple[float, float]:
    """The variance of values (R,) and its standard error, from their fourth moment."""
    squares = (values - values.mean()).square()
    return float(squares.mean()), float(squares.std() / len(values) ** 0.5)
