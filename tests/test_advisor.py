"""The advisor: it says what it measured, and follows from it."""

import copy

import pytest
import torch
import torch.nn.functional as F

import rfsoftmax as rf
from rfsoftmax.advisor import Option, _decide
from rfsoftmax.diagnostics import diagnose

DIM, N = 16, 600


def trained(**options: object) -> tuple[rf.SoftmaxHead, torch.Tensor, torch.Tensor]:
    """A head of clustered classes with 300 queries near their targets and near one another."""
    generator = torch.Generator().manual_seed(0)
    head = rf.SoftmaxHead(DIM, N, num_negatives=20, **options)  # type: ignore[arg-type]
    head.weight.data.copy_(torch.randn(N, DIM, generator=generator) + 0.5)
    target = torch.randint(N, (300,), generator=generator)
    hidden = F.normalize(head.weight.detach()[target] + torch.randn(300, DIM, generator=generator), dim=1)
    return head, hidden, target


def option(name: str, milliseconds: float, chi2: float | None = None, error: float | None = None) -> Option:
    return Option(name, "code", milliseconds, N, chi2, error)


def test_the_full_softmax_is_advised_where_nothing_is_worth_its_noise() -> None:
    advice = _decide(N, [option("full", 5.0), option("fast", 4.9), option("slow", 9.0)])
    assert advice.best.name == "full"
    assert "Use the full softmax: 5.00 ms a step" in str(advice)
    assert "fast, takes 4.90 ms" in str(advice)


def test_without_a_probe_the_closest_of_the_faster_ones_is_advised() -> None:
    advice = _decide(N, [option("full", 50.0), option("closest", 60.0), option("close", 20.0), option("rough", 1.0)])
    assert advice.best.name == "close"
    assert "2.5 times" in advice.why


def test_with_a_probe_the_fastest_good_one_is_advised() -> None:
    options = [option("full", 50.0, 0.0, 0.0), option("a", 20.0, 0.1, 0.03), option("b", 9.0, 0.9, 0.09)]
    assert _decide(N, [*options, option("c", 1.0, 90.0, 0.9)]).best.name == "b"


def test_if_none_is_good_the_least_chi2_times_time_is_advised() -> None:
    options = [option("full", 50.0, 0.0, 0.0), option("a", 20.0, 10.0, 0.3), option("b", 9.0, 90.0, 0.9)]
    assert _decide(N, options).best.name == "a"


def test_a_large_problem_is_scaled_up_and_says_so() -> None:
    advice = rf.advise(8, 3_000_000, 4, num_negatives=5)
    assert advice.options[0].measured_with == 20_000
    assert all(each.measured_with == 100_000 for each in advice.options[1:])
    assert str(advice).count("time scaled up from n = 100,000") == len(advice.options) - 1
    assert advice.best.name != "full softmax"
    assert all(each.chi2 is None for each in advice.options)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"normalize": False, "tau": 1.0}, {"labels": "pick_one"}])
def test_a_probe_measures_every_option_and_leaves_the_head_as_it_was(options: dict[str, object]) -> None:
    head, hidden, target = trained(**options)
    before = copy.deepcopy(head.state_dict())
    advice = rf.advise_head(head, hidden, target)
    assert all(each.chi2 is not None and each.milliseconds > 0 for each in advice.options)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    by_name = {each.name: each for each in advice.options}
    assert by_name["the default (D 128, blocks of 64)"].chi2 < by_name["uniform"].chi2  # type: ignore[operator]
    assert "twice the D" in by_name["the default (D 128, blocks of 64)"].remark


def test_the_code_it_gives_makes_that_head() -> None:
    head, hidden, target = trained(labels="pick_one")
    advice = rf.advise_head(head, hidden, target, num_negatives=7)
    for each in advice.options[1:]:
        made = eval(each.code, {"rf": rf})
        assert isinstance(made, rf.SoftmaxHead)
        assert (made.dim, made.num_classes, made.num_negatives, made.labels) == (DIM, N, 7, "pick_one")


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "tau": 5.0}, {"loss": "absolute", "tau": 5.0}, {"normalize": False, "tau": 1.0}],
)
def test_the_code_it_gives_has_the_logits_of_the_head(options: dict[str, object]) -> None:
    head, hidden, target = trained(**options)
    hidden = 3 * hidden
    if head.bias is not None:
        head.bias.data.normal_()
    advice = rf.advise_head(head, hidden, target)
    given = {"rf": rf, "F": F, "hidden": hidden, "weight": head.weight, "bias": head.bias, "target": target}
    torch.testing.assert_close(eval(advice.options[0].code, given), head.eval()(hidden, target))
    for each in advice.options[1:]:
        made = eval(each.code, {"rf": rf})  # a sampler for other logits would bring a warning
        assert (made.tau, made.loss, made.normalize) == (head.tau, head.loss, head.normalize)
        assert isinstance(made.sampler, (rf.UniformSampler, rf.MomentSampler)) or made.sampler.tau == head.tau


def test_chi2_of_the_probe_is_that_of_the_diagnostics() -> None:
    head, hidden, target = trained(sampler="uniform")
    advice = rf.advise_head(head, hidden, target)
    expected = diagnose(head, hidden[150:214], target[150:214]).chi2.quantile(0.5)
    found = next(each.chi2 for each in advice.options if each.name == "uniform")
    assert found == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, 1), "dim: expected at least 1, got 0"),
        ((8, 1, 1), "num_classes: expected at least 2, got 1"),
        ((8, 10, 0), "batch_size: expected at least 1, got 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rf.advise(*arguments)


def test_a_probe_without_rows_or_with_too_many_negatives_is_refused() -> None:
    head, hidden, target = trained()
    with pytest.raises(ValueError, match="target: expected at least 2 rows with a class, got 1"):
        rf.advise_head(head, hidden[:1], target[:1])
    with pytest.raises(ValueError, match="num_negatives: expected 1 to 599, got 600"):
        rf.advise_head(head, hidden, target, num_negatives=600)
