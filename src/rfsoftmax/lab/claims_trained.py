"""The claims of the paper's figures 1 to 4, Table 3 and on normalised embeddings."""

import itertools
from collections.abc import Callable

from .book import Book
from .claims import NOT_RUN, Claim, Verdict, graded, is_better, is_level, shown
from .experiments import ENWIKI, PTB, TEMPERATURES, TIBKAT
from .numbers_text import number, score_text

_PPL, _P1 = "perplexity", "precision@1"
_RFF = "Rff, D = 1024"
_NOISE = "noise is twice the standard deviation between seeds, 1% while none has several"
_BEATS = f"holds if lower by more than the noise, weaker if lower by less; {_NOISE}"


def _beats(
    item: str, dataset: str, a: str, b: str, metric: str = _PPL, *, higher: bool = False
) -> Callable[[Book], Verdict]:
    def judge(book: Book) -> Verdict:
        one, other = (book.score(item, dataset, label, metric) for label in (a, b))
        return is_better(one, other, book.noise(item, dataset, metric), higher=higher)

    return judge


def _level(
    item: str, dataset: str, a: str, b: str, close: float, near: float, metric: str = _PPL, *, one_sided: bool = False
) -> Callable[[Book], Verdict]:
    def judge(book: Book) -> Verdict:
        one, other = (book.score(item, dataset, label, metric) for label in (a, b))
        return is_level(one, other, close, near, one_sided=one_sided)

    return judge


def _temperature(label: str) -> float:
    return float(label.removeprefix("T = "))


def _best_temperature(book: Book) -> Verdict:
    scores, noise = book.scores("figure1", PTB, _PPL), book.noise("figure1", PTB, _PPL)
    if set(scores) < {f"T = {T:g}" for T in TEMPERATURES}:
        return NOT_RUN
    best = min(scores, key=lambda label: scores[label].mean)
    other = min(set(scores) - {"T = 0.5"}, key=lambda label: scores[label].mean)
    own, rival = shown(scores["T = 0.5"]), shown(scores[other])
    level = scores["T = 0.5"].mean - scores[best].mean <= noise
    text = f"T = 0.5 has {own}, the best other, {other}, {rival}; noise {number(noise)}"
    return graded(level, 0.4 <= _temperature(best) <= 0.6, text)


def _smaller_nu(book: Book) -> Verdict:
    scores, noise = book.scores("figure1", PTB, _PPL), book.noise("figure1", PTB, _PPL)
    at_tau = scores.pop("T = 0.3", None)
    if at_tau is None or not scores:
        return NOT_RUN
    best = min(scores, key=lambda label: scores[label].mean)
    return is_better(scores[best], at_tau, noise)._replace(
        number=f"{best}: {shown(scores[best])}; nu = tau (T = 0.3): {shown(at_tau)}; noise {number(noise)}"
    )


def _more_features(book: Book) -> Verdict:
    scores, noise = book.scores("figure2", PTB, _PPL), book.noise("figure1", PTB, _PPL)
    full = scores.pop("full", None)
    sizes = sorted(scores, key=lambda label: int(label.removeprefix("D = ")))
    if full is None or len(sizes) < 2:
        return NOT_RUN
    values = [scores[label].mean for label in sizes]
    falls = all(after <= before + noise for before, after in itertools.pairwise(values))
    lower = values[-1] < values[0] - noise
    text = ", ".join(f"{label}: {number(value)}" for label, value in zip(sizes, values, strict=True))
    return graded(falls and lower, values[-1] < values[0], f"{text}; full: {number(full.mean)}; noise {number(noise)}")


def _unhurt_precision(book: Book) -> Verdict:
    one, other = (book.score("normalization", TIBKAT, label, _P1) for label in ("normalised", "not normalised"))
    if one is None or other is None:
        return NOT_RUN
    gain = one.mean - other.mean
    return graded(gain >= -0.01, gain >= -0.02, f"{shown(one)} against {shown(other)}")


def _at_least(a: str, b: str) -> Callable[[Book], Verdict]:
    """Whether P@1, 3 and 5 of a are those of b or better, up to a hundredth."""

    def judge(book: Book) -> Verdict:
        pairs = [[book.score("table3", TIBKAT, label, f"precision@{k}") for label in (a, b)] for k in (1, 3, 5)]
        gains = [one.mean - other.mean for one, other in pairs if one is not None and other is not None]
        if len(gains) < 3:
            return NOT_RUN
        text = ", ".join(f"P@{k} {gain:+.3f}" for k, gain in zip((1, 3, 5), gains, strict=True))
        return graded(
            all(gain >= -0.01 for gain in gains), any(gain >= -0.01 for gain in gains), f"{a} less {b}: {text}"
        )

    return judge


def _smaller_loss(book: Book) -> Verdict:
    rff = book.score("table3", TIBKAT, _RFF, "softmax_loss")
    own, plain = (book.score("table3", TIBKAT, "Quadratic", metric) for metric in ("loss", "softmax_loss"))
    if rff is None or own is None or plain is None:
        return NOT_RUN
    gain = 1 - rff.mean / own.mean
    text = f"{score_text(rff.mean)} against {score_text(own.mean)} by the absolute softmax ({100 * gain:.1f}% smaller)"
    return graded(gain >= 0.04, gain > 0, f"{text}, {score_text(plain.mean)} by the plain one")


TRAINED_CLAIMS = (
    Claim(
        "figure1",
        "Of the temperatures of the sampling kernel, T = 0.5 gives the lowest perplexity.",
        "T = 0.5",
        f"holds if T = 0.5 is the best or within the noise of it, weaker if the best is 0.4 to 0.6; {_NOISE}",
        _best_temperature,
    ),
    Claim(
        "figure1",
        "A sampling kernel flatter than the softmax (nu below tau) beats nu = tau.",
        "T = 0.5 against 0.3",
        _BEATS,
        _smaller_nu,
    ),
    Claim(
        "figure2",
        "With more random features D, RF-softmax comes closer to the full softmax.",
        "curves only",
        "holds if perplexity falls with D, up to the noise, and the largest D beats the smallest by more; "
        "weaker if only the largest beats the smallest; the noise is figure 1's",
        _more_features,
    ),
    Claim(
        "figure3",
        "Sampling from the softmax itself (EXP) does as well as the full softmax.",
        "curves only",
        "holds within 2% of perplexity, weaker within 5%",
        _level("figure3", PTB, "EXP", "full", 0.02, 0.05),
    ),
    Claim(
        "figure3",
        "RF-softmax with D = 1024 performs at par with EXP.",
        "curves only",
        "holds within 2% of perplexity or below, weaker within 5%",
        _level("figure3", PTB, _RFF, "EXP", 0.02, 0.05, one_sided=True),
    ),
    Claim(
        "figure3",
        "RF-softmax with D = 1024 beats Quadratic.",
        "curves only",
        _BEATS,
        _beats("figure3", PTB, _RFF, "Quadratic"),
    ),
    Claim("figure3", "RF-softmax beats Uniform.", "curves only", _BEATS, _beats("figure3", PTB, _RFF, "Uniform")),
    Claim(
        "figure4",
        "With 64,000 classes RF-softmax with D = 2048 is at par with Quadratic.",
        "curves only",
        "holds within 2% of perplexity or below, weaker within 5%",
        _level("figure4", ENWIKI, "Rff, D = 2048", "Quadratic", 0.02, 0.05, one_sided=True),
    ),
    Claim(
        "figure4",
        "With 64,000 classes RF-softmax with D = 8192 beats Quadratic.",
        "curves only",
        _BEATS,
        _beats("figure4", ENWIKI, "Rff, D = 8192", "Quadratic"),
    ),
    Claim(
        "table3",
        "EXP is an accurate proxy for the full softmax in precision.",
        "full is not reported",
        "holds if P@1, 3 and 5 are at most 0.01 lower, weaker if one of them is",
        _at_least("EXP", "full"),
    ),
    Claim(
        "table3",
        "RF-softmax is better than Uniform in precision.",
        "0.87 against 0.83 (AmazonCat-13k, P@1)",
        "holds if P@1 is higher by more than the noise, weaker if by less",
        _beats("table3", TIBKAT, _RFF, "Uniform", _P1, higher=True),
    ),
    Claim(
        "table3",
        "RF-softmax is better than Quadratic in precision, or comparable.",
        "P@1 +0.03, +0.01, -0.01",
        "holds if P@1, 3 and 5 are at most 0.01 lower, weaker if one of them is",
        _at_least(_RFF, "Quadratic"),
    ),
    Claim(
        "table3",
        "RF-softmax comes close to EXP in precision.",
        "P@1 0.00, -0.01, -0.02",
        "holds if P@1, 3 and 5 are at most 0.01 lower, weaker if one of them is",
        _at_least(_RFF, "EXP"),
    ),
    Claim(
        "table3",
        "RF-softmax leads to a smaller full softmax loss than Quadratic.",
        "4% smaller (WikiLSHTC)",
        "holds if smaller by 4% or more, weaker if smaller; Quadratic's by the absolute softmax, with which it was "
        "trained",
        _smaller_loss,
    ),
    Claim(
        "normalization",
        "Normalised embeddings give a lower perplexity than plain ones.",
        "120 against 126",
        _BEATS,
        _beats("normalization", PTB, "normalised", "not normalised"),
    ),
    Claim(
        "normalization",
        "In extreme classification normalising does not hurt precision@1.",
        "0.87 and 0.87 (AmazonCat-13k)",
        "holds if it is higher, or lower by at most 0.01, weaker by at most 0.02",
        _unhurt_precision,
    ),
)
