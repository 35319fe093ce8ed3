"""Scores against plain loops, and perplexity against torch's own cross entropy."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix

from rfsoftmax.head import SoftmaxHead
from rfsoftmax.lab.config import DEFAULTS
from rfsoftmax.lab.metrics import precisions, propensities
from rfsoftmax.lab.models import Model, make_model
from rfsoftmax.lab.outputs import FullSoftmax
from rfsoftmax.lab.tasks import TextTask


def random_labels(num_points: int, num_labels: int, generator: np.random.Generator) -> csr_matrix:
    """Rows of 0 to 6 labels, the first of them without any."""
    dense = generator.random((num_points, num_labels)) < generator.random((num_points, 1)) * 6 / num_labels
    dense[0] = False
    return csr_matrix(dense.astype(np.float32))


def plain_scores(ids: np.ndarray, labels: csr_matrix, propensity: np.ndarray, k: int) -> tuple[float, float]:
    hits, num, gained, possible = 0, 0, 0.0, 0.0
    for row, best in enumerate(ids):
        true = set(labels.indices[labels.indptr[row] : labels.indptr[row + 1]].tolist())
        if not true:
            continue
        num += 1
        hits += sum(i in true for i in best[:k].tolist())
        gained += sum(1 / propensity[i] for i in best[:k].tolist() if i in true)
        possible += sum(sorted((1 / propensity[i] for i in true), reverse=True)[:k])
    return hits / (k * num), gained / possible


@pytest.mark.parametrize("num_ids", [1, 3, 5, 7])
def test_precision_and_its_propensity_scored_form_are_those_of_a_plain_loop(num_ids: int) -> None:
    generator = np.random.default_rng(num_ids)
    labels = random_labels(50, 11, generator)
    counts = generator.integers(0, 40, 11)
    ids = np.stack([generator.permutation(11)[:num_ids] for _ in range(50)])
    propensity = propensities(counts, 200)
    found = precisions(ids, labels, propensity)
    assert set(found) == {f"{name}@{k}" for name in ("precision", "psp") for k in (1, 3, 5) if k <= num_ids}
    for k in (k for k in (1, 3, 5) if k <= num_ids):
        expected = plain_scores(ids, labels, propensity, k)
        assert (found[f"precision@{k}"], found[f"psp@{k}"]) == pytest.approx(expected)


def test_the_labels_themselves_score_1_and_others_0() -> None:
    labels = csr_matrix(np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]], dtype=np.float32))
    propensity = propensities(np.arange(6), 100)
    # By propensity the best order is that of the rarest labels first.
    best = precisions(np.array([[0, 1, 2, 3, 4]] * 2), labels, propensity)
    assert all(value == pytest.approx(1) for value in best.values())
    worst = precisions(np.array([[5]] * 2), labels, propensity)
    assert worst == {"precision@1": 0.0, "psp@1": 0.0}


def test_points_without_labels_alone_have_no_score() -> None:
    found = precisions(np.zeros((2, 1), dtype=np.int64), csr_matrix((2, 3), dtype=np.float32), np.ones(3))
    assert all(math.isnan(value) for value in found.values())


def test_propensities_are_those_of_the_formula_and_rise_with_the_count() -> None:
    found = propensities(np.array([0, 3, 1000]), 500)
    c = (math.log(500) - 1) * 2.5**0.55
    assert found[1] == pytest.approx(1 / (1 + c * math.exp(-0.55 * math.log(3 + 1.5))))
    assert 0 < found[0] < found[1] < found[2] < 1


def plain_logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    head: Any = model.head.exact if isinstance(model.head, FullSoftmax) else model.head
    if isinstance(head, SoftmaxHead):
        return head.tau * F.normalize(hidden, dim=1) @ F.normalize(head.weight, dim=1).T
    log_p: torch.Tensor = head.softmax.log_prob(hidden)[:, head.rank]
    return log_p


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("method", ["default", "full", "adaptive"])
def test_perplexity_is_exp_of_the_cross_entropy_over_all_words(method: str, split: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in generator.integers(0, 20, 7)) for _ in range(100)]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    config = replace(
        DEFAULTS["text"],
        data=str(tmp_path / "text.txt"),
        cache=str(tmp_path / "cache"),
        dim=8,
        num_negatives=5,
        method=method,
        batch_size=3,
        seq_len=4,
    )
    task = TextTask(config)
    model = make_model(config, task.classes).eval()
    scores = task.evaluate(model, split)
    # Three streams side by side, each in one piece: the state goes through, whatever seq_len is.
    ids = torch.from_numpy(np.array(getattr(task.corpus, split), dtype=np.int64))
    before = torch.cat([torch.tensor([task.corpus.words.index("<eos>")]), ids[:-1]])
    total = 0.0
    with torch.no_grad():
        for inputs, target in zip(
            before.split(math.ceil(len(ids) / 3)), ids.split(math.ceil(len(ids) / 3)), strict=True
        ):
            hidden = model(inputs.unsqueeze(0))[0][0]
            logits = plain_logits(model, hidden)
            total += float(F.cross_entropy(logits, target, reduction="sum"))
    assert scores["loss"] == pytest.approx(total / len(ids), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(total / len(ids)), rel=1e-5)
