import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rfsoftmax.losses import (
    full_softmax_loss,
    logit_chunks,
    nce_loss,
    reduce,
    reduce_labels,
    sampled_softmax_loss,
    streamed_logsumexp,
)

FORMS = [
    pytest.param({"normalize": normalize, "absolute": absolute}, id=f"normalize={normalize}-absolute={absolute}")
    for normalize in (False, True)
    for absolute in (False, True)
]
INF = math.inf


def embeddings(batch: int, num_classes: int, dim: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(batch * 1000 + num_classes)
    hidden = torch.randn(batch, dim, generator=g, dtype=torch.float64)
    weight = torch.randn(num_classes, dim, generator=g, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype)


def targets(batch: int, num_classes: int) -> Tensor:
    return torch.randint(num_classes, (batch,), generator=torch.Generator().manual_seed(3))


def dense_logits(
    hidden: Tensor, weight: Tensor, tau: float = 1.0, normalize: bool = False, absolute: bool = False
) -> Tensor:
    logits = tau * hidden @ (F.normalize(weight) if normalize else weight).T
    return logits.abs() if absolute else logits


def value_and_grads(fn: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = fn(*leaves)
    return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]


def error(got: list[Tensor], truth: list[Tensor]) -> float:
    return max((a.double() - b).abs().max().item() for a, b in zip(got, truth, strict=True))


def sampled_inputs(batch: int = 4, num: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    log_q = torch.randn(batch, num, generator=g, dtype=torch.float64).log_softmax(1)
    return (
        torch.randn(batch, generator=g, dtype=torch.float64),
        torch.randn(batch, num, generator=g, dtype=torch.float64),
        log_q,
    )


# --- the exact softmax, streamed ---


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [1, 7, 100, None])
@pytest.mark.parametrize("num_classes", [1, 2, 507, 1000])
def test_full_softmax_is_no_less_exact_than_cross_entropy_of_dense_logits(
    num_classes: int, chunk_size: int | None, form: dict[str, Any]
) -> None:
    hidden, weight = embeddings(9, num_classes, dtype=torch.float64)
    target = targets(9, num_classes)

    def obvious(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(dense_logits(h, w, 2.5, **form), target)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return full_softmax_loss(h, w, target, tau=2.5, chunk_size=chunk_size, **form)

    truth = value_and_grads(obvious, hidden, weight)
    assert error(value_and_grads(ours, hidden, weight), truth) < 1e-13
    in_float32 = value_and_grads(ours, hidden.float(), weight.float())
    assert {x.dtype for x in in_float32} == {torch.float32}
    assert error(in_float32, truth) <= error(value_and_grads(obvious, hidden.float(), weight.float()), truth) + 2e-6


def test_full_softmax_is_no_less_exact_than_torch_linear_cross_entropy() -> None:
    theirs: Callable[..., Tensor] | None = getattr(F, "linear_cross_entropy", None)
    if theirs is None:
        pytest.skip("this torch has no linear_cross_entropy")
    hidden, weight = embeddings(16, 507, dtype=torch.float64)
    target = targets(16, 507)
    truth = value_and_grads(lambda h, w: F.cross_entropy(h @ w.T, target), hidden, weight)
    other = value_and_grads(lambda h, w: theirs(h, w, target), hidden.float(), weight.float())
    ours = value_and_grads(lambda h, w: full_softmax_loss(h, w, target, chunk_size=100), hidden.float(), weight.float())
    assert error(ours, truth) <= error(other, truth) + 2e-6


@pytest.mark.parametrize("target_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 0, 3])
def test_ignored_targets_and_reductions_are_those_of_cross_entropy(
    ignore_index: int, reduction: str, target_dtype: torch.dtype
) -> None:
    hidden, weight = embeddings(6, 5, dtype=torch.float64)
    for target in (torch.tensor([0, 3, ignore_index, 1, 3, ignore_index]), torch.full((6,), ignore_index)):

        def dense(h: Tensor, w: Tensor, target: Tensor = target) -> Tensor:
            return F.cross_entropy(h @ w.T, target, ignore_index=ignore_index, reduction=reduction)

        def ours(h: Tensor, w: Tensor, target: Tensor = target) -> Tensor:
            ids = target.to(target_dtype)
            return full_softmax_loss(h, w, ids, ignore_index=ignore_index, reduction=reduction, chunk_size=2)

        expected = value_and_grads(dense, hidden, weight)
        torch.testing.assert_close(value_and_grads(ours, hidden, weight), expected, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_streamed_logsumexp_leaves_out_the_excluded_classes_once_each(form: dict[str, Any]) -> None:
    hidden, weight = embeddings(4, 6, dtype=torch.float64)
    exclude = torch.tensor([[0, 0, 5], [-1, -1, -1], [2, -1, 3], [4, 1, -1]])
    kept = torch.ones(4, 6, dtype=torch.bool)
    for row, column in ((0, 0), (0, 5), (2, 2), (2, 3), (3, 4), (3, 1)):
        kept[row, column] = False

    def dense(h: Tensor, w: Tensor) -> Tensor:
        return dense_logits(h, w, **form).masked_fill(~kept, -INF).logsumexp(1)

    expected = value_and_grads(dense, hidden, weight)
    for chunk_size in (1, 4, None):

        def ours(h: Tensor, w: Tensor, chunk_size: int | None = chunk_size) -> Tensor:
            return streamed_logsumexp(h, w, exclude=exclude, chunk_size=chunk_size, **form)

        torch.testing.assert_close(value_and_grads(ours, hidden, weight), expected)


def test_streamed_logsumexp_without_exclusion_sums_all_classes() -> None:
    hidden, weight = embeddings(4, 6)
    torch.testing.assert_close(streamed_logsumexp(hidden, weight, tau=3.0), (3 * hidden @ weight.T).logsumexp(1))


@pytest.mark.parametrize("absolute", [False, True])
def test_a_row_with_every_class_excluded_is_minus_infinity_with_zero_gradient(absolute: bool) -> None:
    hidden, weight = embeddings(2, 3)
    exclude = torch.tensor([[0, 1, 2], [0, 1, -1]])

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return streamed_logsumexp(h, w, exclude=exclude, absolute=absolute, chunk_size=2)

    value, grad_hidden, grad_weight = value_and_grads(ours, hidden, weight)
    assert value[0] == -INF
    assert value[1].isfinite()
    assert (grad_hidden[0] == 0).all()
    assert (grad_weight[:2] == 0).all()
    assert grad_weight.isfinite().all()


def test_a_zero_class_vector_is_normalised_as_by_torch() -> None:
    hidden, weight = embeddings(3, 4, dtype=torch.float64)
    weight[1] = 0
    weight[2] *= 1e-14
    expected = value_and_grads(lambda h, w: (h @ F.normalize(w).T).logsumexp(1), hidden, weight)
    got = value_and_grads(lambda h, w: streamed_logsumexp(h, w, normalize=True), hidden, weight)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_leaves_the_other_its_own(frozen: str) -> None:
    hidden, weight = embeddings(3, 8)
    target = targets(3, 8)
    _, *expected = value_and_grads(lambda h, w: full_softmax_loss(h, w, target), hidden, weight)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    full_softmax_loss(hidden, weight, target).backward()
    for x, grad in zip((hidden, weight), expected, strict=True):
        if x.requires_grad:
            torch.testing.assert_close(x.grad, grad)
        else:
            assert x.grad is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [1, 7, 23, None])
def test_logit_chunks_cover_the_dense_logits_in_order(chunk_size: int | None, form: dict[str, Any]) -> None:
    hidden, weight = embeddings(4, 23)
    chunks = list(logit_chunks(hidden, weight, tau=0.7, chunk_size=chunk_size, **form))
    assert [start for start, _ in chunks] == list(range(0, 23, chunk_size or 23))
    torch.testing.assert_close(torch.cat([x for _, x in chunks], 1), dense_logits(hidden, weight, 0.7, **form))


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("form", FORMS)
def test_no_tensor_of_batch_times_classes_is_ever_made(form: dict[str, Any]) -> None:
    hidden, weight = embeddings(200, 3000, dim=3)
    hidden.requires_grad_()
    weight.requires_grad_()
    with LargestTensor() as largest:
        full_softmax_loss(hidden, weight, targets(200, 3000), chunk_size=40, **form).backward()
    assert weight.numel() <= largest.numel <= max(weight.numel(), 200 * 40)
    with torch.no_grad(), LargestTensor() as largest:
        full_softmax_loss(hidden, weight, targets(200, 3000), chunk_size=20, **form)
    assert largest.numel <= max(weight.numel(), 200 * 20) < 200 * 3000


def test_a_frozen_weight_has_no_gradient_made_for_it() -> None:
    hidden, weight = embeddings(20, 3000, dim=3)
    hidden.requires_grad_()
    with LargestTensor() as largest:
        full_softmax_loss(hidden, weight, targets(20, 3000), chunk_size=40).backward()
    assert largest.numel <= 20 * 40 < weight.numel()


def test_a_single_query_does_not_copy_the_whole_normalised_weight() -> None:
    hidden, weight = torch.ones(1, 64), torch.ones(2**16 + 10, 64)
    assert [x.shape[1] for _, x in logit_chunks(hidden, weight, normalize=True)] == [2**16, 10]


# --- gradients and numerics ---


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_of_the_streamed_losses(form: dict[str, Any]) -> None:
    inputs = [x.requires_grad_() for x in embeddings(3, 7, dtype=torch.float64)]
    one, many = torch.tensor([1, -1, 6]), torch.tensor([[1, 4], [-1, 0], [6, -1]])
    for exclude in (None, one, many):
        assert torch.autograd.gradcheck(
            lambda h, w, e=exclude: streamed_logsumexp(h, w, exclude=e, tau=1.5, chunk_size=3, **form), inputs
        )
    for labels in ("pick_all", "pick_one"):
        assert torch.autograd.gradcheck(
            lambda h, w, how=labels: full_softmax_loss(h, w, many, labels=how, chunk_size=3, **form), inputs
        )
    assert torch.autograd.gradcheck(
        lambda h, w: full_softmax_loss(h, w, one, ignore_index=-1, reduction="none", chunk_size=3, **form), inputs
    )


def test_gradcheck_of_the_sampled_losses() -> None:
    target_logit, negative_logits, log_q = (x.requires_grad_() for x in sampled_inputs())
    target_log_q = torch.full((4,), -2.0, dtype=torch.float64, requires_grad=True)
    several = torch.stack([target_logit, target_logit + 1], 1).detach().requires_grad_()
    assert torch.autograd.gradcheck(sampled_softmax_loss, (target_logit, negative_logits, log_q))
    assert torch.autograd.gradcheck(sampled_softmax_loss, (several, negative_logits, log_q))
    assert torch.autograd.gradcheck(nce_loss, (target_logit, negative_logits, target_log_q, log_q))


@pytest.mark.parametrize("scale", [1e4, -1e4])
@pytest.mark.parametrize("absolute", [False, True])
def test_logits_of_ten_thousand_do_not_overflow(scale: float, absolute: bool) -> None:
    hidden, weight = embeddings(5, 50)
    target = targets(5, 50)

    def dense(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(dense_logits(h, w, scale, absolute=absolute), target, reduction="none")

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return full_softmax_loss(h, w, target, tau=scale, absolute=absolute, reduction="none", chunk_size=7)

    got = value_and_grads(ours, hidden, weight)
    assert all(x.isfinite().all() for x in got)
    torch.testing.assert_close(got, value_and_grads(dense, hidden, weight), rtol=1e-4, atol=1e-2)


def test_sampled_losses_of_large_logits_do_not_overflow() -> None:
    target_logit = torch.tensor([1e4, -1e4])
    negative_logits, log_q = torch.tensor([[-1e4], [1e4]]), torch.zeros(1)
    got = value_and_grads(
        lambda t, o: sampled_softmax_loss(t, o, log_q, reduction="none"), target_logit, negative_logits
    )
    torch.testing.assert_close(got[0], torch.tensor([0.0, 2e4]))
    torch.testing.assert_close(got[1:], [torch.tensor([0.0, -1.0]), torch.tensor([[0.0], [1.0]])])
    nce = value_and_grads(
        lambda t, o: nce_loss(t, o, torch.zeros(()), log_q, reduction="none"), target_logit, negative_logits
    )
    torch.testing.assert_close(nce, got)


def test_a_small_loss_keeps_its_digits_beside_a_large_logit() -> None:
    target_logit, negative_logits = torch.tensor([1000.0]), torch.tensor([[980.0]])
    loss = sampled_softmax_loss(target_logit, negative_logits, torch.zeros(1))
    torch.testing.assert_close(loss.item(), math.log1p(math.exp(-20.0)), rtol=1e-5, atol=0.0)


def test_autocast_changes_nothing() -> None:
    hidden, weight = embeddings(6, 30, dim=32)
    target = targets(6, 30)
    streamed = value_and_grads(lambda h, w: full_softmax_loss(h, w, target, normalize=True), hidden, weight)
    logits, negative_logits, log_q = (x.float() for x in sampled_inputs())
    sampled = value_and_grads(lambda o, n: sampled_softmax_loss(o, n, log_q), logits, negative_logits)
    chunks = torch.cat([x for _, x in logit_chunks(hidden, weight)], 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(
            value_and_grads(lambda h, w: full_softmax_loss(h, w, target, normalize=True), hidden, weight),
            streamed,
            rtol=0,
            atol=0,
        )
        torch.testing.assert_close(
            value_and_grads(lambda o, n: sampled_softmax_loss(o, n, log_q), logits, negative_logits), sampled
        )
        torch.testing.assert_close(torch.cat([x for _, x in logit_chunks(hidden, weight)], 1), chunks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    hidden, weight = embeddings(6, 30, dtype=dtype)
    target = targets(6, 30)

    def streamed(h: Tensor, w: Tensor) -> Tensor:
        return full_softmax_loss(h, w, target, tau=2.0, normalize=True, chunk_size=7)

    value, *grads = value_and_grads(streamed, hidden, weight)
    exact, *exact_grads = value_and_grads(streamed, hidden.float(), weight.float())
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(grads, [x.to(dtype) for x in exact_grads], rtol=2e-2, atol=1e-4)
    logits, negative_logits, log_q = (x.to(dtype) for x in sampled_inputs())
    for loss in (
        lambda o, n, q: sampled_softmax_loss(o, n, q),
        lambda o, n, q: nce_loss(o, n, torch.zeros(4, dtype=dtype), q),
    ):
        torch.testing.assert_close(
            loss(logits, negative_logits, log_q), loss(logits.float(), negative_logits.float(), log_q.float())
        )


# --- sampled softmax ---


def test_sampled_softmax_is_cross_entropy_of_the_adjusted_logits() -> None:
    o_t, o, log_q = sampled_inputs()
    for b, loss in enumerate(sampled_softmax_loss(o_t, o, log_q, reduction="none")):
        adjusted = [o_t[b].item()] + [o[b, i].item() - math.log(6 * math.exp(log_q[b, i])) for i in range(6)]
        assert loss.item() == pytest.approx(-adjusted[0] + math.log(sum(map(math.exp, adjusted))), rel=1e-12)


def test_sampled_softmax_gradient_is_the_estimate_of_the_paper() -> None:
    h, c = embeddings(1, 7, dtype=torch.float64)
    h.requires_grad_()
    _, _, log_q = sampled_inputs(1, 6)
    o = h @ c.T
    sampled_softmax_loss(o[:, 0], o[:, 1:], log_q).backward()
    with torch.no_grad():
        terms = o[0].exp() / torch.cat([torch.ones(1, dtype=torch.float64), 6 * log_q[0].exp()])
        assert h.grad is not None
        torch.testing.assert_close(h.grad[0], -c[0] + (terms @ c) / terms.sum())


def test_sampled_partition_function_is_unbiased() -> None:
    o_t, o, log_q = (x[0] for x in sampled_inputs(1, 5))
    expected = torch.zeros((), dtype=torch.float64)
    for draw in itertools.product(range(5), repeat=2):
        ids = list(draw)
        loss = sampled_softmax_loss(o_t[None], o[None, ids], log_q[ids])
        expected += log_q[ids].sum().exp() * (loss + o_t).exp()
    torch.testing.assert_close(expected, o_t.exp() + o.exp().sum())


def test_every_negative_once_under_uniform_q_is_the_full_softmax() -> None:
    hidden, weight = embeddings(5, 40, dtype=torch.float64)
    target = targets(5, 40)
    negatives = torch.stack([torch.cat([torch.arange(t), torch.arange(t + 1, 40)]) for t in target.tolist()])

    def sampled(h: Tensor, w: Tensor) -> Tensor:
        o = h @ w.T
        log_q = torch.full((39,), -math.log(39), dtype=torch.float64)
        return sampled_softmax_loss(o.gather(1, target[:, None])[:, 0], o.gather(1, negatives), log_q)

    full = value_and_grads(lambda h, w: full_softmax_loss(h, w, target), hidden, weight)
    torch.testing.assert_close(value_and_grads(sampled, hidden, weight), full, rtol=1e-13, atol=1e-13)


def test_masked_negatives_add_nothing_and_keep_their_place_in_m() -> None:
    o_t, o, log_q = sampled_inputs()
    masked = o.clone()
    masked[0, 2] = masked[1, :5] = -INF
    z = o_t.exp() + (masked.exp() / (6 * log_q.exp())).sum(1)
    torch.testing.assert_close(sampled_softmax_loss(o_t, masked, log_q, reduction="none"), z.log() - o_t)
    bce = F.softplus(-(o_t + 2 - math.log(6))) + F.softplus(masked - log_q - math.log(6)).sum(1)
    target_log_q = torch.full((4,), -2.0, dtype=torch.float64)
    torch.testing.assert_close(nce_loss(o_t, masked, target_log_q, log_q, reduction="none"), bce)


@pytest.mark.parametrize("masked_log_q", [-3.0, -INF])
def test_masked_negatives_give_finite_values_and_zero_gradients(masked_log_q: float) -> None:
    o_t, o, log_q = sampled_inputs(2, 3)
    o[0] = o[1, 1] = -INF
    log_q[0] = log_q[1, 1] = masked_log_q
    target_log_q = torch.full((2,), -2.0, dtype=torch.float64)
    losses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda t, n: sampled_softmax_loss(t, n, log_q, reduction="none"),
        lambda t, n: sampled_softmax_loss(t[:, None].repeat(1, 2), n, log_q, reduction="none"),
        lambda t, n: nce_loss(t, n, target_log_q, log_q, reduction="none"),
    ]
    for loss in losses:
        value, grad_target, grad_negatives = value_and_grads(loss, o_t, o)
        assert value.isfinite().all()
        assert grad_target.isfinite().all()
        assert (grad_negatives[0] == 0).all()
        assert grad_negatives[1, 1] == 0
        assert (grad_negatives[1, ::2] > 0).all()
    assert sampled_softmax_loss(o_t, o, log_q, reduction="none")[0] == 0


def test_each_of_several_targets_meets_the_negatives_of_its_row() -> None:
    o_t, o, log_q = sampled_inputs()
    several = torch.stack([o_t, o_t + 1, o_t - 2], 1)
    expected = torch.stack([sampled_softmax_loss(x, o, log_q, reduction="none") for x in several.T], 1)
    torch.testing.assert_close(sampled_softmax_loss(several, o, log_q, reduction="none"), expected)
    torch.testing.assert_close(sampled_softmax_loss(several, o, log_q), expected.mean())


@pytest.mark.parametrize("log_q_shape", [(6,), (1, 6), (4, 6), (4, 1), ()])
@pytest.mark.parametrize("rows", [1, 4])
def test_shared_negatives_are_the_same_as_repeated_ones(rows: int, log_q_shape: tuple[int, ...]) -> None:
    o_t, o, _ = sampled_inputs()
    o = o[:rows]
    log_q = torch.linspace(-4, -1, math.prod(log_q_shape), dtype=torch.float64).reshape(log_q_shape)
    repeated = (o_t, o.expand(4, 6).clone()), log_q.expand(4, 6).clone()
    for reduction in ("mean", "sum", "none"):
        torch.testing.assert_close(
            sampled_softmax_loss(o_t, o, log_q, reduction=reduction),
            sampled_softmax_loss(*repeated[0], repeated[1], reduction=reduction),
        )
        torch.testing.assert_close(
            nce_loss(o_t, o, o_t - 3, log_q, reduction=reduction),
            nce_loss(*repeated[0], o_t - 3, repeated[1], reduction=reduction),
        )


def test_nce_is_binary_cross_entropy_of_target_against_noise() -> None:
    o_t, o, log_q = sampled_inputs()
    target_log_q = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    is_target = torch.tensor([[1.0] + [0.0] * 6] * 4, dtype=torch.float64)

    def by_hand(target_logit: Tensor, negative_logits: Tensor) -> Tensor:
        odds = torch.cat([(target_logit - target_log_q)[:, None], negative_logits - log_q], 1) - math.log(6)
        return F.binary_cross_entropy_with_logits(odds, is_target, reduction="none").sum(1)

    got = value_and_grads(lambda t, n: nce_loss(t, n, target_log_q, log_q, reduction="none"), o_t, o)
    torch.testing.assert_close(got, value_and_grads(by_hand, o_t, o))


# --- many labels, reductions ---


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("labels", ["pick_all", "pick_one"])
def test_many_labels_cost_what_a_loop_over_them_costs(labels: str, reduction: str, form: dict[str, Any]) -> None:
    hidden, weight = embeddings(4, 9, dtype=torch.float64)
    target = torch.tensor([[3, 0, 8], [-1, 5, -1], [-1, -1, -1], [7, -1, 2]])

    def loop(h: Tensor, w: Tensor) -> Tensor:
        o = dense_logits(h, w, 2.0, **form)
        rows = []
        for b, row in enumerate(target.tolist()):
            positives = [i for i in row if i >= 0]
            rest = sum((o[b, i].exp() for i in range(9) if i not in positives), o.new_zeros(()))
            losses = [-o[b, p] + (o[b, p].exp() + rest).log() for p in positives]
            total = sum(losses, o.new_zeros(()))
            rows.append(total / max(len(losses), 1) if labels == "pick_one" else total)
        loss = torch.stack(rows)
        return {"mean": loss.sum() / 3, "sum": loss.sum(), "none": loss}[reduction]

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return full_softmax_loss(h, w, target, tau=2.0, labels=labels, reduction=reduction, chunk_size=4, **form)

    torch.testing.assert_close(value_and_grads(ours, hidden, weight), value_and_grads(loop, hidden, weight))


@pytest.mark.parametrize("labels", ["pick_all", "pick_one"])
def test_one_label_a_row_costs_the_same_as_a_plain_target(labels: str) -> None:
    hidden, weight = embeddings(4, 9)
    target = targets(4, 9)
    for column in (target[:, None], target[:, None].int()):
        loss = full_softmax_loss(hidden, weight, column, labels=labels)
        torch.testing.assert_close(loss, full_softmax_loss(hidden, weight, target))


def test_no_labels_at_all_have_a_mean_of_nan_and_a_sum_of_zero() -> None:
    hidden, weight = embeddings(2, 9)
    for target in (torch.full((2, 3), -1), torch.empty(2, 0, dtype=torch.int64)):
        assert full_softmax_loss(hidden, weight, target).isnan()
        assert full_softmax_loss(hidden, weight, target, reduction="sum") == 0
        assert full_softmax_loss(hidden, weight, target, reduction="none").tolist() == [0, 0]


def test_labels_are_summed_or_averaged_over_the_true_ones() -> None:
    losses = torch.tensor([[1.0, 2.0, INF], [5.0, 7.0, 9.0], [INF, INF, INF]])
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    assert reduce_labels(losses, mask, "pick_all").tolist() == [3, 21, 0]
    assert reduce_labels(losses, mask, "pick_one").tolist() == [1.5, 7, 0]


def test_the_mean_counts_only_what_is_valid() -> None:
    loss = torch.tensor([1.0, 0.0, 5.0])
    assert reduce(loss, "mean") == 2
    assert reduce(loss, "mean", valid=torch.tensor([True, False, True])) == 3
    assert reduce(loss, "sum") == 6
    assert reduce(loss, "none") is loss


# --- errors ---

H, W, T = torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 1])
POS, NEG, Q = torch.ones(2), torch.ones(2, 5), torch.ones(5)
MASK = torch.ones(2, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampled_softmax_loss(POS, NEG, Q, reduction="avg"), "reduction: expected 'mean' or .*, got 'avg'"),
        (lambda: sampled_softmax_loss(torch.ones(()), NEG, Q), r"target_logit: expected shape \(B,\) or \(B, P\)"),
        (
            lambda: sampled_softmax_loss(torch.ones(2, 1, 1), NEG, Q),
            r"target_logit: expected shape .*, got \(2, 1, 1\)",
        ),
        (lambda: sampled_softmax_loss(torch.ones(0), NEG, Q), r"target_logit: expected .* B >= 1, got \(0,\)"),
        (lambda: sampled_softmax_loss(POS.long(), NEG, Q), "target_logit: expected a floating dtype, got torch.int64"),
        (
            lambda: sampled_softmax_loss(POS, NEG.int(), Q),
            "negative_logits: expected a floating dtype, got torch.int32",
        ),
        (lambda: sampled_softmax_loss(POS, NEG, Q.long()), "log_q: expected a floating dtype, got torch.int64"),
        (lambda: sampled_softmax_loss(POS, NEG[0], Q), r"negative_logits: expected shape \(B, m\).*, got \(5,\)"),
        (lambda: sampled_softmax_loss(POS, torch.ones(3, 5), Q), r"negative_logits: .* B = 2, .*, got \(3, 5\)"),
        (lambda: sampled_softmax_loss(POS, NEG[:, :0], Q[:0]), r"negative_logits: expected .* m >= 1, got \(2, 0\)"),
        (lambda: sampled_softmax_loss(POS, NEG, Q[:4]), r"log_q: .* broadcastable to \(2, 5\), got \(4,\)"),
        (lambda: sampled_softmax_loss(POS, NEG, torch.ones(1, 2, 5)), r"log_q: .* got \(1, 2, 5\)"),
        (lambda: nce_loss(POS, NEG, POS, Q, reduction="avg"), "reduction: expected"),
        (lambda: nce_loss(torch.ones(2, 1), NEG, POS, Q), r"target_logit: expected shape \(B,\), got \(2, 1\)"),
        (lambda: nce_loss(POS, NEG, torch.ones(3), Q), r"target_log_q: .* broadcastable to \(2,\), got \(3,\)"),
        (lambda: nce_loss(POS, NEG, POS.long(), Q), "target_log_q: expected a floating dtype"),
        (lambda: nce_loss(POS, NEG[:, :0], POS, Q[:0]), "negative_logits: expected .* m >= 1"),
        (lambda: full_softmax_loss(H, W, T, reduction="avg"), "reduction: expected"),
        (lambda: full_softmax_loss(H, W, T, labels="all"), "labels: expected 'pick_all' or 'pick_one', got 'all'"),
        (lambda: full_softmax_loss(H, W, T.float()), "target: expected dtype torch.int64 .*, got torch.float32"),
        (lambda: full_softmax_loss(H, W, T[:1]), r"target: expected shape \(B,\) .* B = 2, got \(1,\)"),
        (lambda: full_softmax_loss(H, W, T[:, None, None]), r"target: expected shape .*, got \(2, 1, 1\)"),
        (lambda: full_softmax_loss(H, W, T + 3), r"target: expected classes in \[0, 4\) or -100, got 4"),
        (lambda: full_softmax_loss(H, W, T - 1), r"target: expected classes in \[0, 4\) or -100, got -1"),
        (lambda: full_softmax_loss(H, W, T[:, None] - 100), r"target: expected classes in \[0, 4\) or -1, got -100"),
        (lambda: full_softmax_loss(H[:0], W, T[:0]), r"hidden: expected shape \(B, d\) with B >= 1, got \(0, 3\)"),
        (lambda: streamed_logsumexp(H[0], W), r"hidden: expected shape \(B, d\).*, got \(3,\)"),
        (lambda: streamed_logsumexp(H.long(), W), "hidden: expected a floating dtype, got torch.int64"),
        (lambda: streamed_logsumexp(H, W.long()), "weight: expected a floating dtype, got torch.int64"),
        (lambda: streamed_logsumexp(H, W[:, :2]), r"weight: expected shape \(n, d\) .* d = 3, got \(4, 2\)"),
        (lambda: streamed_logsumexp(H, W[:0]), r"weight: expected .* n >= 1, .* got \(0, 3\)"),
        (lambda: streamed_logsumexp(H, W, chunk_size=0), "chunk_size: expected at least 1, got 0"),
        (lambda: streamed_logsumexp(H, W, exclude=T - 2), r"exclude: expected classes in \[0, 4\) or -1, got -2"),
        (lambda: streamed_logsumexp(H, W, exclude=T > 0), "exclude: expected dtype .*, got torch.bool"),
        (lambda: logit_chunks(H, W[0]), r"weight: expected shape \(n, d\)"),
        (lambda: reduce_labels(NEG, MASK, "all"), "how: expected 'pick_all' or 'pick_one', got 'all'"),
        (lambda: reduce_labels(POS, MASK, "pick_all"), r"losses: expected shape \(B, P\), got \(2,\)"),
        (lambda: reduce_labels(NEG, MASK[:, :4], "pick_all"), r"mask: expected shape \(2, 5\) .*, got \(2, 4\)"),
        (lambda: reduce_labels(NEG, MASK.long(), "pick_all"), "mask: expected .* of torch.bool, got .* of torch.int64"),
        (lambda: reduce(POS, "avg"), "reduction: expected 'mean' or 'sum' or 'none', got 'avg'"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_expected(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
