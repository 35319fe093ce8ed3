"""MIDX, LSH, in-batch and mixture samplers under the contract of sampler_contract.py, then the laws of their own."""

import copy
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rfsoftmax as rf
import test_samplers
from rfsoftmax.samplers import midx
from sampler_contract import (
    DIM,
    FALSE_ALARM,
    TAU,
    Options,
    SamplerContract,
    all_log_probs,
    assert_near,
    exclusions,
    p_value,
    problem,
    seeded,
    without,
)

# Under the contract


class TestMIDX(SamplerContract):
    """Against the softmax of embeddings that are sums of the words nearest to them, found by trying all."""

    variants: ClassVar[dict[str, Options]] = {
        "residual": {},
        "product": {"quantisation": "product"},
        "residual-5": {"num_codewords": 5},
        "product-5": {"num_codewords": 5, "quantisation": "product"},
        "residual-20": {"num_codewords": 20, "iterations": 2},
        "one word": {"num_codewords": 1},
    }
    drawn = ("residual", "product-5", "residual-20")

    def make_sampler(self, num_classes: int, *, seed: int = 0, **options: Any) -> rf.MIDXSampler:
        # An update is a rebuild for codebooks that stay as they are.
        return rf.MIDXSampler(**{"tau": TAU, "keep_codebooks": True, "generator": seeded(seed), **options})

    def exact_probs(
        self, sampler: rf.Sampler, weight: Tensor, hidden: Tensor, exclude: Tensor | None, shared: bool
    ) -> Tensor:
        assert isinstance(sampler, rf.MIDXSampler)
        quantised = naive_quantised(sampler.codebooks.double(), weight.double())
        probs = without((TAU * hidden.double() @ quantised.T).softmax(1), exclude)
        return probs.mean(0, keepdim=True) if shared else probs


def naive_quantised(codebooks: Tensor, weight: Tensor) -> Tensor:
    rows = []
    for row in weight:
        first = min(codebooks[0], key=lambda word: float((row - word).norm()))
        second = min(codebooks[1], key=lambda word: float((row - first - word).norm()))
        rows.append(first + second)
    return torch.stack(rows)


class TestLSH(SamplerContract):
    """Against buckets that are sets. 2^12 buckets for at most 300 classes are nearly all empty."""

    variants: ClassVar[dict[str, Options]] = {
        "default": {},
        "few bits": {"num_tables": 5, "num_bits": 2},
        "many bits": {"num_tables": 3, "num_bits": 12, "uniform_share": 0.5},
        "one bit": {"num_tables": 1, "num_bits": 1, "uniform_share": 0.01},
        "all uniform": {"num_tables": 2, "uniform_share": 1.0},
    }
    drawn = ("default", "few bits", "many bits")
    one_interval_per_class = False

    def make_sampler(self, num_classes: int, *, seed: int = 0, **options: Any) -> rf.LSHSampler:
        return rf.LSHSampler(DIM, generator=seeded(seed), **options)

    def exact_probs(
        self, sampler: rf.Sampler, weight: Tensor, hidden: Tensor, exclude: Tensor | None, shared: bool
    ) -> Tensor:
        assert isinstance(sampler, rf.LSHSampler)
        probs = torch.zeros(len(hidden), len(weight), dtype=torch.float64)
        for row, query in enumerate(hidden.double()):
            gone = set() if exclude is None else set(exclude.reshape(len(hidden), -1)[row].tolist())
            everything = set(range(len(weight))) - gone
            for table in sampler.directions.double():
                same = ((weight.double() @ table.T >= 0) == (table @ query >= 0)).all(1)
                share = (1 - sampler.uniform_share) / len(sampler.directions)
                bucket = set(same.nonzero().flatten().tolist()) - gone or everything
                probs[row, list(bucket)] += share / len(bucket)
            probs[row, list(everything)] += sampler.uniform_share / len(everything)
        return probs.mean(0, keepdim=True) if shared else probs


class TestInBatch(SamplerContract):
    """After 40 batches of targets that thin out like 1/i^2; no draw renews the table before 40 more."""

    variants: ClassVar[dict[str, Options]] = {
        "default": {},
        "forgetful": {"forget": 0.1, "uniform_share": 0.01},
        "all uniform": {"uniform_share": 1.0},
    }
    drawn = ("default", "forgetful")
    needs_rebuild = False

    def batches(self, num_classes: int, seed: int = 0) -> Tensor:
        u = torch.rand(40, 30, dtype=torch.float64, generator=seeded(seed))
        return (0.3 / u).long() % num_classes

    def make_sampler(self, num_classes: int, *, seed: int = 0, **options: Any) -> rf.InBatchSampler:
        sampler = rf.InBatchSampler(num_classes, **options)
        for batch in self.batches(num_classes, seed):
            sampler.observe(batch)
            sampler.refresh()
        return sampler

    def exact_probs(
        self, sampler: rf.Sampler, weight: Tensor, hidden: Tensor, exclude: Tensor | None, shared: bool
    ) -> Tensor:
        assert isinstance(sampler, rf.InBatchSampler)
        counts = [0.0] * len(weight)
        for batch in self.batches(len(weight)).tolist():
            counts = [count * (1 - sampler.forget) for count in counts]
            for i in batch:
                counts[i] += 1
        share = sampler.uniform_share
        q = [share / len(weight) + (1 - share) * count / sum(counts) for count in counts]
        return without(torch.tensor(q, dtype=torch.float64).repeat(1 if shared else len(hidden), 1), exclude)


class TestMixture(SamplerContract):
    """Against the weighted sum of the parts' own oracles."""

    recipes: ClassVar[dict[str, list[tuple[SamplerContract, float, Options]]]] = {
        "of one": [(test_samplers.TestExact(), 2.0, {})],
        "exact, uniform": [(test_samplers.TestExact(), 3.0, {}), (test_samplers.TestUniform(), 1.0, {})],
        "rff, unigram": [
            (test_samplers.TestRandomFourier(), 0.7, {"block_size": 7, "leaf": "kernel", "backend": "torch"}),
            (test_samplers.TestUnigram(), 0.3, {}),
        ],
        "midx, lsh, in-batch": [
            (TestMIDX(), 1.0, {"num_codewords": 5}),
            (TestLSH(), 1.0, {"num_bits": 2}),
            (TestInBatch(), 0.01, {}),
        ],
    }
    variants: ClassVar[dict[str, Options]] = {name: {"recipe": recipe} for name, recipe in recipes.items()}
    drawn = ("exact, uniform", "rff, unigram", "midx, lsh, in-batch")
    one_interval_per_class = False

    def make_sampler(self, num_classes: int, *, seed: int = 0, **options: Any) -> rf.MixtureSampler:
        recipe = options.pop("recipe")
        parts = [of.make_sampler(num_classes, seed=seed, **more) for of, _, more in recipe]
        return rf.MixtureSampler(parts, [weight for _, weight, _ in recipe], **options)

    def exact_probs(
        self, sampler: rf.Sampler, weight: Tensor, hidden: Tensor, exclude: Tensor | None, shared: bool
    ) -> Tensor:
        assert isinstance(sampler, rf.MixtureSampler)
        recipe = next(recipe for recipe in self.recipes.values() if is_made_by(recipe, sampler))
        total = sum(share for _, share, _ in recipe)
        probs = torch.zeros(1, 1, dtype=torch.float64)
        for (of, share, _), part in zip(recipe, sampler.samplers, strict=True):
            assert isinstance(part, rf.Sampler)
            probs = probs + share / total * of.exact_probs(part, weight, hidden, exclude, shared)
        return probs


def is_made_by(recipe: list[tuple[SamplerContract, float, Options]], sampler: rf.MixtureSampler) -> bool:
    kinds = [type(of.make_sampler(3, **options)) for of, _, options in recipe]
    return kinds == [type(part) for part in sampler.samplers]


# The lists of cells


def as_lists(lists: midx.CellLists) -> list[list[int]]:
    ends = (lists.starts + lists.sizes).tolist()
    return [(lists.keys[a:b] % len(lists.cells)).tolist() for a, b in zip(lists.starts.tolist(), ends, strict=True)]


def test_lists_of_cells_follow_every_move() -> None:
    generator = seeded(0)
    cells = torch.randint(5, (40, 2), generator=generator) + torch.tensor([0, 5])
    lists = midx.CellLists()
    lists.build(cells.clone(), 12)
    for size in (1, 0, 40, 7, 3):
        ids = torch.randperm(40, generator=generator)[:size]
        cells[ids] = torch.randint(5, (size, 2), generator=generator) + torch.tensor([0, 5])
        lists.move(ids, cells[ids])
        assert as_lists(lists) == [[i for i in range(40) if cell in cells[i]] for cell in range(12)]
        assert torch.equal(lists.cells, cells)


def test_a_move_to_where_classes_are_already_touches_nothing() -> None:
    lists = midx.CellLists()
    lists.build(torch.tensor([[1], [0], [1]]), 2)
    keys = lists.keys
    lists.move(torch.tensor([2, 0]), torch.tensor([[1], [1]]))
    assert lists.keys is keys


def test_equal_parts_of_the_uniforms_pick_each_class_of_a_cell_that_is_not_excluded() -> None:
    members = [0, 2, 3, 7, 8, 11]
    lists = midx.CellLists()
    lists.build(torch.tensor([[i in members] for i in range(12)]).long(), 2)
    for gone in itertools.chain.from_iterable(itertools.combinations(range(12), size) for size in range(4)):
        exclude = torch.tensor([[-1, *gone, -1]])
        left = [i for i in members if i not in gone]
        cells = torch.ones(1, 3 * len(left), dtype=torch.int64)
        assert lists.remaining(cells, exclude).unique().tolist() == [len(left)]
        u = (torch.arange(3 * len(left), dtype=torch.float64) + 0.01).unsqueeze(0) / (3 * len(left))
        assert lists.pick(cells, u, exclude)[0].tolist() == [i for i in left for _ in range(3)]
    last = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)
    assert lists.pick(cells[:, :1], last, torch.tensor([[8, 11]])).item() == 7


def test_an_inverted_cdf_never_gives_a_place_without_mass() -> None:
    mass = torch.tensor([[0.0, 0.3, 0.0, 1e-300, 0.1, 0.0]], dtype=torch.float64)
    u = torch.tensor([[0.0, 0.5, 0.75, 0.999, 1 - 2.0**-53]], dtype=torch.float64)
    place, left = midx.invert_cdf(mass, u)
    assert place.tolist() == [[1, 1, 4, 4, 4]]
    assert ((left >= 0) & (left < 1)).all()
    torch.testing.assert_close(left[0, 1], torch.tensor(2 / 3, dtype=torch.float64))
    least = torch.tensor([[0.0, 5e-324, 0.0]], dtype=torch.float64)
    assert midx.invert_cdf(least, u)[0].tolist() == [[1, 1, 1, 1, 1]]


# MIDX


def midx_sampler(**options: Any) -> rf.MIDXSampler:
    return TestMIDX().make_sampler(0, **{"keep_codebooks": False, **options})


@pytest.mark.parametrize("quantisation", ["residual", "product"])
def test_a_word_for_each_class_makes_q_the_softmax(quantisation: str) -> None:
    weight, hidden = problem(65, dtype=torch.float64)
    sampler = midx_sampler(num_codewords=65, quantisation=quantisation).double()
    sampler.rebuild(weight)
    expected = without((TAU * hidden @ weight.T).exp(), exclusions(65))
    assert_near(all_log_probs(sampler, hidden, exclusions(65)), expected.log().float())


def test_codebooks_of_products_have_half_of_the_coordinates_each() -> None:
    weight, _ = problem(65)
    for dim, half in ((DIM, DIM // 2), (5, 3), (1, 1)):
        sampler = midx_sampler(num_codewords=9, quantisation="product")
        sampler.rebuild(weight[:, :dim])
        first, second = sampler.codebooks
        assert first.any(0).tolist() == [True] * half + [False] * (dim - half)
        assert second.any(0).tolist() == [False] * half + [True] * (dim - half)


def test_codebooks_are_learned_anew_at_a_rebuild_unless_kept() -> None:
    weight, _ = problem(300)
    moving, staying = midx_sampler(num_codewords=5), midx_sampler(num_codewords=5, keep_codebooks=True)
    for sampler in (moving, staying):
        sampler.rebuild(weight)
    before = moving.codebooks
    assert torch.equal(before, staying.codebooks)
    for sampler in (moving, staying):
        sampler.update(torch.arange(300), weight.flip(1))
        assert torch.equal(sampler.codebooks, before)
        sampler.rebuild(weight.flip(1))
    assert torch.equal(staying.codebooks, before)
    assert not torch.allclose(moving.codebooks, before)
    moving.rebuild(weight)
    assert torch.equal(moving.codebooks, before)


def test_saved_codebooks_are_kept_by_the_first_rebuild_and_no_other() -> None:
    weight, _ = problem(300)
    saved = midx_sampler(num_codewords=7)
    saved.rebuild(weight)
    loaded = midx_sampler(num_codewords=5, seed=1)
    loaded.load_state_dict(saved.state_dict())
    loaded.rebuild(weight)
    assert torch.equal(loaded.codebooks, saved.codebooks)
    loaded.rebuild(weight)
    assert loaded.codebooks.shape == (2, 5, DIM)


def test_the_generator_decides_the_codebooks() -> None:
    weight, _ = problem(300)
    first, again, other = (midx_sampler(num_codewords=5, seed=seed) for seed in (0, 0, 1))
    state = torch.get_rng_state()
    for sampler in (first, again, other):
        sampler.rebuild(weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.codebooks, again.codebooks)
    assert not torch.equal(first.codebooks, other.codebooks)


def test_k_means_finds_the_centres_of_clusters_far_apart() -> None:
    generator = seeded(0)
    centres = 10 * torch.randn(8, DIM, generator=generator)
    points = centres.repeat(50, 1) + 0.1 * torch.randn(400, DIM, generator=generator)
    words = midx.k_means(points, 8, 5, generator)
    means = points.view(50, 8, DIM).mean(0)
    torch.testing.assert_close(words[torch.cdist(means, words).argmin(1)], means)


def test_k_means_of_equal_points_leaves_words_without_points_where_they_are() -> None:
    words = midx.k_means(torch.ones(9, DIM), 4, 3, seeded(0))
    assert torch.equal(words, torch.ones(4, DIM))


def test_more_words_bring_q_closer_to_the_softmax() -> None:
    """By chi2 = sum p^2 / q - 1, on average over queries."""
    generator = seeded(0)
    weight = F.normalize(torch.randn(2000, 8, generator=generator), dim=1)
    hidden = F.normalize(torch.randn(100, 8, generator=generator), dim=1)
    p = (rf.DEFAULT_TAU * hidden @ weight.T).double().softmax(1)
    chi2 = []
    for num_codewords in (1, 16, 128):
        sampler = midx_sampler(num_codewords=num_codewords, tau=rf.DEFAULT_TAU)
        sampler.rebuild(weight)
        chi2.append(float((p.square() / all_log_probs(sampler, hidden).double().exp()).sum(1).mean() - 1))
    assert chi2[0] > 2 * chi2[1] > 8 * chi2[2]


def test_midx_draws_do_not_depend_on_the_size_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, _, hidden = TestMIDX().settled(65, {"num_codewords": 5}, torch.float64)
    expected = sampler.sample(hidden, 50, exclusions(65), generator=seeded(0))
    log_probs = all_log_probs(sampler, hidden, exclusions(65))
    monkeypatch.setattr(midx, "_CHUNK_ELEMENTS", 1)
    found = sampler.sample(hidden, 50, exclusions(65), generator=seeded(0))
    assert torch.equal(found.ids, expected.ids)
    assert_near(all_log_probs(sampler, hidden, exclusions(65)), log_probs)


@pytest.mark.parametrize("scale", [10.0, 1e3, 1e6])
def test_midx_keeps_its_laws_for_queries_of_any_length(scale: float) -> None:
    """Far below the best word scores no longer fall, so that every class keeps a probability."""
    sampler, _, hidden = TestMIDX().settled(65, {"num_codewords": 5})
    hidden = scale * hidden
    for exclude, shared in ((exclusions(65), False), (None, True)):
        log_q = all_log_probs(sampler, hidden, exclude, shared)
        assert (log_q.double().exp().sum(1) - 1).abs().max() < 1e-5
        gone = without(torch.ones_like(log_q), exclude) == 0
        assert torch.equal(log_q == -torch.inf, gone)
        samples = sampler.sample(hidden, 50, exclude, generator=seeded(0), shared=shared)
        assert_near(samples.log_q, log_q.gather(1, samples.ids))
        assert torch.isfinite(samples.log_q).all()


def test_uniforms_at_the_ends_draw_classes_with_probability() -> None:
    for of in (TestMIDX(), TestLSH(), TestInBatch()):
        sampler, _, hidden = of.settled(20, next(iter(of.variants.values())))
        ends = torch.tensor([[0.0, 2.0**-53, 0.5, 1 - 2.0**-53]], dtype=torch.float64).expand(4, -1)
        for left in range(20):
            exclude = torch.tensor([[i for i in range(20) if i != left]]).expand(4, -1)
            ids, log_q = sampler._draw(hidden, exclude, ends, None, False)
            assert (ids == left).all()
            assert log_q.abs().max() < 1e-12


@pytest.mark.parametrize("of", [TestMIDX(), TestLSH(), TestMixture()], ids=["midx", "lsh", "mixture"])
def test_a_built_sampler_that_is_loaded_asks_for_a_rebuild(of: SamplerContract) -> None:
    options = list(of.variants.values())[-1]
    sampler, weight, hidden = of.settled(5, options)
    sampler.load_state_dict(of.settled(5, options)[0].state_dict())
    with pytest.raises(RuntimeError, match=f"^{type(sampler).__name__} knows no classes yet"):
        sampler.sample(hidden, 3)
    sampler.rebuild(weight)
    assert sampler.sample(hidden, 3).ids.shape == (4, 3)


# LSH


def test_q_by_hashing_depends_on_the_direction_of_queries_alone() -> None:
    sampler, _, hidden = TestLSH().settled(65, {})
    assert torch.equal(all_log_probs(sampler, 7 * hidden), all_log_probs(sampler, hidden))


def test_vectors_share_a_bucket_by_the_angle_between_them() -> None:
    """(1 - a/pi)^bits on average over tables, within SIGMAS standard errors of 4,000 of them."""
    first, second = torch.tensor([[1.0, 0.0]]), torch.tensor([[math.cos(0.7), math.sin(0.7)]])
    sampler = rf.LSHSampler(2, 4000, 3, generator=seeded(0))
    shared = (sampler._buckets(first) == sampler._buckets(second))[0, :-1].double().mean()
    expected = (1 - 0.7 / math.pi) ** 3
    assert abs(float(shared) - expected) < 4.5 * math.sqrt(expected * (1 - expected) / 4000)


def test_empty_buckets_leave_their_share_to_uniform_draws() -> None:
    weight = -torch.ones(10, 1)
    sampler = rf.LSHSampler(1, 4, 3, uniform_share=0.25)
    sampler.rebuild(weight)
    assert_near(all_log_probs(sampler, torch.ones(1, 1)).exp(), torch.full((1, 10), 0.1))
    sampler.update(torch.tensor([2, 5]), torch.ones(2, 1))
    expected = torch.full((1, 10), 0.025)
    expected[0, [2, 5]] += 0.375
    assert_near(all_log_probs(sampler, torch.ones(1, 1)).exp(), expected)
    alone = all_log_probs(sampler, torch.ones(1, 1), torch.tensor([[2, 5]])).exp()
    assert_near(alone[0, [0, 2, 5]], torch.tensor([0.125, 0.0, 0.0]))


def test_hashing_brings_q_closer_to_the_softmax_than_uniform_draws_are() -> None:
    generator = seeded(0)
    weight = F.normalize(torch.randn(2000, 8, generator=generator), dim=1)
    hidden = F.normalize(torch.randn(100, 8, generator=generator), dim=1)
    p = (rf.DEFAULT_TAU * hidden @ weight.T).double().softmax(1)
    sampler = rf.LSHSampler(8, generator=generator)
    sampler.rebuild(weight)
    chi2 = (p.square() / all_log_probs(sampler, hidden).double().exp()).sum(1).mean() - 1
    assert chi2 < 0.5 * (2000 * p.square().sum(1).mean() - 1)


# In-batch


def test_targets_are_seen_in_training_and_the_table_is_renewed_after_1_2_4_and_8_batches() -> None:
    sampler = rf.InBatchSampler(4, uniform_share=0.5, forget=0.0, refresh_every=8)
    hidden, target = torch.zeros(2, DIM), torch.tensor([[1, -1], [1, 2]])
    sampler.eval().sample(hidden, 3, target)
    assert int(sampler.batches_seen) == 0
    sampler.train().sample(hidden, 3)
    assert int(sampler.batches_seen) == 0
    renewed = []
    for _ in range(30):
        sampler.sample(hidden, 3, target)
        renewed.append(int(sampler.batches_counted))
    assert [key for key, _ in itertools.groupby(renewed)] == [0, 1, 2, 4, 8, 16, 24]
    expected = torch.tensor([1 / 8, 1 / 8 + 1 / 3, 1 / 8 + 1 / 6, 1 / 8])
    assert_near(all_log_probs(sampler, hidden[:1]).exp(), expected.unsqueeze(0))


def test_log_q_is_of_the_table_drawn_from_though_the_draw_itself_is_seen() -> None:
    sampler = rf.InBatchSampler(5, refresh_every=1)
    hidden = torch.zeros(3, DIM)
    for step in range(6):
        target = torch.full((3,), step % 5)
        samples = sampler.sample(hidden, 4, target, generator=seeded(step))
        assert_near(samples.log_q, sampler.log_prob(hidden, samples.ids, target))


def test_in_batch_frequencies_forget_by_the_batch() -> None:
    sampler = rf.InBatchSampler(3, uniform_share=1e-9, forget=0.5)
    for target in ([0, 0], [1, -1], [2, 2]):
        sampler.observe(torch.tensor(target))
        sampler.refresh()
    assert_near(all_log_probs(sampler, torch.zeros(1, 1)).exp(), torch.tensor([[0.5, 0.5, 2.0]]) / 3)
    once = rf.InBatchSampler(3, uniform_share=1e-9, forget=0.5)
    once.observe(torch.tensor([0]))
    once.refresh()
    for _ in range(2):
        once.observe(torch.tensor([1]))
    once.refresh()
    assert once.frequencies.tolist() == [0.25, 2.0, 0.0]


def test_in_batch_tables_are_whole_numbers_that_no_cast_can_round() -> None:
    sampler = rf.InBatchSampler(100, uniform_share=1e-6)
    sampler.observe(torch.zeros(1000, dtype=torch.int64))
    sampler.refresh()
    expected = all_log_probs(sampler, torch.zeros(1, DIM), torch.tensor([0]))
    found = all_log_probs(sampler.float(), torch.zeros(1, DIM), torch.tensor([0]))
    assert torch.equal(found, expected)
    assert abs(found.double().exp().sum() - 1) < 1e-5
    sampler.refresh()
    assert torch.equal(all_log_probs(sampler, torch.zeros(1, DIM), torch.tensor([0])), expected)


def test_a_head_teaches_its_in_batch_sampler_the_frequencies_of_targets() -> None:
    sampler = rf.InBatchSampler(50, uniform_share=0.1, refresh_every=4)
    head = rf.SoftmaxHead(DIM, 50, sampler, num_negatives=5)
    for step in range(20):
        target = (torch.rand(64, generator=seeded(step)) ** 2 * 10).long()
        head(torch.randn(64, DIM, generator=seeded(step)), target).backward()
    q = all_log_probs(sampler, torch.zeros(1, DIM)).exp()[0]
    expected = 0.002 + 0.9 * (torch.arange(1, 11) / 10).sqrt().diff(prepend=torch.zeros(1))
    assert (q[:10] - expected).abs().max() < 0.1 * expected.max()
    torch.testing.assert_close(q[10:], torch.full((40,), 0.002))


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        (torch.zeros(2), TypeError, "target: expected int64 class ids, got torch.float32"),
        (torch.tensor([0, 3]), ValueError, "target: expected class ids in [-1, 3), got 3"),
        (torch.tensor([-100]), ValueError, "target: expected class ids in [-1, 3), got -100"),
    ],
)
def test_observe_refuses_what_is_no_target(target: Tensor, error: type[Exception], text: str) -> None:
    sampler = rf.InBatchSampler(3)
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        sampler.observe(target)
    assert not sampler.seen.any()


# Mixtures


def test_a_mixture_of_one_draws_as_it_does() -> None:
    sampler, _, hidden = TestMixture().settled(65, TestMixture.variants["of one"])
    alone = sampler.samplers[0]
    for exclude, shared in ((exclusions(65), False), (None, True)):
        found, expected = (s.sample(hidden, 30, exclude, seeded(0), shared) for s in (sampler, alone))
        assert torch.equal(found.ids, expected.ids)
        assert_near(found.log_q, expected.log_q)


def test_a_mixture_of_mixtures_is_a_mixture() -> None:
    weight, hidden = problem(65, dtype=torch.float64)
    parts = [rf.ExactSampler(tau=TAU), rf.UniformSampler(65), rf.LogUniformSampler(65)]
    flat = rf.MixtureSampler(parts, [1, 1, 2])
    nested = rf.MixtureSampler([rf.MixtureSampler(parts[:2]), parts[2]])
    for sampler in (flat, nested):
        sampler.rebuild(weight)
    assert_near(all_log_probs(nested, hidden, exclusions(65)), all_log_probs(flat, hidden, exclusions(65)))


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.03, 0.97], [5.0, 1.0]])
def test_stratified_mixtures_draw_from_each_part_as_often_as_its_weight_says(weights: list[float]) -> None:
    low, high = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    parts = [rf.UnigramSampler(counts, min_count=1e-12) for counts in (low, high)]
    ids = rf.MixtureSampler(parts, weights).sample(torch.zeros(50, 1), 17, generator=seeded(0)).ids
    assert ((ids == 0).sum(1) - 17 * weights[0] / sum(weights)).abs().max() < 1


def test_independent_mixtures_draw_from_rows_with_runs_of_any_length() -> None:
    parts = [rf.UniformSampler(3), rf.UnigramSampler(torch.tensor([1, 5, 100]))]
    sampler = rf.MixtureSampler(parts, [1, 3], stratified=False)
    exclude = torch.tensor([[0, -1]]).expand(40_000, -1)
    samples = sampler.sample(torch.zeros(40_000, 1), 3, exclude, generator=seeded(0))
    expected = 0.25 * torch.tensor([0, 1 / 2, 1 / 2]) + 0.75 * torch.tensor([0, 5 / 105, 100 / 105])
    for place in range(3):
        assert p_value(samples.ids[:, place], expected) > FALSE_ALARM / 3
    torch.testing.assert_close(samples.log_q, expected.log()[samples.ids])


def test_a_mixture_has_classes_as_soon_as_all_its_parts_do() -> None:
    known = rf.MixtureSampler([rf.UniformSampler(5), rf.LogUniformSampler(5)])
    assert known.num_classes == 5
    learning = rf.MixtureSampler([rf.UniformSampler(5), rf.ExactSampler()])
    assert learning.num_classes == 0
    with pytest.raises(ValueError, match=r"^weight: expected 5 rows, one a class, got 4$"):
        learning.rebuild(torch.ones(4, DIM))
    assert learning.samplers[1].num_classes == 0
    learning.rebuild(torch.ones(5, DIM))
    assert learning.num_classes == 5


def test_modes_and_updates_reach_the_parts_of_a_mixture() -> None:
    weight, hidden = problem(9)
    counted = rf.InBatchSampler(9)
    sampler = rf.MixtureSampler([rf.ExactSampler(tau=TAU), counted])
    sampler.rebuild(weight)
    sampler.eval().sample(hidden, 2, torch.arange(4))
    assert int(counted.batches_seen) == 0
    sampler.train().sample(hidden, 2, torch.arange(4))
    assert int(counted.batches_seen) == 1
    sampler.update(torch.arange(9), torch.zeros(9, DIM))
    assert_near(all_log_probs(sampler, hidden).exp(), torch.full((4, 9), 1 / 9))


# Options, and samplers by name


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: rf.MIDXSampler(0), "num_codewords: expected at least 1, got 0"),
        (lambda: rf.MIDXSampler(iterations=-1), "iterations: expected at least 0, got -1"),
        (
            lambda: rf.MIDXSampler(quantisation="scalar"),  # type: ignore[arg-type]
            "quantisation: expected one of ('residual', 'product'), got 'scalar'",
        ),
        (lambda: rf.LSHSampler(0), "dim: expected at least 1, got 0"),
        (lambda: rf.LSHSampler(2, 0), "num_tables: expected at least 1, got 0"),
        (lambda: rf.LSHSampler(2, 2, 0), "num_bits: expected at least 1, got 0"),
        (lambda: rf.LSHSampler(2, 2, 25), "num_bits: expected at most 24, as a table has 2^num_bits buckets, got 25"),
        (lambda: rf.LSHSampler(2, uniform_share=0), "uniform_share: expected a number in (0, 1], got 0"),
        (lambda: rf.LSHSampler(2, uniform_share=math.nan), "uniform_share: expected a number in (0, 1], got nan"),
        (lambda: rf.InBatchSampler(0), "num_classes: expected at least 1, got 0"),
        (lambda: rf.InBatchSampler(2, uniform_share=1.5), "uniform_share: expected a number in (0, 1], got 1.5"),
        (lambda: rf.InBatchSampler(2, forget=1.0), "forget: expected a number in [0, 1), got 1.0"),
        (lambda: rf.InBatchSampler(2, refresh_every=0), "refresh_every: expected at least 1, got 0"),
        (lambda: rf.MixtureSampler([]), "samplers: expected at least one, got none"),
        (
            lambda: rf.MixtureSampler([rf.UniformSampler(2)], [1, 2]),
            "weights: expected 1, one for each of samplers, got 2",
        ),
        (
            lambda: rf.MixtureSampler([rf.UniformSampler(2)], [0]),
            "weights: expected positive finite numbers, got [0.0]",
        ),
        (
            lambda: rf.MixtureSampler([rf.UniformSampler(2), rf.UniformSampler(3), rf.ExactSampler()]),
            "samplers: expected all for as many classes, got for [2, 3]",
        ),
    ],
)
def test_bad_options_are_refused_by_name(make: Callable[[], rf.Sampler], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make()


@pytest.mark.parametrize("of", [TestMIDX(), TestLSH()], ids=["midx", "lsh"])
def test_vectors_of_another_dim_are_refused_by_name(of: SamplerContract) -> None:
    sampler, _, hidden = of.settled(5, next(iter(of.variants.values())))
    before = all_log_probs(sampler, hidden)
    for wide in (torch.ones(2, DIM + 1), torch.ones(2, 1)):
        calls: list[tuple[str, int, Callable[[Tensor], object]]] = [
            ("hidden", 2, lambda x: sampler.sample(x, 3)),
            ("hidden", 2, lambda x: sampler.log_prob(x, torch.tensor([0, 1]))),
            ("rows", 2, lambda x: sampler.update(torch.tensor([0, 1]), x)),
            ("weight", 5, lambda x: sampler.rebuild(x.repeat(3, 1)[:5])),
        ]
        for name, rows, call in calls:
            text = rf"^{name}: expected shape \(rows, {DIM}\), got \({rows}, {wide.shape[1]}\)$"
            with pytest.raises(ValueError, match=text):
                call(wide)
            assert torch.equal(all_log_probs(sampler, hidden), before)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("midx", rf.MIDXSampler, {"num_codewords": 3, "quantisation": "product"}),
        ("lsh", rf.LSHSampler, {"num_tables": 2, "num_bits": 3}),
        ("in_batch", rf.InBatchSampler, {"refresh_every": 3}),
        ("mixture", rf.MixtureSampler, {"samplers": ["midx", "unigram", rf.UniformSampler(9)], "weights": [3, 2, 1]}),
    ],
)
def test_every_new_name_makes_a_sampler_that_trains_a_head(name: str, kind: type, options: Options) -> None:
    counts = torch.arange(9)
    sampler = rf.make_sampler(name, num_classes=9, dim=DIM, counts=counts, stratified=False, **options)
    assert type(sampler) is kind
    assert not sampler.stratified
    head = rf.SoftmaxHead(DIM, 9, sampler, num_negatives=4)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for negatives in ("per_example", "shared", "per_example"):
        head.negatives = negatives
        head(torch.randn(6, DIM, generator=seeded(0)), torch.arange(6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = rf.SoftmaxHead(DIM, 9, copy.deepcopy(sampler), num_negatives=4)
    twin.load_state_dict(head.state_dict())
    assert torch.isfinite(twin(torch.randn(6, DIM, generator=seeded(0)), torch.arange(6)))


def test_a_mixture_by_name_wants_samplers() -> None:
    with pytest.raises(ValueError, match=r"^samplers: expected at least one, got none$"):
        rf.make_sampler("mixture", num_classes=9, dim=DIM)
    with pytest.raises(ValueError, match=r"^name: expected one of .*, got 'softmax'$"):
        rf.make_sampler("mixture", num_classes=9, dim=DIM, samplers=["softmax"])


@pytest.mark.parametrize("options", [{}, {"negatives": "shared"}, {"loss": "nce"}])
def test_an_in_batch_sampler_learns_the_targets_of_its_head_in_every_mode(options: Options) -> None:
    sampler = rf.InBatchSampler(50)
    head = rf.SoftmaxHead(DIM, 50, sampler, 5, **options)
    head(torch.randn(4, DIM, generator=seeded(0)), torch.tensor([7, 7, 7, 9]))
    assert (sampler.seen + sampler.frequencies).nonzero().flatten().tolist() == [7, 9]


@pytest.mark.parametrize("options", [{}, {"negatives": "shared"}, {"negatives": 2}, {"loss": "nce"}])
@pytest.mark.parametrize("share", [1.0, 1e-9])
def test_an_in_batch_part_of_a_mixture_sees_every_batch_of_its_head_once(options: Options, share: float) -> None:
    part = rf.InBatchSampler(50)
    head = rf.SoftmaxHead(DIM, 50, rf.MixtureSampler([rf.UniformSampler(50), part], [1.0, share]), 5, **options)
    for step in range(1, 4):
        head(torch.randn(4, DIM, generator=seeded(0)), torch.tensor([7, 7, 7, 9]))
        assert int(part.batches_seen) == step
    head.sampler.eval()
    head(torch.randn(4, DIM, generator=seeded(0)), torch.tensor([7, 7, 7, 9]))
    assert int(part.batches_seen) == 3
