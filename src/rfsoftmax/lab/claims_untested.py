"""What the paper says and no run here can tell."""

from collections.abc import Callable

from .book import Book
from .claims import NOT_RUN, UNTESTED, Claim, Verdict
from .claims_measured import times
from .numbers_text import number


def _cheaper(book: Book) -> Verdict:
    found = times(book)
    if not found:
        return NOT_RUN
    high = max(n for n, _ in found)
    ratio = found[high, "quadratic"] / found[high, "rff D=1000"]
    text = (
        "Quadratic's q is computed over all classes in these runs. In Table 2, where D = 1000 stands against d² = 4096"
    )
    return Verdict(UNTESTED, f"{text}, 4.1 times as many, Rff is {number(ratio)} times as fast")


def _untested(why: str) -> Callable[[Book], Verdict]:
    return lambda book: Verdict(UNTESTED, why)


UNTESTED_CLAIMS = (
    Claim(
        "table1",
        "With fixed alpha and beta the error of Quadratic is larger than with fitted ones.",
        "no number",
        "none: fitting by least squares makes it so",
        _untested("only the fit was measured"),
    ),
    Claim(
        "figure3",
        "RF-softmax is almost 40 times as efficient as Quadratic on Penn Treebank, 128 and 32 times on Bnews.",
        "D against d²: 1024 of 40,000, 2048 and 8192 of 262,144",
        "none: the paper counts features",
        _cheaper,
    ),
    Claim(
        "figure3",
        "The full softmax does best with 1/sqrt(tau) = 0.3.",
        "no number",
        "none",
        _untested("every run has this tau"),
    ),
    Claim(
        "figure3",
        "Quadratic does better with the absolute softmax than with the plain one.",
        "no number",
        "none",
        _untested("every run of Quadratic is trained with the absolute softmax"),
    ),
)
