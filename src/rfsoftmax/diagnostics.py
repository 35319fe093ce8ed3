"""What a sampler's q is worth: its distance from the softmax, Theorems 1 and 2 of the paper, the gradient bias itself.

Notation: t is the target (with several labels, all of them count as t), i, j, k are negatives, o the logits,
p_i = e^{o_i} / Z_t the softmax over the negatives, Z_t = sum_j e^{o_j}, Z = e^{o_t} + Z_t, s = Z_t / Z, m draws.
All follows from the ratio r_i = p_i / q_i = e^{o_i} / (q_i Z_t), which is 1 everywhere for the softmax itself (EXP).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from . import losses
from .groups import restored
from .head import SoftmaxHead
from .samplers.base import check_ids
from .targets import Target, as_labels

_MAX_ELEMENTS = 2**22
_MAX_OUTCOMES = 10**7
# Samplers round log q to float32.
_SUM_TOLERANCE = 1e-3


@final
@dataclass(frozen=True, eq=False)
class Diagnosis:
    """How q compares with p in each row: all fields (B,), float64, in units where Z_t = 1.

    For absolute values multiply by e^{log_z_t} (second and third quantity), its square (the first), its inverse (ub1).

    The bounds of Theorem 1 (thm:generic) on each coordinate of E[grad L'] - grad L, printed with terms o(1/m) that are
    left out here: lb <= bias <= ub1 g + (2 M / m) ub2, with g = sum_j p_j grad o_j in these units. They are for
    independent draws; nothing is proven for stratified ones. Two steps of the proof fail:

    - Jensen's inequality in lem:decouple needs grad o >= 0. With mixed signs lb and ub can both be broken, at any m.
    - E[W] in lem:expectation-delta counts the m - 1 equal pairs as m (m - 1): Z^2 + sum_j e^{2 o_j} / q_j, the
      denominator of UB2, must read Z^2. As printed, ub2 is too small for a poor q. (And g lacks the target's term.)

    The bias does not change when the same vector is added to every grad o_i, so they may be taken as >= 0; Jensen's
    step then gives, for every m, any signs and without o(1/m), |bias| <= bias_bound <= (2 M / m) ub2_corrected, and
    bias_bound <= 2 |lb|. For grad o >= 0 already halving it is right: |bias| <= bias_bound / 2 <= |lb|.
    """

    log_z_t: Tensor  # log Z_t
    chi2: Tensor  # sum_i p_i^2 / q_i - 1: the variance of (Z' - e^{o_t}) / Z_t times m
    kl: Tensor  # sum_i p_i log(p_i / q_i)
    tv: Tensor  # sum_i |p_i - q_i| / 2
    ess: Tensor  # 1 / (1 + chi2): the effective sample size, as a share of m
    effective_negatives: Tensor  # m ess
    second_moment: Tensor  # first quantity of eq:three_terms: sum_j e^{2 o_j} / q_j = 1 + chi2
    ratio_spread: Tensor  # second: max_{j, j'} |e^{o_j} / q_j - e^{o_j'} / q_j'|
    deviation_max: Tensor  # third: max_k |Z_t - e^{o_k} / q_k|
    deviation_mean: Tensor  # third: its mean over k ~ p, which is what LB holds
    ratio_min: Tensor  # Theorem 2 (lem:rff-quality): least e^{o_i} / q_i
    ratio_max: Tensor  # and the largest
    log_spread: Tensor  # log(ratio_max / ratio_min), free of q's normaliser: eq:rff-ratio4 has it for nu = tau only
    lb: Tensor  # eq:lb: -M sum_k e^{o_k} |Z_t - e^{o_k} / q_k| / (m Z^2)
    ub1: Tensor  # eq:ub: (sum_j e^{2 o_j} / q_j - Z_t^2) / (m Z^3)
    ub2: Tensor  # eq:ub, as printed: ratio_spread Z_t / (Z^2 + sum_j e^{2 o_j} / q_j)
    ub2_corrected: Tensor  # ratio_spread Z_t / Z^2
    bias_bound: Tensor  # 2 M s sum_k p_k x_k / (m + x_k), x_k = s (r_k - 1) where positive, else 0

    def summary(self) -> dict[str, float]:
        """The median and the mean over the rows of each field: {"chi2_median": ..., "chi2_mean": ..., ...}."""
        return _summary({field.name: getattr(self, field.name) for field in fields(self)})

    def __str__(self) -> str:
        return _table(self.summary(), len(self.chi2))


@final
@dataclass(frozen=True, eq=False)
class GradientBias:
    """The bias E[grad L'] - grad L by the query, measured over draws: three fields (B, d), float64.

    The norm of a noisy mean is too large: E|mean|^2 = |bias|^2 + trace(covariance of the mean). `norm` takes off an
    estimate of the trace and stops at 0; `overall` does so for the sum over the rows, where noise can cancel.
    """

    bias: Tensor
    stderr: Tensor  # of each coordinate of bias
    gradient: Tensor  # grad L, exact

    @property
    def norm(self) -> Tensor:
        """|bias| (B,), its noise taken off."""
        return self._squares().clamp(min=0).sqrt()

    @property
    def relative(self) -> Tensor:
        """norm / |grad L|, (B,)."""
        return self.norm / self.gradient.norm(dim=1)

    @property
    def relative_naive(self) -> Tensor:
        """|mean| / |grad L|, (B,), noise and all."""
        return self.bias.norm(dim=1) / self.gradient.norm(dim=1)

    @property
    def overall(self) -> float:
        """sqrt(sum_b |bias_b|^2 / sum_b |grad L_b|^2), its noise taken off."""
        return float((self._squares().sum().clamp(min=0) / self.gradient.square().sum()).sqrt())

    def _squares(self) -> Tensor:
        return self.bias.square().sum(1) - self.stderr.square().sum(1)

    def summary(self) -> dict[str, float]:
        """The median and the mean over the rows of the norms, and `overall`."""
        norms = {"norm": self.norm, "relative": self.relative, "relative_naive": self.relative_naive}
        return {**_summary(norms), "overall": self.overall}

    def __str__(self) -> str:
        return f"{_table(self.summary(), len(self.bias))}\noverall relative bias {self.overall:.4g}"


@torch.no_grad()
def diagnose(
    head: SoftmaxHead,
    hidden: Tensor,
    target: Target,
    *,
    num_negatives: int | None = None,
    max_grad: float | None = None,
    max_elements: int = _MAX_ELEMENTS,
) -> Diagnosis:
    """The head's sampler against its softmax, exactly, for each row of hidden (..., d) that has a target.

    Exact means over all n classes: O(B n d) time, and some ten arrays of at most max_elements (but at least n) numbers
    are held, a chunk of rows at a time. The sampler is taken as it is, stale or not, and stays so; only a head that
    never built it does so now.

    num_negatives (m) is the head's unless given. max_grad is the theorem's M, the largest |coordinate| of any grad o_i;
    by default of the gradient by the query, tau c_i. With several labels the bounds are those of the row's loss: they
    are summed over the labels, or averaged for labels="pick_one".

    A head with negatives="shared", or of groups, draws from one q for the batch, or group, over all classes and masks a
    row's positives: a draw that adds 0 to Z'. So q is not renormalised over the negatives; p_t = 0 and q_t > 0 count in
    chi2, KL and TV.
    """
    queries, labels = _rows(head, hidden, target)
    num_negatives = head.num_negatives if num_negatives is None else num_negatives
    max_grad = _largest_coordinate(head, max_elements) if max_grad is None else max_grad
    classes = torch.arange(head.num_classes, device=queries.device).unsqueeze(0)
    order, sizes = head._sets(queries)
    queries, labels = queries[order], labels[order]
    of_sets = [head.sampler.log_prob(some, classes, shared=True) for some in queries.split(sizes)] if sizes else []
    sets = iter(losses.repeated(torch.arange(len(of_sets)), sizes).tolist())
    step = max(1, max_elements // head.num_classes)
    parts = []
    for some, some_labels in zip(queries.split(step), labels.split(step), strict=True):
        chunks = losses.logit_chunks(some.double(), head.weight, **head._logit_kind)
        ids = classes.expand(len(some), -1)
        if sizes is None:
            log_q = head.sampler.log_prob(some, ids, exclude=some_labels)
        else:
            log_q = torch.cat([of_sets[next(sets)] for _ in some])
        parts.append(
            diagnose_logits(
                torch.cat([logits for _, logits in chunks], dim=1),
                log_q,
                some_labels,
                num_negatives=num_negatives,
                max_grad=max_grad,
                labels=head.labels,
            )
        )
    found = (torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Diagnosis))
    return Diagnosis(*(restored(values, order) for values in found))


def diagnose_logits(
    logits: Tensor, log_q: Tensor, target: Tensor, *, num_negatives: int, max_grad: float, labels: str = "pick_all"
) -> Diagnosis:
    """As `diagnose`, from logits (B, n), log_q (B, n), and target (B,) or labels (B, P) padded with -1.

    log_q is -inf for a row's labels if they are never drawn; if they can be, such a draw counts as masked. In plain
    PyTorch, for one label that is never drawn:

        p = logits.scatter(1, target[:, None], -torch.inf).softmax(1)
        chi2 = torch.where(p > 0, p * p / log_q.exp(), 0.0).sum(1) - 1
    """
    target = target.unsqueeze(1) if target.dim() == 1 else target
    positive = _check_problem(logits, log_q, target, num_negatives, max_grad)
    logits, log_q = logits.double(), log_q.double()
    negatives = logits.masked_fill(positive, -torch.inf)
    log_z_t = negatives.logsumexp(1)
    log_p = negatives - log_z_t.unsqueeze(1)
    p, q = log_p.exp(), log_q.exp()
    hit = q.masked_fill(~positive, 0.0).sum(1)
    log_ratio = (log_p - log_q).masked_fill(positive, 0.0)
    excess = log_ratio.expm1()  # r - 1, and 0 at the positives
    highest = log_ratio.masked_fill(positive, -torch.inf).amax(1)
    lowest = log_ratio.masked_fill(positive, torch.inf).amin(1)
    # These sums have terms >= 0 only and equal the usual ones for sum q = 1: rounded log q cannot make them negative.
    chi2 = ((p - q) * excess).sum(1) + hit
    kl = (p * log_ratio - p + q).sum(1)
    deviation_mean = (p * excess.abs()).sum(1)
    # A masked hit is a draw of ratio 0.
    ratio_spread = highest.exp() - torch.where(hit > 0, 0.0, lowest.exp())

    mask = target >= 0
    share = torch.sigmoid(log_z_t.unsqueeze(1) - logits.gather(1, target.clamp(min=0)))  # s, for each label's Z
    ub2_corrected = share.square() * ratio_spread.unsqueeze(1)
    ub2 = ub2_corrected / (1 + share.square() * (1 + chi2).unsqueeze(1))
    # x / (m + x) as 1 / (1 + m / x), for x of 0 and of inf.
    rise = excess.clamp(min=0)
    means = [(p / (1 + num_negatives / (s.unsqueeze(1) * rise))).sum(1) for s in share.unbind(1)]
    bias_bound = 2 * max_grad * share * torch.stack(means, dim=1)

    def over_labels(bound: Tensor) -> Tensor:
        return losses.reduce_labels(bound, mask, labels)

    return Diagnosis(
        log_z_t=log_z_t,
        chi2=chi2,
        kl=kl,
        tv=(p - q).abs().sum(1) / 2,
        ess=1 / (1 + chi2),
        effective_negatives=num_negatives / (1 + chi2),
        second_moment=1 + chi2,
        ratio_spread=ratio_spread,
        deviation_max=torch.maximum(highest.expm1().abs(), lowest.expm1().abs()),
        deviation_mean=deviation_mean,
        ratio_min=lowest.exp(),
        ratio_max=highest.exp(),
        log_spread=highest - lowest,
        lb=over_labels(-max_grad * share.square() * deviation_mean.unsqueeze(1) / num_negatives),
        ub1=over_labels(share**3 * chi2.unsqueeze(1) / num_negatives),
        ub2=over_labels(ub2),
        ub2_corrected=over_labels(ub2_corrected),
        bias_bound=over_labels(bias_bound),
    )


@torch.inference_mode(False)
def gradient_bias(
    head: SoftmaxHead,
    hidden: Tensor,
    target: Target,
    *,
    num_draws: int = 1000,
    generator: Generator | None = None,
    max_elements: int = _MAX_ELEMENTS,
) -> GradientBias:
    """E[grad L'] - grad L of each row's loss by its query, by Monte Carlo over num_draws sets of m negatives.

    The query is h as the logits see it, of unit length if the head normalises: grad o_i = tau c_i. Each set is drawn as
    in training (stratified if the sampler is), the sets are independent, so `stderr` is that of a mean of num_draws.
    Only the expectation over picks is taken for labels="pick_one". About max_elements gathered numbers are held.
    """
    _require(num_draws >= 2, "num_draws", "at least 2", num_draws)
    queries, labels = _rows(head, hidden, target)
    gradient = _exact_gradients(head, queries, labels)
    total, squares = torch.zeros_like(gradient), torch.zeros_like(gradient)
    # Shared sets are drawn for the batch as it is; rows with their own negatives may be repeated instead.
    most = 1 if head.negatives != "per_example" else max(1, max_elements // (queries.numel() * head.num_negatives))
    with _evaluating(head.sampler):
        for first in range(0, num_draws, most):
            times = min(most, num_draws - first)
            rows, their_labels = queries.repeat(times, 1), labels.repeat(times, 1)
            sampled = _sampled_gradients(head, rows, their_labels, generator)
            deviation = sampled.view(times, *gradient.shape) - gradient
            total += deviation.sum(0)
            squares += deviation.square().sum(0)
    bias = total / num_draws
    variance = (squares / num_draws - bias.square()).clamp(min=0) * num_draws / (num_draws - 1)
    return GradientBias(bias=bias, stderr=(variance / num_draws).sqrt(), gradient=gradient)


def enumerate_bias(logits: Tensor, log_q: Tensor, grads: Tensor, target: int, num_negatives: int) -> Tensor:
    """E[grad L'] - grad L (d,), float64, exactly, for logits (n,), log_q (n,) and the gradients of the logits (n, d).

    eq:ss-grad-estimate averaged over all count vectors of m independent draws with their multinomial weights: for tiny
    n only. As in `diagnose_logits`, a draw of the target, if log_q allows it, is masked. To leading order

        (sum_k e^{o_k} (Z_t - e^{o_k} / q_k) grad o_k / Z^2 + (sum_j e^{2 o_j} / q_j - Z_t^2) g / Z^3) / m

    with g = sum_i e^{o_i} grad o_i over all classes, the target too, where Theorem 1 prints the negatives only.
    """
    _require(grads.dim() == 2 and len(grads) == len(logits), "grads", f"shape ({len(logits)}, d)", tuple(grads.shape))
    _require(0 <= target < len(logits), "target", f"a class in [0, {len(logits)})", target)
    _check_problem(logits[None], log_q[None], torch.tensor([[target]], device=logits.device), num_negatives, 0.0)
    logits, log_q, grads = (x.detach().double().cpu() for x in (logits, log_q, grads))
    mass = logits.softmax(0)  # e^o in units where Z = 1
    drawn = (log_q > -torch.inf).nonzero().squeeze(1)
    log_q = log_q[drawn]
    added = torch.where(drawn == target, 0.0, mass[drawn] / log_q.exp())
    counts = _count_vectors(len(drawn), num_negatives)
    log_ways = math.lgamma(num_negatives + 1) - torch.lgamma(counts + 1).sum(1)
    chance = (log_ways + counts @ log_q).exp()
    weights = counts * added / num_negatives
    z = mass[target] + weights.sum(1, keepdim=True)
    estimate = (mass[target] * grads[target] + weights @ grads[drawn]) / z
    return chance @ (estimate - mass @ grads)


def _count_vectors(kinds: int, num: int) -> Tensor:
    """All ways, (ways, kinds) float64, to draw `num` of `kinds`: the gaps between kinds - 1 bars among the draws."""
    ways = math.comb(num + kinds - 1, num)
    _require(ways <= _MAX_OUTCOMES, "num_negatives", f"at most {_MAX_OUTCOMES} outcomes to enumerate", ways)
    if kinds == 1:
        return torch.tensor([[float(num)]], dtype=torch.float64)
    bars = torch.combinations(torch.arange(num + kinds - 1), kinds - 1)
    ends = bars.new_tensor([[-1, num + kinds - 1]]).expand(len(bars), 2)
    return (torch.cat([ends[:, :1], bars, ends[:, 1:]], dim=1).diff(dim=1) - 1).double()


def _rows(head: SoftmaxHead, hidden: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Queries (N, d) and labels (N, P) of the rows that have a label, with the sampler built."""
    _require(head.loss != "nce", "head", "a loss with a partition function to estimate", repr(head.loss))
    if head._stale or not head.sampler.num_classes:
        head.rebuild()
    queries = head._queries(hidden.detach().clone())
    labels = as_labels(target, hidden.shape[:-1], head.num_classes, head.ignore_index)
    kept = (labels >= 0).any(1)
    _require(bool(kept.any()), "target", "at least one row with a class", "none")
    return queries[kept], labels[kept]


def _exact_gradients(head: SoftmaxHead, queries: Tensor, labels: Tensor) -> Tensor:
    """The gradients (N, d), float64, of each row's own exact loss by its query."""
    weight, rows = head.weight.detach(), queries.double().requires_grad_()
    with torch.enable_grad():
        loss = losses.full_softmax_loss(rows, weight, labels, labels=head.labels, reduction="none", **head._logit_kind)
        return torch.autograd.grad(loss.sum(), rows)[0]


def _sampled_gradients(head: SoftmaxHead, queries: Tensor, labels: Tensor, generator: Generator | None) -> Tensor:
    """The same over negatives drawn as in training."""
    order, sizes = head._sets(queries)
    queries, labels = queries[order], labels[order]
    samples = head._draw(queries, labels, sizes, generator)
    rows = queries.double().requires_grad_()
    with torch.enable_grad():
        logits = head._logits(rows, labels, labels, samples.ids, sizes)
        each = losses.sampled_softmax_loss(*logits, losses.repeated(samples.log_q, sizes), reduction="none")
        loss = losses.reduce_labels(each, labels >= 0, head.labels)
        found = torch.autograd.grad(loss.sum(), rows)[0]
    return restored(found, order)


def _largest_coordinate(head: SoftmaxHead, max_elements: int) -> float:
    rows = head.weight.detach().split(max(1, max_elements // head.dim))
    return head.tau * max(float((F.normalize(some, dim=1) if head.normalize else some).abs().max()) for some in rows)


@contextmanager
def _evaluating(sampler: nn.Module) -> Iterator[None]:
    """In eval() a sampler learns nothing from the queries it meets."""
    modes = {module: module.training for module in sampler.modules()}
    sampler.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _check_problem(logits: Tensor, log_q: Tensor, labels: Tensor, num_negatives: int, max_grad: float) -> Tensor:
    """Which classes are positives, (B, n)."""
    shape = tuple(logits.shape)
    _require(
        logits.dim() == 2 and logits.is_floating_point(), "logits", "floating (B, n)", f"{shape} of {logits.dtype}"
    )
    _require(log_q.shape == shape, "log_q", f"shape {shape}", tuple(log_q.shape))
    _require(num_negatives >= 1, "num_negatives", "at least 1", num_negatives)
    _require(0 <= max_grad < math.inf, "max_grad", "a finite number of at least 0", max_grad)
    check_ids("target", labels, shape[1], lowest=-1)
    fits = labels.dim() == 2 and len(labels) == shape[0]
    _require(fits, "target", f"shape ({shape[0]},) or ({shape[0]}, P)", tuple(labels.shape))
    positive = torch.zeros(shape[0], shape[1] + 1, dtype=torch.bool, device=logits.device)
    positive = positive.scatter_(1, torch.where(labels < 0, shape[1], labels), True)[:, :-1]
    _require(not bool(positive.all(1).any()), "target", "a negative in every row", "a row of positives only")
    total = log_q.double().exp().sum(1)
    worst = float(total[(total - 1).abs().argmax()])
    _require(abs(worst - 1) < _SUM_TOLERANCE, "log_q", "log-probabilities of a sum of 1 in each row", worst)
    return positive


def _require(fits: bool, name: str, expected: str, got: object) -> None:
    if not fits:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _summary(columns: dict[str, Tensor]) -> dict[str, float]:
    return {
        f"{name}_{kind}": float(value)
        for name, column in columns.items()
        for kind, value in (("median", column.quantile(0.5)), ("mean", column.mean()))
    }


def _table(summary: dict[str, float], rows: int) -> str:
    names = [key.removesuffix("_median") for key in summary if key.endswith("_median")]
    width = max(len(name) for name in names)
    lines = [f"{f'over {rows} rows':<{width}}  {'median':>10}  {'mean':>10}"]
    lines += [
        f"{name:<{width}}  {summary[f'{name}_median']:>10.4g}  {summary[f'{name}_mean']:>10.4g}" for name in names
    ]
    return "\n".join(lines)
