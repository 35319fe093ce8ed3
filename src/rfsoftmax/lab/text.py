"""Corpora of words: one sentence a line, a vocabulary of the most frequent words, splits as arrays of word ids."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .cache import Arrays, cached, fingerprint, pack_strings, unpack_strings
from .files import COMPRESSED, lines

EOS = "<eos>"
UNK = "<unk>"
SPLITS = ("train", "valid", "test")
_LAYOUTS = ("ptb.{}.txt", "{}.txt", "wiki.{}.tokens")
# Of a single file, one line in this many is held out for validation, and as many for the test.
_HELD_OUT = 20


@dataclass(frozen=True, eq=False)
class TextCorpus:
    """`words[i]` occurs `counts[i]` times in `train`; both run from the most frequent word to the least.

    The splits hold word ids, (number of words,) each, sentence after sentence with `<eos>` after each. They are
    memory-mapped: `torch.from_numpy` takes any slice of them.
    """

    words: tuple[str, ...]
    counts: NDArray[np.int64]
    train: NDArray[np.int32]
    valid: NDArray[np.int32]
    test: NDArray[np.int32]


class WordTable(dict[str, int]):
    """Numbers words in the order of their first occurrence, after `<eos>` = 0 and `<unk>` = 1: `table[word]`."""

    def __init__(self) -> None:
        super().__init__({EOS: 0, UNK: 1})

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


def load_text(path: str | Path, *, cache: str | Path, num_words: int | None = None) -> TextCorpus:
    """The corpus in `path`: a directory in the layout of Penn Treebank or WikiText, or a file, cut 90/5/5 by lines.

    Words are what whitespace separates; every line, a blank one too, ends with `<eos>`. The vocabulary holds the
    `num_words` most frequent words of the training text (all of them for None), `<eos>` and `<unk>` always among
    them; of equally frequent words the first to occur comes first. All other words are read as `<unk>`.
    """
    check_num_words(num_words)
    files = _files(Path(path))
    key = f"text-{fingerprint(files, num_words)}"
    return load_corpus(Path(cache), key, lambda: _build(files, num_words))


def load_corpus(cache: Path, key: str, build: Callable[[], Arrays]) -> TextCorpus:
    """The corpus whose arrays `build()` makes by `select_words`, from the cache if they are there."""
    arrays = cached(cache, key, build)
    splits = (arrays[name] for name in SPLITS)
    return TextCorpus(unpack_strings(arrays["words"]), arrays["counts"], *splits)


def check_num_words(num_words: int | None) -> None:
    if num_words is not None and num_words < 2:
        raise ValueError(f"num_words: expected at least 2, for {EOS} and {UNK}, or None for all, got {num_words}")


def select_words(table: WordTable, splits: dict[str, NDArray[np.int32]], num_words: int | None) -> Arrays:
    """The splits, given as numbers of `table`, in ids of the most frequent words of the training split.

    The count of `<unk>` is that of all the words it stands for, so counts sum to the length of the training split.
    """
    counts = np.bincount(splits["train"], minlength=len(table))
    ranked = 2 + np.argsort(-counts[2:], kind="stable")
    ranked = ranked[counts[ranked] > 0][: None if num_words is None else num_words - 2]
    kept = np.concatenate([[0, 1], ranked])
    kept_counts = counts[kept]
    kept_counts[1] += counts.sum() - kept_counts.sum()
    order = np.argsort(-kept_counts, kind="stable")
    ids = np.full(len(table), np.flatnonzero(order == 1)[0], dtype=np.int32)
    ids[kept[order]] = np.arange(len(kept))
    words = list(table)
    packed = pack_strings([words[number] for number in kept[order]])
    return {"words": packed, "counts": kept_counts[order]} | {name: ids[split] for name, split in splits.items()}


def _build(files: list[Path], num_words: int | None) -> Arrays:
    table = WordTable()
    numbers = [_numbers(file, table) for file in files]
    parts = _cut(numbers[0], files[0]) if len(files) == 1 else numbers
    return select_words(table, dict(zip(SPLITS, parts, strict=True)), num_words)


def _numbers(file: Path, table: WordTable) -> NDArray[np.int32]:
    numbers = array("i")
    for line in lines(file):
        numbers.extend(map(table.__getitem__, line.split()))
        numbers.append(table[EOS])
    if not numbers:
        raise ValueError(f"{file}: expected at least one line, got an empty file")
    return np.frombuffer(numbers, dtype=np.int32)


def _cut(numbers: NDArray[np.int32], file: Path) -> list[NDArray[np.int32]]:
    ends = np.flatnonzero(numbers == 0) + 1
    if len(ends) < len(SPLITS):
        raise ValueError(f"{file}: expected at least 3 lines to make {', '.join(SPLITS)} of, got {len(ends)}")
    held_out = max(1, len(ends) // _HELD_OUT)
    return np.split(numbers, ends[[-2 * held_out - 1, -held_out - 1]])


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for layout in _LAYOUTS:
        files = [file for name in SPLITS if (file := _plain_or_compressed(path / layout.format(name))) is not None]
        if len(files) == len(SPLITS):
            return files
    layouts = ", ".join(layout.format("train|valid|test") for layout in _LAYOUTS)
    found = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
    raise ValueError(f"{path}: expected a text file or a directory with the three files of {layouts}, got {found}")


def _plain_or_compressed(path: Path) -> Path | None:
    candidates = (path.with_name(path.name + suffix) for suffix in ("", *COMPRESSED))
    return next((file for file in candidates if file.is_file()), None)
