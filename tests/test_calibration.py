"""nu="auto": what it chooses, what it costs, and that the sampler stays a sampler."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rfsoftmax as rf
from rfsoftmax.calibration import NUM_CLASSES, SHARES, probed_blocks
from rfsoftmax.features import GaussianMap
from sampler_contract import FALSE_ALARM, all_log_probs, assert_near, p_value, seeded

DIM, TAU = 16, 8.0


def problem(num_classes: int = 3000) -> tuple[Tensor, Tensor]:
    """Clustered unit vectors: classes (n, d) and queries (300, d) that share a mean direction."""
    centres = torch.randn(20, DIM, generator=seeded(0))
    classes = centres[torch.randint(20, (num_classes,), generator=seeded(1))]
    queries = centres[torch.randint(20, (300,), generator=seeded(2))] + centres[0]
    noise = [torch.randn(len(x), DIM, generator=seeded(3)) for x in (classes, queries)]
    return F.normalize(classes + noise[0], dim=1), F.normalize(queries + noise[1], dim=1)


def sampler(nu: float | str, name: str = "orf", **options: Any) -> rf.KernelSampler:
    options = {"anchor": True, "block_size": 16, "num_features": 64, **options}
    made = rf.make_sampler(name, num_classes=3000, dim=DIM, tau=TAU, nu=nu, generator=seeded(4), **options)
    assert isinstance(made, rf.KernelSampler)
    return made


def settled(made: rf.KernelSampler) -> rf.KernelSampler:
    weight, hidden = problem()
    made.rebuild(weight)
    for some in hidden.split(30):
        made.sample(some, 1, generator=seeded(5))
    made.rebuild(weight)
    return made.eval()


def mean_log_chi2(made: rf.KernelSampler) -> float:
    weight, hidden = problem()
    log_p = (TAU * hidden.double() @ weight.double().T).log_softmax(1)
    log_q = all_log_probs(made, hidden).double()
    return float((2 * log_p - log_q).logsumexp(1).mean())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("orf", {}),
        ("orf", {"num_features": 16}),
        ("sorf", {}),
        ("rff", {"anchor": False, "block_size": 1, "leaf": "kernel", "num_features": 256}),
    ],
)
def test_the_nu_that_the_probe_chooses_is_at_most_a_step_from_the_best_over_all_classes(
    name: str, options: dict[str, Any]
) -> None:
    made = settled(sampler("auto", name, **options))
    assert made.calibration is not None
    found = mean_log_chi2(made)
    each = {share * TAU: mean_log_chi2(settled(sampler(share * TAU, name, **options))) for share in SHARES}
    best = min(each, key=lambda nu: each[nu])
    assert best / 1.5 < made.calibration.nu < best * 1.5
    assert found <= sorted(each.values())[2] + 1e-3
    assert isinstance(made.feature_map, GaussianMap)
    assert made.calibration.nu == pytest.approx(made.feature_map.nu)
    assert list(made.calibration.tried) == pytest.approx([share * TAU for share in SHARES])


def test_the_gain_of_more_frequencies_is_that_of_a_sampler_which_has_them() -> None:
    few, many = settled(sampler("auto", num_features=16)), settled(sampler("auto", num_features=32))
    assert few.calibration is not None
    assert many.calibration is not None
    assert few.calibration.chi2_of_double < few.calibration.chi2
    assert few.calibration.chi2_of_double == pytest.approx(many.calibration.chi2, rel=0.25)


@pytest.mark.parametrize("block_size", [1, 2, 64, 1024, 100_000])
def test_a_probe_holds_the_first_blocks_and_others_that_stand_for_all_and_does_not_grow(block_size: int) -> None:
    sizes = []
    for num_blocks in (1, 2, 63, 10_000, 10_000_000):
        blocks, stands_for = probed_blocks(num_blocks, block_size)
        assert float(stands_for.sum()) == pytest.approx(num_blocks)
        assert len(blocks.unique()) == len(blocks) == len(stands_for)
        assert int(blocks.max()) < num_blocks
        assert int(blocks[0]) == 0
        sizes.append(len(blocks))
    assert sizes[-1] == sizes[-2]
    assert sizes[-1] * block_size <= max(NUM_CLASSES, 2 * block_size)


def test_draws_of_a_calibrated_sampler_follow_log_q() -> None:
    made, (_, hidden) = settled(sampler("auto")), problem()
    target = torch.zeros(2000, dtype=torch.int64)
    samples = made.sample(hidden[:1].expand(2000, -1), 50, target, seeded(6))
    log_q = all_log_probs(made, hidden[:1], target[:1])
    assert p_value(samples.ids, log_q[0].exp()) > FALSE_ALARM
    assert_near(samples.log_q, log_q.expand(2000, -1).gather(1, samples.ids), (1e-5, 1e-4))


@pytest.mark.parametrize("kind", [rf.RandomFourier, rf.OrthogonalFourier, rf.StructuredFourier])
def test_a_retuned_map_is_one_made_with_that_nu_from_the_same_random_numbers(kind: type) -> None:
    first, second = kind(DIM, 40, 2.0, generator=seeded(0)), kind(DIM, 40, 5.0, generator=seeded(0))
    first.retune(5.0)
    weight, hidden = problem()
    torch.testing.assert_close(first(weight), second(weight))
    torch.testing.assert_close(first.kernel(hidden, weight[:300]), second.kernel(hidden, weight[:300]))
    with pytest.raises(ValueError, match="nu: expected a positive finite float, got 0"):
        first.retune(0)


def test_a_loaded_sampler_keeps_the_nu_it_was_saved_with_until_the_next_rebuild() -> None:
    weight, hidden = problem()
    made, other = settled(sampler("auto")), sampler("auto")
    other.load_state_dict(made.state_dict())
    other.rebuild(weight)
    torch.testing.assert_close(all_log_probs(other.eval(), hidden), all_log_probs(made, hidden))
    assert torch.equal(other.recent, made.recent)


def test_a_sampler_that_has_seen_no_query_keeps_its_nu() -> None:
    made = sampler("auto")
    made.rebuild(problem()[0])
    assert made.calibration is None
    assert made.feature_map.nu == pytest.approx(0.5 * float(torch.tensor(64.0).log()))


def test_a_map_whose_nu_cannot_be_moved_is_refused() -> None:
    with pytest.raises(ValueError, match="calibrate: expected False with PositiveRandom, whose nu cannot be moved"):
        sampler("auto", "positive")
