"""Diagnostics against loops, enumeration and Theorem 1.

Statistical tests compare at SIGMAS standard errors with fixed seeds: a two-sided false alarm of 7e-6 for each number
compared, of which each test states how many it has.
"""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rfsoftmax as rf
from rfsoftmax.diagnostics import Diagnosis, diagnose, diagnose_logits, enumerate_bias, gradient_bias

SIGMAS = 4.5
ROUNDING = 1e-12


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def double(*shape: int, g: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def make_head(sampler: Any, num_classes: int = 6, dim: int = 3, tau: float = 2.0, **options: Any) -> rf.SoftmaxHead:
    head = rf.SoftmaxHead(dim, num_classes, sampler, tau=tau, **{"num_negatives": 2, **options})
    with torch.no_grad():
        head.weight.copy_(double(num_classes, dim, g=generator(1)))
    return head


def queries(rows: int, dim: int = 3, seed: int = 2) -> Tensor:
    return double(rows, dim, g=generator(seed)).float()


def classes(rows: int, num_classes: int = 6) -> Tensor:
    return torch.randint(num_classes, (rows,), generator=generator(3))


def problem(seed: int, *, num_classes: int = 6, noise: float = 1.5, signs: bool = False) -> tuple[Tensor, ...]:
    """Logits (n,), log q (n,) without class 0, the target, and grads (n, 4) in [0, 1], or [-1, 1] with signs."""
    g = generator(seed)
    logits = 2 * double(num_classes, g=g)
    log_q = logits / 2 + noise * double(num_classes, g=g)
    log_q[0] = -math.inf
    grads = torch.rand(num_classes, 4, generator=g, dtype=torch.float64)
    return logits, log_q.log_softmax(0), 2 * grads - 1 if signs else grads


def bounds(logits: Tensor, log_q: Tensor, grads: Tensor, m: int) -> tuple[Diagnosis, Tensor, Tensor]:
    """The diagnosis at target 0, the theorem's upper bound as printed, and with UB2's denominator corrected."""
    largest = float(grads.abs().max())
    found = diagnose_logits(logits[None], log_q[None], torch.tensor([0]), num_negatives=m, max_grad=largest)
    g = logits[1:].softmax(0) @ grads[1:]
    upper = [found.ub1 * g + 2 * largest / m * ub2 for ub2 in (found.ub2, found.ub2_corrected)]
    return found, upper[0], upper[1]


# --- the numbers of one row ---


def by_loop(logits: list[float], q: list[float], labels: list[int], m: int, largest: float) -> dict[str, float]:
    """Each field as the paper writes it, in units where Z_t = 1."""
    negatives = [i for i in range(len(logits)) if i not in labels]
    z_t = sum(math.exp(logits[i]) for i in negatives)
    e = {i: math.exp(logits[i]) / z_t for i in negatives}
    ratios = [e[i] / q[i] for i in negatives]
    drawable = ratios + [0.0 for i in labels if q[i] > 0]
    second = sum(e[i] ** 2 / q[i] for i in negatives)
    third = [abs(1 - ratio) for ratio in ratios]
    spread = max(abs(a - b) for a in drawable for b in drawable)
    zs = [math.exp(logits[t]) / z_t + 1 for t in labels]
    weighted = sum(e[i] * d for i, d in zip(negatives, third, strict=True))
    rises = [(e[i], max(0.0, e[i] / q[i] - 1)) for i in negatives]
    return {
        "log_z_t": math.log(z_t),
        "chi2": second - 1,
        "kl": sum(e[i] * math.log(e[i] / q[i]) for i in negatives),
        "tv": sum(abs(e.get(i, 0.0) - q[i]) for i in range(len(q))) / 2,
        "ess": 1 / second,
        "effective_negatives": m / second,
        "second_moment": second,
        "ratio_spread": spread,
        "deviation_max": max(third),
        "deviation_mean": weighted,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "log_spread": math.log(max(ratios) / min(ratios)),
        "lb": sum(-largest * weighted / (m * z**2) for z in zs),
        "ub1": sum((second - 1) / (m * z**3) for z in zs),
        "ub2": sum(spread / (z**2 + second) for z in zs),
        "ub2_corrected": sum(spread / z**2 for z in zs),
        "bias_bound": sum(2 * largest * p * x / (m * z * (z + x / m)) for z in zs for p, x in rises),
    }


@pytest.mark.parametrize("shift", [0.0, 600.0, -600.0])
@pytest.mark.parametrize("labels", [[0], [4], [1, 3]])
@pytest.mark.parametrize("hits", [False, True])
def test_every_field_is_the_papers_formula_at_any_scale(labels: list[int], hits: bool, shift: float) -> None:
    logits, log_q, _ = problem(0)
    log_q[0] = -1.0
    if not hits:
        log_q[labels] = -math.inf
    log_q = log_q.log_softmax(0)
    padded = torch.tensor([[*labels, -1]])
    found = diagnose_logits((logits + shift)[None], log_q[None], padded, num_negatives=3, max_grad=0.7)
    for name, value in by_loop(logits.tolist(), log_q.exp().tolist(), labels, 3, 0.7).items():
        value += shift if name == "log_z_t" else 0.0
        assert getattr(found, name).item() == pytest.approx(value, rel=1e-9), name


def test_pick_one_averages_the_bounds_over_the_labels() -> None:
    logits, log_q, _ = problem(0)
    log_q[2] = -math.inf
    given = (logits[None], log_q.log_softmax(0)[None], torch.tensor([[0, 2]]))
    every, one = (
        diagnose_logits(*given, num_negatives=2, max_grad=1.0, labels=how) for how in ("pick_all", "pick_one")
    )
    for name in ("lb", "ub1", "ub2", "ub2_corrected", "bias_bound"):
        assert getattr(every, name).item() == pytest.approx(2 * getattr(one, name).item())


def test_a_negative_that_is_never_drawn_has_infinite_chi2_and_a_finite_bias_bound() -> None:
    logits, log_q, _ = problem(0)
    log_q[3] = -math.inf
    found = diagnose_logits(logits[None], log_q.log_softmax(0)[None], torch.tensor([0]), num_negatives=2, max_grad=1.0)
    assert found.chi2.item() == found.ratio_max.item() == found.kl.item() == math.inf
    assert found.ess.item() == 0
    assert 0 < found.bias_bound.item() <= 2


# --- of a head ---


@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"loss": "absolute"}, {"negatives": "shared"}])
def test_diagnose_reads_the_heads_own_logits_and_q(options: dict[str, Any]) -> None:
    head = make_head("rff", num_classes=50, tau=3.0, **options)
    hidden, target = queries(7), classes(7, 50)
    found = diagnose(head, hidden, target)
    h, c = hidden.double(), head.weight.detach().double()
    if head.normalize:
        h, c = F.normalize(h), F.normalize(c)
    logits = 3.0 * h @ c.T
    logits = logits.abs() if head.loss == "absolute" else logits
    h32, ids = h.float(), torch.arange(50)
    for b in range(7):
        if head.negatives == "shared":
            log_q = head.sampler.log_prob(h32, ids[None], shared=True)[0]
        else:
            log_q = head.sampler.log_prob(h32[b : b + 1], ids[None], exclude=target[b : b + 1])[0]
        largest = 3.0 * float(c.abs().max())
        for name, value in by_loop(
            logits[b].tolist(), log_q.double().exp().tolist(), [int(target[b])], 2, largest
        ).items():
            assert getattr(found, name)[b].item() == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("negatives", ["per_example", "shared", 2])
def test_rows_may_be_cut_in_chunks_and_the_ignored_are_left_out(negatives: Any) -> None:
    head = make_head("rff", num_classes=50, negatives=negatives)
    hidden, target = queries(7), classes(7, 50)
    target[[0, 4]] = -100
    kept = target >= 0
    whole = diagnose(head, hidden[kept], target[kept])
    parts = diagnose(head, hidden.view(7, 1, 3), target.view(7, 1), max_elements=101)
    for name in ("chi2", "kl", "tv", "lb", "bias_bound"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-6, atol=1e-9)
    assert gradient_bias(head, hidden, target, num_draws=2).bias.shape == (5, 3)


def test_a_row_of_a_group_is_diagnosed_against_the_q_of_its_group() -> None:
    head = make_head("rff", num_classes=50, negatives=2)
    near, far = queries(3, seed=1)[:1], -queries(3, seed=1)[:1]
    hidden = torch.cat([near, far, 1.01 * near, 1.01 * far])
    target = classes(4, 50)
    found = diagnose(head, hidden, target)
    head.negatives = "shared"
    for rows in ([0, 2], [1, 3]):
        torch.testing.assert_close(found.chi2[rows], diagnose(head, hidden[rows], target[rows]).chi2)


def test_all_positives_of_a_row_are_excluded() -> None:
    head = make_head("exact", num_classes=50)
    labels = torch.tensor([[3, 7, -1], [8, -1, -1]])
    found = diagnose(head, queries(2), labels)
    logits = 2.0 * F.normalize(queries(2).double()) @ F.normalize(head.weight.detach().double()).T
    logits[0, [3, 7]] = logits[1, 8] = -math.inf
    torch.testing.assert_close(found.log_z_t, logits.logsumexp(1))
    assert found.chi2.max() < 1e-9


def test_m_and_the_gradient_bound_can_be_given() -> None:
    head = make_head("uniform")
    first, second = (
        diagnose(head, queries(3), classes(3), num_negatives=m, max_grad=c) for m, c in ((2, 1.0), (4, 3.0))
    )
    torch.testing.assert_close(second.lb, first.lb * 3 / 2)
    torch.testing.assert_close(second.effective_negatives, first.effective_negatives * 2)


def dense_grad(head: rf.SoftmaxHead) -> Tensor:
    assert head.weight.grad is not None
    return head.weight.grad.to_dense()


@pytest.mark.parametrize("negatives", ["per_example", "shared", 2])
def test_diagnosing_changes_neither_the_sampler_nor_the_head(negatives: Any) -> None:
    sampler = rf.make_sampler("orf", num_classes=50, dim=3, tau=2.0, anchor=True, block_size=4, num_features=16)
    head = make_head(sampler, num_classes=50, negatives=negatives).train()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head(queries(9), classes(9, 50)).backward()
    optimizer.step()  # the sampler now lags behind
    twin, grad = copy.deepcopy(head), dense_grad(head)
    diagnose(head, queries(9, seed=7), classes(9, 50))
    gradient_bias(head, queries(9, seed=7), classes(9, 50), num_draws=3)
    buffers = dict(twin.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in head.named_buffers())
    assert sampler.training
    assert torch.equal(grad, dense_grad(head))
    after = [one(queries(9), classes(9, 50), generator=generator()) for one in (head, twin)]
    assert torch.equal(*after)


def test_a_head_that_never_built_its_sampler_builds_it() -> None:
    head = make_head("rff", num_classes=50)
    assert head._stale
    diagnose(head, queries(2), classes(2, 50))
    assert not head._stale


@pytest.mark.parametrize("negatives", ["per_example", "shared"])
def test_chi2_is_the_variance_of_z_prime_times_m(negatives: str) -> None:
    """8 numbers compared."""
    sampler = rf.make_sampler("rff", num_classes=50, dim=3, tau=4.0, num_features=32, block_size=4, stratified=False)
    head = make_head(sampler, num_classes=50, tau=4.0, negatives=negatives)
    hidden, target = F.normalize(queries(4)), classes(4, 50)
    found = diagnose(head, hidden, target)
    draws = 100_000
    if negatives == "shared":
        samples = sampler.sample(hidden, draws, generator=generator(), shared=True)
    else:
        samples = sampler.sample(hidden, draws, exclude=target, generator=generator())
    logits = 4.0 * hidden.double() @ F.normalize(head.weight.detach().double()).T
    ids = samples.ids.expand(4, -1)
    ratio = (logits.gather(1, ids) - samples.log_q - found.log_z_t[:, None]).exp()
    ratio = ratio.where(ids != target[:, None], 0.0)
    for statistic, expected in ((ratio, 1.0), ((ratio - 1).square(), found.chi2)):
        stderr = statistic.std(1) / math.sqrt(draws)
        assert ((statistic.mean(1) - expected).abs() < SIGMAS * stderr).all()


# --- what the theorems say of samplers ---


def test_exp_has_the_least_of_everything() -> None:
    found = diagnose(make_head("exact", num_classes=507, dim=8, tau=9.0), queries(16, 8), classes(16, 507))
    for name in ("chi2", "kl"):
        assert getattr(found, name).max() < 1e-10  # second order in the float32 rounding of log q
    for name in ("tv", "ratio_spread", "deviation_max", "deviation_mean", "log_spread", "ub1", "ub2", "bias_bound"):
        assert getattr(found, name).abs().max() < 1e-4
    torch.testing.assert_close(found.ess, torch.ones(16, dtype=torch.float64))


def test_rff_of_many_features_tends_to_the_three_quantities_of_exp() -> None:
    """Theorem 2 at nu = tau: the distance falls as 1 / sqrt(D). 16 times the features must give at most half of it."""
    hidden, target = queries(32, 4), classes(32, 60)
    sizes = []
    for num_features in (256, 4096, 65536):
        feature_map = rf.RandomFourier(4, num_features, nu=2.0, generator=generator(4))
        sampler = rf.KernelSampler(feature_map, block_size=1, leaf="kernel", tau=2.0, floor=1e-3)
        found = diagnose(make_head(sampler, num_classes=60, dim=4), hidden, target)
        quantities = (found.chi2.sqrt(), found.ratio_spread, found.deviation_max, found.log_spread)
        sizes.append(torch.stack([quantity.median() for quantity in quantities]))
    assert (sizes[1] < sizes[0] / 2).all()
    assert (sizes[2] < sizes[1] / 2).all()
    assert sizes[2].max() < 0.25


def test_uniform_is_further_from_a_peaked_softmax_than_rff() -> None:
    hidden, target = queries(32, 8), classes(32, 500)
    chi2 = [
        diagnose(make_head(name, num_classes=500, dim=8, tau=9.0), hidden, target).chi2 for name in ("uniform", "rff")
    ]
    assert (chi2[0] > 3 * chi2[1]).all()


# --- Theorem 1, by enumeration of all draws ---


def all_draws(logits: Tensor, log_q: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of all (n - 1)^m sequences of draws, target 0: the drawn classes, their chance, and e^o / q of each draw."""
    ids = torch.cartesian_prod(*[torch.arange(1, len(logits))] * m).view(-1, m)
    return ids, log_q[ids].sum(1).exp(), (logits - log_q)[ids].exp()


def naive_expectation(logits: Tensor, log_q: Tensor, grads: Tensor, m: int) -> Tensor:
    """E of the ratio in eq:ss-grad-estimate."""
    ids, chance, x = all_draws(logits, log_q, m)
    e_t = logits[0].exp()
    ratio = (e_t * grads[0] + (x[:, :, None] * grads[ids]).sum(1) / m) / (e_t + x.mean(1))[:, None]
    return chance @ ratio


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_enumeration_by_counts_is_enumeration_by_sequences(m: int) -> None:
    logits, log_q, grads = problem(5, signs=True)
    expected = naive_expectation(logits, log_q, grads, m) - logits.softmax(0) @ grads
    torch.testing.assert_close(enumerate_bias(logits, log_q, grads, 0, m), expected, rtol=1e-10, atol=ROUNDING)


def test_enumeration_masks_draws_of_the_target() -> None:
    logits, log_q, grads = problem(5, signs=True)
    log_q[0] = -1.0
    log_q = log_q.log_softmax(0)
    expected = torch.zeros(4, dtype=torch.float64)
    for i, j in itertools.product(range(6), repeat=2):
        weights = torch.zeros(6, dtype=torch.float64)
        weights[i] += (logits[i] - log_q[i]).exp() / 2
        weights[j] += (logits[j] - log_q[j]).exp() / 2
        weights[0] = logits[0].exp()
        expected += (log_q[i] + log_q[j]).exp() * (weights / weights.sum()) @ grads
    found = enumerate_bias(logits, log_q, grads, 0, 2)
    torch.testing.assert_close(found, expected - logits.softmax(0) @ grads)
    shared = diagnose_logits(logits[None], log_q[None], torch.tensor([0]), num_negatives=2, max_grad=1.0)
    assert (found.abs() <= shared.bias_bound).all()


@pytest.mark.parametrize("seed", range(5))
def test_exp_has_no_bias(seed: int) -> None:
    logits, _, grads = problem(seed, signs=True)
    exp = logits.index_fill(0, torch.tensor([0]), -math.inf).log_softmax(0)
    assert enumerate_bias(logits, exp, grads, 0, 2).abs().max() < ROUNDING
    assert bounds(logits, exp, grads, 2)[0].bias_bound.abs().max() < ROUNDING


@pytest.mark.parametrize("m", [2, 4])
def test_lemma_decouple_holds_exactly_for_gradients_of_one_sign(m: int) -> None:
    for seed in range(20):
        logits, log_q, grads = problem(seed)
        found = naive_expectation(logits, log_q, grads, m)
        e, e_t = logits.exp()[1:], logits[0].exp()
        x, z_t = (logits - log_q)[1:].exp(), logits[1:].exp().sum()
        lower = e_t * grads[0] / (e_t + z_t) + (e / (e_t + (m - 1) / m * z_t + x / m)) @ grads[1:]
        _, chance, drawn = all_draws(logits, log_q, m)
        apart = (drawn[:, -1:] - x).abs() / (e_t + drawn[:, :-1].sum(1, keepdim=True) / m) ** 2
        delta = (chance @ apart * e) @ grads[1:].abs() / m
        upper = logits.exp() @ grads * (chance @ (1 / (e_t + drawn.mean(1)))) + delta
        assert (lower <= found + ROUNDING).all()
        assert (found <= upper + ROUNDING).all()


@pytest.mark.parametrize("m", [2, 3, 6])
def test_theorem_1_holds_for_gradients_of_one_sign(m: int) -> None:
    """At every m, not only in the limit: LB as printed, UB with its corrected UB2; UB as printed in all of these."""
    for seed in range(60):
        logits, log_q, grads = problem(seed)
        bias = enumerate_bias(logits, log_q, grads, 0, m)
        found, printed, corrected = bounds(logits, log_q, grads, m)
        assert (bias >= found.lb).all()
        assert (bias <= torch.minimum(printed, corrected)).all()
        assert (bias.abs() <= found.bias_bound / 2).all()
        assert (found.bias_bound <= -2 * found.lb).all()


@pytest.mark.parametrize("m", [1, 2, 3, 6])
@pytest.mark.parametrize("noise", [0.3, 1.5, 4.0])
def test_the_corrected_bounds_hold_for_any_signs(m: int, noise: float) -> None:
    for seed in range(60):
        logits, log_q, grads = problem(seed, noise=noise, signs=True)
        bias = enumerate_bias(logits, log_q, grads, 0, m)
        found, _, _ = bounds(logits, log_q, grads, m)
        assert (bias.abs() <= found.bias_bound).all()
        assert (found.bias_bound <= torch.minimum(-2 * found.lb, 2 * grads.abs().max() / m * found.ub2_corrected)).all()


def test_the_bias_bound_is_nearly_reached() -> None:
    closest = 0.0
    for seed in range(200):
        logits, log_q, grads = problem(seed, num_classes=3, signs=True)
        bias = enumerate_bias(logits, log_q, grads.sign(), 0, 2).abs().max()
        closest = max(closest, float(bias / bounds(logits, log_q, grads.sign(), 2)[0].bias_bound))
    assert 0.9 < closest <= 1


# e^o of (target, a likely class that q neglects, an unlikely one that it prefers): r is 99 and 0.01.
POOR = (torch.tensor([0.5, 0.99, 0.01], dtype=torch.float64).log(), torch.tensor([0.0, 0.01, 0.99]).double().log())


@pytest.mark.parametrize("grads", [[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]], ids=["of-the-target", "negative"])
def test_the_printed_upper_bound_fails_for_a_poor_q_in_the_limit_of_m(grads: list[float]) -> None:
    """g lacks the target's gradient, and UB2's denominator is too large: m UB tends to less than m bias."""
    column = torch.tensor(grads, dtype=torch.float64)[:, None]
    bias = enumerate_bias(*POOR, column, 0, 3000)
    found, printed, corrected = bounds(*POOR, column, 3000)
    assert bias > 5 * printed
    assert bias < corrected
    assert bias < found.bias_bound


def test_the_printed_lower_bound_fails_for_mixed_signs_in_the_limit_of_m() -> None:
    logits = POOR[0] + torch.tensor([math.log(4), 0.0, 0.0], dtype=torch.float64)
    column = torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)[:, None]
    bias = enumerate_bias(logits, POOR[1], column, 0, 3000)
    found, _, _ = bounds(logits, POOR[1], column, 3000)
    assert bias < 1.2 * found.lb
    assert bias > -found.bias_bound


def test_the_inverse_of_w_tends_to_that_of_z_squared() -> None:
    """Lemma expectation-delta prints 1 / (Z^2 + sum e^{2 o} / q) for the limit of E[1 / W]."""
    logits, log_q, _ = problem(3, num_classes=3, noise=0.7)
    e, x = logits.exp(), (logits - log_q).exp()
    errors = []
    for m in (100, 1000, 10_000):
        k = torch.arange(m, dtype=torch.float64)  # of the m - 1 draws, how many are class 1
        ways = math.lgamma(m) - torch.lgamma(k + 1) - torch.lgamma(m - k)
        chance = (ways + k * log_q[1] + (m - 1 - k) * log_q[2]).exp()
        w = (e[0] + (k * x[1] + (m - 1 - k) * x[2]) / m) ** 2
        errors.append(abs(float(chance @ (1 / w) * e.sum() ** 2) - 1))
    assert errors[2] < errors[1] / 5 < errors[0] / 25
    assert errors[2] < 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_m_times_the_bias_tends_to_its_leading_order(seed: int) -> None:
    """With an error that falls as 1 / m: 8 times the draws leave less than a fifth of it."""
    logits, log_q, grads = problem(seed, noise=0.3, signs=True)
    e, x = logits.exp(), (logits - log_q).exp()
    e_n, x_n, z, z_t = e[1:], x[1:], e.sum(), e[1:].sum()
    leading = (e_n * (z_t - x_n)) @ grads[1:] / z**2 + (e_n @ x_n - z_t**2) * (e @ grads) / z**3
    errors = [float((m * enumerate_bias(logits, log_q, grads, 0, m) - leading).norm()) for m in (5, 40)]
    assert errors[1] < errors[0] / 5
    assert errors[1] < 0.1 * float(leading.norm())


# --- the bias of a head, measured ---


@pytest.mark.parametrize("negatives", ["per_example", "shared"])
def test_the_measured_bias_is_the_enumerated_one(negatives: str) -> None:
    """9 numbers compared; the bias itself must stand out of the noise, or the test would show nothing."""
    sampler = rf.UnigramSampler(torch.tensor([1.0, 2, 3, 30, 5, 1]), stratified=False)
    head = make_head(sampler, tau=4.0, negatives=negatives)
    hidden, target = F.normalize(queries(3)), torch.tensor([0, 3, 5])
    found = gradient_bias(head, hidden, target, num_draws=2_000 if negatives == "shared" else 100_000)
    grads = 4.0 * F.normalize(head.weight.detach().double())
    logits = hidden.double() @ grads.T
    q = sampler.probability.repeat(3, 1)
    if negatives == "per_example":
        q[torch.arange(3), target] = 0
    log_q = (q / q.sum(1, keepdim=True)).log()
    exact = torch.stack([enumerate_bias(logits[b], log_q[b], grads, int(target[b]), 2) for b in range(3)])
    assert ((found.bias - exact).abs() < SIGMAS * found.stderr).all()
    assert exact.norm() > 10 * found.stderr.norm()
    assert found.overall == pytest.approx(float(exact.norm() / found.gradient.norm()), rel=0.1)
    assert (exact.abs() <= diagnose(head, hidden, target).bias_bound[:, None]).all()


def test_the_measured_bias_of_exp_is_zero() -> None:
    """256 numbers compared: a false alarm in 600 seeds. Its naive norm is noise, most of which is taken off."""
    head = make_head("exact", num_classes=40, dim=4, tau=4.0)
    found = gradient_bias(head, queries(64, 4), classes(64, 40), num_draws=500, generator=generator())
    assert (found.bias.abs() < SIGMAS * found.stderr + 1e-7).all()
    naive = found.bias.norm() / found.gradient.norm()
    assert found.overall < naive / 2
    assert (found.relative <= found.relative_naive).all()


@pytest.mark.parametrize(
    ("options", "several"),
    [
        ({}, False),
        ({"normalize": False}, True),
        ({"loss": "absolute", "normalize": False}, False),
        ({"negatives": "shared"}, False),
        ({"negatives": "shared", "normalize": False}, True),
    ],
)
def test_each_draw_is_the_gradient_of_the_heads_own_loss(options: dict[str, Any], several: bool) -> None:
    head = make_head("rff", num_classes=30, reduction="sum", **options).train()
    hidden = F.normalize(queries(5))
    target = torch.tensor([[1, 2], [3, -1], [4, 5], [6, 7], [8, -1]]) if several else classes(5, 30)
    found = gradient_bias(head, hidden, target, num_draws=4, generator=generator(9), max_elements=1)
    g, leaf = generator(9), hidden.clone().requires_grad_()
    every = torch.stack([torch.autograd.grad(head(leaf, target, generator=g), leaf)[0] for _ in range(4)]).double()

    def tangent(x: Tensor) -> Tensor:
        """The gradient by hidden from that by the query: what points along a unit vector does not count."""
        return x - (x * hidden).sum(1, keepdim=True) * hidden if head.normalize else x

    exact = torch.autograd.grad(head.eval()(leaf, target), leaf)[0].double()
    torch.testing.assert_close(tangent(found.gradient), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tangent(found.bias + found.gradient), every.mean(0), rtol=1e-4, atol=1e-4)
    if not head.normalize:
        torch.testing.assert_close(found.stderr, every.std(0) / 2, rtol=1e-3, atol=1e-4)


def test_pick_one_takes_the_mean_over_the_labels() -> None:
    hidden, target = queries(2), torch.tensor([[1, 2], [3, -1]])
    every, one = (
        gradient_bias(make_head("rff", num_classes=30, labels=how), hidden, target, num_draws=3, generator=generator())
        for how in ("pick_all", "pick_one")
    )
    torch.testing.assert_close(one.gradient, every.gradient / torch.tensor([[2.0], [1.0]]))
    torch.testing.assert_close(one.bias, every.bias / torch.tensor([[2.0], [1.0]]))


def test_both_work_in_inference_mode_and_without_gradients() -> None:
    head = make_head("rff")
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            hidden = queries(2).double()
            diagnose(head, hidden, classes(2))
            assert gradient_bias(head, hidden, classes(2), num_draws=2).gradient.norm() > 0


def test_repeating_the_rows_draws_independent_sets() -> None:
    """One number compared: the spread of the mean over runs against the stderr of each, by a chi-square law."""
    head = make_head("uniform", num_classes=30)
    hidden, target, g = queries(1), classes(1, 30), generator(2)
    runs = [gradient_bias(head, hidden, target, num_draws=50, generator=g) for _ in range(200)]
    spread = torch.stack([run.bias for run in runs])[:, 0, 0].var()
    expected = torch.stack([run.stderr.square() for run in runs])[:, 0, 0].mean()
    assert abs(float(spread / expected) - 1) < SIGMAS * math.sqrt(2 / 200)


# --- reading it, and errors ---


def test_the_summary_has_the_median_and_mean_of_each_field() -> None:
    head = make_head("uniform")
    found = diagnose(head, queries(3), classes(3))
    summary = found.summary()
    assert summary["chi2_median"] == pytest.approx(float(found.chi2.sort().values[1]))
    assert summary["chi2_mean"] == pytest.approx(float(found.chi2.mean()))
    assert len(summary) == 2 * 18
    lines = str(found).splitlines()
    assert "3 rows" in lines[0]
    assert [line.split()[0] for line in lines[1:3]] == ["log_z_t", "chi2"]
    assert len({len(line) for line in lines}) == 1
    bias = gradient_bias(head, queries(3), classes(3), num_draws=5)
    assert bias.summary()["overall"] == bias.overall
    assert "overall" in str(bias)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o, q, t: diagnose_logits(o[0], q, t, num_negatives=1, max_grad=1.0), "logits: expected"),
        (lambda o, q, t: diagnose_logits(o, q[:, 1:], t, num_negatives=1, max_grad=1.0), "log_q: expected shape"),
        (lambda o, q, t: diagnose_logits(o, q + 1, t, num_negatives=1, max_grad=1.0), "log_q: expected log-prob"),
        (lambda o, q, t: diagnose_logits(o, q, t, num_negatives=0, max_grad=1.0), "num_negatives: expected"),
        (lambda o, q, t: diagnose_logits(o, q, t, num_negatives=1, max_grad=-1.0), "max_grad: expected"),
        (lambda o, q, t: diagnose_logits(o, q, t + 9, num_negatives=1, max_grad=1.0), "target: expected class ids"),
        (lambda o, q, t: diagnose_logits(o, q, t[[0, 0]], num_negatives=1, max_grad=1.0), "target: expected shape"),
        (
            lambda o, q, t: diagnose_logits(o, q, torch.arange(6)[None], num_negatives=1, max_grad=1.0),
            "target: expected a negative",
        ),
        (lambda o, q, t: enumerate_bias(o[0], q[0], o, 0, 2), "grads: expected shape"),
        (lambda o, q, t: enumerate_bias(o[0], q[0], o.T, -1, 2), "target: expected a class"),
        (lambda o, q, t: enumerate_bias(o[0], q[0], o.T, 0, 1000), "num_negatives: expected at most"),
    ],
)
def test_a_wrong_problem_is_named(call: Callable[[Tensor, Tensor, Tensor], object], message: str) -> None:
    logits, log_q, _ = problem(0)
    with pytest.raises(ValueError, match=message):
        call(logits[None], log_q[None], torch.tensor([0]))


def test_a_wrong_head_or_batch_is_named() -> None:
    with pytest.raises(ValueError, match="head: expected a loss"):
        diagnose(make_head("uniform", loss="nce"), queries(2), classes(2))
    with pytest.raises(ValueError, match="target: expected at least one row"):
        diagnose(make_head("uniform"), queries(2), torch.tensor([-100, -100]))
    with pytest.raises(ValueError, match="num_draws: expected at least 2"):
        gradient_bias(make_head("uniform"), queries(2), classes(2), num_draws=1)
