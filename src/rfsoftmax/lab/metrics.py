"""Precision at k and its propensity-scored form, for points with several labels."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

AT = (1, 3, 5)
# Jain, Prabhu and Varma (KDD 2016), for data sets without constants of their own.
A, B = 0.55, 1.5


def propensities(counts: NDArray[np.int64], num_points: int) -> NDArray[np.float64]:
    """The chance that label l is given where it is due, p_l = 1 / (1 + C (N_l + B)^-A), C = (ln N - 1) (B + 1)^A.

    counts (n,) are the N_l and num_points N, both of the training data.
    """
    c = (math.log(max(num_points, 3)) - 1) * (B + 1) ** A
    return 1 / (1 + c * (counts + B) ** -A)


def precisions(ids: NDArray[np.int64], labels: csr_matrix, propensity: NDArray[np.float64]) -> dict[str, float]:
    """P@k and PSP@k for the best ids (points, K), best first, and labels (points, n), k = 1, 3, 5 up to K.

    P@k is the mean share of the first k that are labels. PSP@k counts each as 1 / p_l, relative to the most that any
    k labels could reach. Points without a label count for nothing.
    """
    kept = np.flatnonzero(np.diff(labels.indptr))
    ids, labels = ids[kept], labels[kept]
    gain = 1 / propensity
    hits = _contains(labels, ids)
    most = _best_gains(labels, gain, ids.shape[1])
    found = {}
    for k in (k for k in AT if k <= ids.shape[1]):
        found[f"precision@{k}"] = float(hits[:, :k].mean()) if len(kept) else math.nan
        best = float(most[:, :k].sum())
        found[f"psp@{k}"] = float((hits * gain[ids])[:, :k].sum()) / best if best else math.nan
    return found


def _contains(labels: csr_matrix, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each of ids (points, K) is a label of its point."""
    rows = np.arange(len(ids), dtype=np.int64).reshape(-1, 1)
    return np.isin(rows * labels.shape[1] + ids, _rows(labels) * labels.shape[1] + labels.indices)


def _best_gains(labels: csr_matrix, gain: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """The k largest gains (points, k) of each point's labels, best first, filled up with 0."""
    rows, gains = _rows(labels), gain[labels.indices]
    order = np.lexsort((-gains, rows))
    place = np.arange(len(rows)) - labels.indptr[rows]
    best = np.zeros((labels.shape[0], k))
    first = place < k
    best[rows[first], place[first]] = gains[order][first]
    return best


def _rows(labels: csr_matrix) -> NDArray[np.int64]:
    return np.repeat(np.arange(labels.shape[0], dtype=np.int64), np.diff(labels.indptr))
