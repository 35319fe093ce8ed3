"""The paper's claims, each with the rule by which our results judge it: every verdict is computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

from .book import Book, Score
from .numbers_text import number, score_text

HOLDS, WEAKER, FAILS, UNTESTED = "holds", "holds weaker", "does not hold here", "not tested"
VERDICTS = (HOLDS, WEAKER, FAILS, UNTESTED)


class Verdict(NamedTuple):
    kind: str
    number: str


NOT_RUN = Verdict(UNTESTED, "not run yet")
# In place of the paper's number, for what is not a claim of the paper.
OURS = "not in the paper"


@final
@dataclass(frozen=True)
class Claim:
    """`paper` is the paper's own number, `rule` says when the claim holds here."""

    item: str
    sentence: str
    paper: str
    rule: str
    judge: Callable[[Book], Verdict]


def graded(holds: bool, weaker: bool, text: str) -> Verdict:
    return Verdict(HOLDS if holds else WEAKER if weaker else FAILS, text)


def is_better(a: Score | None, b: Score | None, noise: float, *, higher: bool = False) -> Verdict:
    """Whether a beats b: by more than the noise it holds, by less it holds weaker. Lower is better unless `higher`."""
    if a is None or b is None:
        return NOT_RUN
    gain = a.mean - b.mean if higher else b.mean - a.mean
    text = f"{shown(a)} against {shown(b)}; noise {number(noise)}"
    return graded(gain > noise, gain > 0, text)


def is_level(a: Score | None, b: Score | None, close: float, near: float, *, one_sided: bool = False) -> Verdict:
    """Whether a is within a share `close` of b (holds) or `near` (weaker); one_sided: or lower than it."""
    if a is None or b is None:
        return NOT_RUN
    off = a.mean / b.mean - 1
    apart = off if one_sided else abs(off)
    return graded(apart <= close, apart <= near, f"{shown(a)} against {shown(b)} ({100 * off:+.1f}%)")


def shown(score: Score) -> str:
    """The mean, and the range over the seeds if there are several."""
    if score.num_seeds < 2:
        return score_text(score.mean)
    low, high = score_text(score.low), score_text(score.high)
    return f"{score_text(score.mean)} ({low} to {high}, {score.num_seeds} seeds)"


def everywhere(found: list[bool], text: str) -> Verdict:
    """Holds if it does in all cases, weaker if in some."""
    return Verdict(HOLDS if all(found) else WEAKER if any(found) else FAILS, text) if found else NOT_RUN
