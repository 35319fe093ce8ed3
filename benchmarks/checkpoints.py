"""Trained models to measure samplers on: class embeddings and held-out queries at several points of training.

`load(name, data, cache)` trains with the full softmax, normalised embeddings and tau = 1 / 0.3^2 the first time, and
reads what it kept afterwards. Training saves itself every hundred steps and goes on where it stopped.
"""

import lzma
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rfsoftmax as rf

NUM_CONTEXTS = 4000
SAVE_EVERY = 100


@dataclass(frozen=True)
class Checkpoint:
    """A point of training. Contexts come from held-out data, in random order."""

    step: int
    loss: float  # of the full softmax on the contexts
    weight: Tensor  # (n, d)
    hidden: Tensor  # (NUM_CONTEXTS, d)
    target: Tensor  # (NUM_CONTEXTS,), or (NUM_CONTEXTS, P) padded with -1
    counts: Tensor  # (n,): of the classes in the training data


class Task(ABC):
    """A data set with a model for it."""

    model: nn.ModuleList
    weight: nn.Parameter
    counts: Tensor
    steps_per_epoch: int

    @abstractmethod
    def batches(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Queries and labels (B, P) of the steps of an epoch, from `first` on."""

    @abstractmethod
    def held_out(self) -> tuple[Tensor, Tensor]:
        """All queries and labels of the held-out data."""


class WordTask(Task):
    """An LSTM language model: batches of 20 sequences of 35 words, d = 200."""

    batch, length, dim = 20, 35, 200

    def __init__(self, train: Path, valid: Path) -> None:
        words, held_out = _words(train), _words(valid)
        counted = Counter(words).most_common()
        index = {word: i for i, (word, _) in enumerate(counted)}
        self.counts = torch.tensor([count for _, count in counted])
        self.train = self._columns([index[word] for word in words])
        self.valid = self._columns([index.get(word, index["<unk>"]) for word in held_out])
        self.steps_per_epoch = -(-(len(self.train) - 1) // self.length)
        self.model = nn.ModuleList([nn.Embedding(len(counted), self.dim), nn.LSTM(self.dim, self.dim), nn.Dropout(0.2)])
        self.weight = nn.Parameter(torch.randn(len(counted), self.dim) / self.dim**0.5)
        self.state: tuple[Tensor, Tensor] | None = None

    def _columns(self, ids: list[int]) -> Tensor:
        length = len(ids) // self.batch
        return torch.tensor(ids[: length * self.batch]).view(self.batch, length).T.contiguous()

    def batches(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        if first == 0:
            self.state = None
        return self._run(self.train, first)

    def _run(self, columns: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        embedding, lstm, dropout = self.model
        for start in range(first * self.length, len(columns) - 1, self.length):
            stop = min(start + self.length, len(columns) - 1)
            state = None if self.state is None else (self.state[0].detach(), self.state[1].detach())
            hidden, self.state = lstm(dropout(embedding(columns[start:stop])), state)
            yield dropout(hidden).flatten(0, 1), columns[start + 1 : stop + 1].reshape(-1, 1)

    def held_out(self) -> tuple[Tensor, Tensor]:
        kept, self.state = self.state, None
        parts = list(self._run(self.valid, 0))
        self.state = kept
        return torch.cat([hidden for hidden, _ in parts]), torch.cat([target for _, target in parts])


class LabelTask(Task):
    """A linear embedding of sparse features, d = 128, for records with several labels; batches of 256 records."""

    batch, dim = 256, 128

    def __init__(self, train: Path, valid: Path) -> None:
        self.train, num_features, num_labels = _records(train)
        self.valid = _records(valid)[0]
        labels = torch.cat([labels for _, _, labels in self.train])
        self.counts = torch.bincount(labels, minlength=num_labels)
        self.steps_per_epoch = -(-len(self.train) // self.batch)
        self.model = nn.ModuleList([nn.EmbeddingBag(num_features, self.dim, mode="sum")])
        self.weight = nn.Parameter(torch.randn(num_labels, self.dim) / self.dim**0.5)

    def batches(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(epoch)).tolist()
        for some in range(first, self.steps_per_epoch):
            yield self._embed([self.train[i] for i in order[some * self.batch : (some + 1) * self.batch]])

    def _embed(self, records: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        ids, values = (torch.cat([record[part] for record in records]) for part in (0, 1))
        offsets = torch.tensor([0, *(len(record[0]) for record in records[:-1])]).cumsum(0)
        labels = nn.utils.rnn.pad_sequence([record[2] for record in records], batch_first=True, padding_value=-1)
        return self.model[0](ids, offsets, per_sample_weights=values), labels

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self._embed(self.valid[: 2 * NUM_CONTEXTS])


class VisitTask(Task):
    """An embedding of users, d = 64, for the items that they visit; batches of 512 visits."""

    batch, dim = 512, 64

    def __init__(self, train: Path, valid: Path) -> None:
        self.train, self.valid = _visits(train), _visits(valid)
        num_users, num_items = (int(max(part[:, i].max() for part in (self.train, self.valid))) + 1 for i in (0, 1))
        self.counts = torch.bincount(self.train[:, 1], minlength=num_items)
        self.steps_per_epoch = -(-len(self.train) // self.batch)
        self.model = nn.ModuleList([nn.Embedding(num_users, self.dim)])
        self.weight = nn.Parameter(torch.randn(num_items, self.dim) / self.dim**0.5)

    def batches(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(epoch))
        for some in order.split(self.batch)[first:]:
            yield self._embed(self.train[some])

    def _embed(self, visits: Tensor) -> tuple[Tensor, Tensor]:
        return self.model[0](visits[:, 0]), visits[:, 1:]

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self._embed(self.valid)


@dataclass(frozen=True)
class Recipe:
    make: Callable[[Path, Path], Task]
    train: str
    valid: str
    marks: dict[str, float]  # the name of a point of training and its epoch


RECIPES = {
    "ptb": Recipe(
        WordTask, "ptb/ptb.train.txt", "ptb/ptb.valid.txt", {"start": 0, "early": 0.15, "middle": 1, "late": 2}
    ),
    "wikitext-2": Recipe(
        WordTask, "wikitext-2/train.txt", "wikitext-2/valid.txt", {"start": 0, "early": 0.07, "late": 1}
    ),
    "tibkat": Recipe(
        LabelTask, "tibkat-gnd/train.txt.xz", "tibkat-gnd/test.txt.xz", {"start": 0, "early": 0.5, "late": 3}
    ),
    "gowalla": Recipe(VisitTask, "gowalla/train.txt", "gowalla/test.txt", {"late": 1}),
}


def load(name: str, data: Path, cache: Path) -> dict[str, Checkpoint]:
    """The checkpoints of a recipe by their marks, in the order of training."""
    recipe = RECIPES[name]
    paths = {mark: cache / f"{name}-{mark}.pt" for mark in recipe.marks}
    if not all(path.exists() for path in paths.values()):
        _train(name, recipe, data, cache, paths)
    return {mark: Checkpoint(**torch.load(path)) for mark, path in paths.items()}


def _train(name: str, recipe: Recipe, data: Path, cache: Path, paths: dict[str, Path]) -> None:
    torch.manual_seed(0)
    task = recipe.make(data / recipe.train, data / recipe.valid)
    parameters = [*task.model.parameters(), task.weight]
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    partial, step = cache / f"{name}-partial.pt", 0
    if partial.exists():
        saved = torch.load(partial)
        step = saved["step"]
        task.model.load_state_dict(saved["model"])
        task.weight.data.copy_(saved["weight"])
        optimizer.load_state_dict(saved["optimizer"])
    marks = {round(epoch * task.steps_per_epoch): mark for mark, epoch in recipe.marks.items()}
    last, started, first = max(marks), time.perf_counter(), step
    batches = task.batches(step // task.steps_per_epoch, step % task.steps_per_epoch)
    while True:
        if step in marks and not paths[marks[step]].exists():
            _save(paths[marks[step]], _checkpoint(task, step))
        if step and step % SAVE_EVERY == 0 and step > first:
            state = {"model": task.model.state_dict(), "weight": task.weight.data, "optimizer": optimizer.state_dict()}
            _save(partial, {"step": step, **state})
            rate = (time.perf_counter() - started) / (step - first)
            print(f"{name}: step {step} of {last}, {rate * (last - step) / 60:.0f} min left", flush=True)
        if step == last:
            break
        if step % task.steps_per_epoch == 0:
            batches = task.batches(step // task.steps_per_epoch, 0)
        hidden, labels = next(batches)
        loss = _loss(hidden, task.weight, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
    partial.unlink(missing_ok=True)


def _loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    queries = F.normalize(hidden, dim=1)
    if labels.shape[1] > 1:
        kept = (labels >= 0).any(1)
        return rf.full_softmax_loss(
            queries[kept], weight, labels[kept], tau=rf.DEFAULT_TAU, normalize=True, labels="pick_one"
        )
    return F.cross_entropy(rf.DEFAULT_TAU * queries @ F.normalize(weight, dim=1).T, labels[:, 0])


@torch.no_grad()
def _checkpoint(task: Task, step: int) -> dict[str, Any]:
    task.model.eval()
    hidden, target = task.held_out()
    task.model.train()
    kept = (target >= 0).any(1).nonzero()[:, 0]
    chosen = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))[:NUM_CONTEXTS]]
    hidden, target = hidden[chosen], target[chosen]
    loss = sum(
        float(_loss(h, task.weight, t)) * len(h) for h, t in zip(hidden.split(500), target.split(500), strict=True)
    )
    return {
        "step": step,
        "loss": loss / len(hidden),
        "weight": task.weight.detach().clone(),
        "hidden": hidden.clone(),
        "target": target.squeeze(1).clone(),
        "counts": task.counts,
    }


def _save(path: Path, what: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    torch.save(what, beside)
    beside.replace(path)


def _words(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [word for line in file for word in [*line.split(), "<eos>"]]


def _records(path: Path) -> tuple[list[tuple[Tensor, Tensor, Tensor]], int, int]:
    """Records of feature ids, values of unit length and labels, those without a label left out; the two sizes."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        _, num_features, num_labels = map(int, file.readline().split())
        records = [_record(line) for line in file if not line.startswith(" ")]
    return records, num_features, num_labels


def _visits(path: Path) -> Tensor:
    """Users and items (visits, 2), of lines that name a user and then all their items."""
    with path.open() as file:
        lines = [[int(word) for word in line.split()] for line in file]
    return torch.tensor([(user, item) for user, *items in lines for item in items])


def _record(line: str) -> tuple[Tensor, Tensor, Tensor]:
    labels, *features = line.split()
    pairs = [feature.split(":") for feature in features]
    values = torch.tensor([float(value) for _, value in pairs])
    ids = torch.tensor([int(i) for i, _ in pairs], dtype=torch.int64)
    return ids, F.normalize(values, dim=0), torch.tensor([int(label) for label in labels.split(",")])
