"""What differs between text and extreme classification: the data, its batches and how a model is judged."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from ..ranks import Ranks
from ..targets import Target
from .classes import Bags, Classes
from .config import Config
from .metrics import AT, precisions, propensities
from .models import Model
from .parallel import gather_rows, own_rows
from .python_source import python_calls, python_text
from .text import EOS, load_text
from .xc import XCData, XCSplits, load_xc

IGNORED = -100
# Of data without a validation file, one point in this many.
_HELD_OUT = 20
_XC_EVAL_BATCH = 512


class Batch(NamedTuple):
    """This rank's rows; `num_items` are those of all ranks."""

    inputs: Any
    target: Target
    num_items: int


@final
class TextTask:
    """Every word of a split is predicted from those before it, `<eos>` before the first.

    A split is cut into `batch_size` streams of like length that run side by side; what lacks at the end is padded.
    Of several ranks each has some of the streams.
    """

    unit, score, higher_is_better = "tokens", "perplexity", False

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        self.config = config
        self.ranks = ranks or Ranks()
        num_words = config.vocab or None
        embedded = config.data == "python-text"
        self.corpus = (
            python_text(cache=config.cache, num_words=num_words)
            if embedded
            else load_text(config.data, cache=config.cache, num_words=num_words)
        )
        self.classes = Classes(len(self.corpus.words), np.array(self.corpus.counts), self.corpus.words)
        self.train = self.corpus.train[: config.train_limit or None]

    def num_batches(self) -> int:
        return math.ceil(math.ceil(len(self.train) / self.config.batch_size) / self.config.seq_len)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, all epochs alike, from number `first` on."""
        return self._streams(self.train, first)

    def held_out(self, split: str) -> Iterator[Batch]:
        return self._streams(getattr(self.corpus, split)[: self.config.eval_limit or None], 0)

    @torch.no_grad()
    def evaluate(self, model: Model, split: str = "valid") -> dict[str, float]:
        """Perplexity exp(loss) of the full softmax, over all words of the split."""
        model.eval()
        total, num, state = 0.0, 0, None
        for batch in self.held_out(split):
            hidden, state = model(batch.inputs, state)
            total += float(model.head(hidden, batch.target)) * batch.num_items
            num += batch.num_items
        loss = total / num
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}

    def _streams(self, ids: NDArray[np.int32], first: int) -> Iterator[Batch]:
        size, step = self.config.batch_size, self.config.seq_len
        length, own = math.ceil(len(ids) / size), own_rows(size, self.ranks)
        inputs, target = np.zeros((2, size * length), dtype=np.int32)
        inputs[0] = self.corpus.words.index(EOS)
        inputs[1 : len(ids)] = ids[:-1]
        target[: len(ids)] = ids
        target[len(ids) :] = IGNORED
        inputs, target = inputs.reshape(size, length), target.reshape(size, length)
        for start in range(first * step, length, step):
            num_items = int((target[:, start : start + step] != IGNORED).sum())
            some = torch.from_numpy(target[own, start : start + step].astype(np.int64))
            words = torch.from_numpy(inputs[own, start : start + step].astype(np.int64))
            yield Batch(words, some, num_items)


@final
class XCTask:
    """Points with sparse features and several labels; in training those without a label are left out.

    Of several ranks each has some of a batch's points.
    """

    unit, score, higher_is_better = "examples", "precision@1", True

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        self.config = config
        self.ranks = ranks or Ranks()
        self.splits = _xc_splits(config)
        train = self.splits.train
        labelled = np.flatnonzero(np.diff(train.labels.indptr))
        self.labelled = torch.from_numpy(labelled[: config.train_limit or None])
        if not len(self.labelled):
            raise ValueError(f"data: expected points with labels, got none in {config.data}")
        counts = np.bincount(train.labels.indices, minlength=train.labels.shape[1])
        self.classes = Classes(train.features.shape[1], counts, self.splits.label_names)
        self.propensity = propensities(counts, train.labels.shape[0])

    def num_batches(self) -> int:
        return math.ceil(len(self.labelled) / self.config.batch_size)

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, in an order of its own, from number `first` on."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        order = self.labelled[torch.randperm(len(self.labelled), generator=generator)].numpy()
        for start in range(first * self.config.batch_size, len(order), self.config.batch_size):
            points = order[start : start + self.config.batch_size]
            batch = xc_batch(self.splits.train, points[own_rows(len(points), self.ranks)])
            yield batch._replace(num_items=len(points))

    def held_out(self, split: str) -> Iterator[Batch]:
        return xc_batches(self._limited(split), self.config.batch_size)

    def evaluate(self, model: Model, split: str = "valid") -> dict[str, float]:
        """Precision at 1, 3 and 5, plain and propensity-scored, of the best classes by the exact scores."""
        return self.evaluate_data(model, self._limited(split))

    @torch.no_grad()
    def evaluate_data(self, model: Model, data: XCData) -> dict[str, float]:
        model.eval()
        k = min(AT[-1], len(self.classes.counts))
        best = []
        for start in range(0, data.features.shape[0], _XC_EVAL_BATCH):
            points = np.arange(data.features.shape[0])[start : start + _XC_EVAL_BATCH]
            batch = xc_batch(data, points[own_rows(len(points), self.ranks)])
            best.append(gather_rows(model.head.topk(model(batch.inputs)[0], k)[1], self.ranks))
        return precisions(torch.cat(best).numpy(), data.labels, self.propensity)

    def _limited(self, split: str) -> XCData:
        data: XCData = getattr(self.splits, split)
        last = self.config.eval_limit or None
        return XCData(data.features[:last], data.labels[:last])


Task = TextTask | XCTask


def make_task(config: Config, ranks: Ranks | None = None) -> Task:
    if ranks is not None and config.batch_size < ranks.num:
        raise ValueError(f"batch_size: expected at least {ranks.num}, one for each rank, got {config.batch_size}")
    return TextTask(config, ranks) if config.task == "text" else XCTask(config, ranks)


def xc_batches(data: XCData, batch_size: int) -> Iterator[Batch]:
    for start in range(0, data.features.shape[0], batch_size):
        yield xc_batch(data, slice(start, start + batch_size))


def xc_batch(data: XCData, rows: Any) -> Batch:
    features, labels = data.features[rows], data.labels[rows]
    indices, offsets = _bags(features)
    return Batch(Bags(indices, offsets, torch.from_numpy(features.data)), _bags(labels), features.shape[0])


def _bags(matrix: csr_matrix) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(matrix.indices.astype(np.int64)), torch.from_numpy(matrix.indptr[:-1].astype(np.int64))


def _xc_splits(config: Config) -> XCSplits:
    if config.data == "python-calls":
        return python_calls(cache=config.cache)
    data = load_xc(config.data, cache=config.cache)
    if config.valid:
        valid = load_xc(config.valid, cache=config.cache)
        widths = [(part.features.shape[1], part.labels.shape[1]) for part in (data, valid)]
        if widths[0] != widths[1]:
            need = f"{widths[0][0]} features and {widths[0][1]} labels, as in {config.data}"
            raise ValueError(f"valid: expected {need}, got {widths[1][0]} and {widths[1][1]}")
        if not valid.features.shape[0]:
            raise ValueError(f"valid: expected at least one point, got none in {config.valid}")
        return XCSplits(data, valid, valid, ())
    if (num := data.features.shape[0]) < _HELD_OUT:
        raise ValueError(f"data: expected at least {_HELD_OUT} points, or a file for --valid, got {num} points")
    held_out = np.arange(num) % _HELD_OUT == _HELD_OUT - 1
    parts = [XCData(data.features[rows], data.labels[rows]) for rows in (~held_out, held_out)]
    return XCSplits(parts[0], parts[1], parts[1], ())
