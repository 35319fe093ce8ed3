"""The methods of `train --method`: what each does and what a draw costs, for n classes of dim d and m negatives."""

from typing import NamedTuple


class Entry(NamedTuple):
    cost: str  # of the negatives of one query
    line: str


# The names of `make_sampler`.
SAMPLERS = {
    "uniform": Entry("O(m)", "all classes alike"),
    "log_uniform": Entry("O(m)", "Zipf's law, for classes numbered from the most frequent on"),
    "unigram": Entry("O(m)", "the counts of the training data, to a power"),
    "in_batch": Entry("O(m log n), at times O(n)", "the targets of late, with the frequencies they were seen at"),
    "exact": Entry("O(n d)", "the softmax itself (EXP): the yardstick, as slow as the full softmax"),
    "moment": Entry(
        "O(d sqrt(n m))", "block centroids at an anchor, exact inside a block: the closest, for n up to 10^6"
    ),
    "midx": Entry("O(K d + K^2 + m K)", "two codebooks of K words, uniform inside a cell"),
    "lsh": Entry("O(L b d + m L)", "L hash tables of b bits, and a share of uniform draws"),
    "mixture": Entry("the sum of its parts", 'several samplers: --sampler-option \'samplers=["uniform", "moment"]\''),
    "rff": Entry(
        "O(D d + m D log n)", "random Fourier features (the paper): block_size=1 leaf=kernel is its algorithm"
    ),
    "orf": Entry("O(D d + m D log n)", "orthogonal frequencies: less noise than rff for the same D"),
    "sorf": Entry("O(D log d + m D log n)", "structured frequencies, by fast Hadamard transforms"),
    "quadratic": Entry("O(m d^2 log n)", "kernel alpha (h.c)^2 + 1, trained with the absolute softmax"),
    "maclaurin": Entry("O(D d + m D log n)", "random Maclaurin features of the exponential kernel"),
    "positive": Entry("O(D d + m D log n)", "positive random features of the exponential kernel"),
}
METHODS = {
    "default": Entry(
        "O(D d + m D log n)", "the head's own: anchored orf, D = 128 or 64, exact leaves of 64, nu calibrated"
    ),
    "full": Entry("O(n d)", "no sampling: the full softmax, streamed over the classes"),
    "adaptive": Entry("O(n d / 10)", "torch's AdaptiveLogSoftmaxWithLoss, with frequent classes first"),
    "nce": Entry("O(m)", "noise-contrastive estimation with the unigram sampler, and a bias for each class"),
    **SAMPLERS,
}
# Those that draw no negatives.
UNSAMPLED = ("full", "adaptive")


_LEGEND = """\
n classes of dimension d, m negatives of a query, D random features. `rfsoftmax samplers METHOD` lists the options of a
method, `rfsoftmax diagnose` measures how close a sampler comes to the softmax, `rfsoftmax advise` how fast each is."""


def table() -> str:
    """All methods, a line each."""
    rows = [("method", "cost of a query", "")] + [(name, *entry) for name, entry in METHODS.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:{widths[0]}}  {cost:{widths[1]}}  {line}".rstrip() for name, cost, line in rows]
    return "\n".join([*lines, "", _LEGEND])
