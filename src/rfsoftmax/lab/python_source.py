"""Data sets that need no download: the Python sources of the running interpreter's standard library and of torch.

The hash of a file's path below its root decides whether the file is of the training, validation or test split (18, 1
and 1 in 20), so the splits are the same on every run and whatever other files there are.
"""

import ast
import gc
import os
import re
import sysconfig
import warnings
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from .cache import Arrays, cached, fingerprint, pack_strings, unpack_strings
from .text import EOS, SPLITS, TextCorpus, WordTable, check_num_words, load_corpus, select_words
from .xc import XCData, XCSplits, from_arrays, to_arrays

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Other people's packages, of which every machine has its own.
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}
_VALID_BUCKET, _TEST_BUCKET, _NUM_BUCKETS = 0, 1, 20
# A comment goes with the newline after it. Names come first, as most tokens are names; those before a quote are the
# prefix of a string.
_TOKEN = re.compile(
    r"""(?:\#[^\n]*+)?+
    ( \n
    | [^\W\d]\w*+ (?!["'])
    | [rbfuRBFU]{0,2} (?: \"""(?:[^"\\]|\\.|"(?!""))*+\""" | '''(?:[^'\\]|\\.|'(?!''))*+'''
                        | "(?:[^"\\\n]|\\.)*+" | '(?:[^'\\\n]|\\.)*+' )
    | \.?\d[\w.]*+ (?:(?<=[eE])[-+]\d++)?+ | [-+*/%@&|^=<>!:]= | -> | (?:\*\*|//|<<|>>)=?+ | \.\.\. | [^\s\w\\] | \w++
    )""",
    re.DOTALL | re.VERBOSE,
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def python_text(
    *, cache: str | Path, num_words: int | None = 50_000, roots: Sequence[str | Path] | None = None
) -> TextCorpus:
    """Whole Python tokens as words; a newline ends a sentence.

    A regular expression cuts the tokens much as `tokenize` does, in a sixth of the time: a string of any length is one
    token; comments, blank lines and indentation are left out, an open bracket does not join lines. Files that are not
    UTF-8 are skipped. `roots` are the directories to read in place of the standard library and torch.
    """
    check_num_words(num_words)
    sources = _sources(roots)
    key = f"python-text-{fingerprint(_paths(sources), num_words)}"
    return load_corpus(Path(cache), key, lambda: _text(sources, num_words))


def python_calls(*, cache: str | Path, roots: Sequence[str | Path] | None = None) -> XCSplits:
    """A point is a function that calls something: its words are the features, the names that it calls the labels.

    Words are those of the function's name, arguments and docstring, an identifier cut at underscores and capitals. A
    word that occurs tf times in a function, and in df > 1 of the N training functions, weighs
    tf (1 + ln((1 + N) / (1 + df))); each row is scaled to length 1. A call of `a.b.c()` is one of `c`, and what a
    nested function calls, the outer one calls too. Labels run from the most frequently called in training to those
    called in the other splits alone. Files that do not parse are skipped. `roots` are the directories to read in place
    of the standard library and torch.
    """
    sources = _sources(roots)
    key = f"python-calls-{fingerprint(_paths(sources))}"
    arrays = cached(Path(cache), key, lambda: _calls(sources))
    train, valid, test = (from_arrays(arrays, f"{name}_") for name in SPLITS)
    return XCSplits(train, valid, test, unpack_strings(arrays["label_names"]))


def tokens(source: str) -> list[str]:
    """The tokens of `python_text`, every newline one of them."""
    return _TOKEN.findall(f"{source}\n")


def _sources(roots: Sequence[str | Path] | None) -> dict[str, list[Path]]:
    """The files of each split."""
    if roots is None:
        roots = [sysconfig.get_path("stdlib"), Path(torch.__file__).parent]
    sources: dict[str, list[Path]] = {name: [] for name in SPLITS}
    for root in map(Path, roots):
        for path in _python_files(root):
            sources[_split(path.relative_to(root))].append(path)
    for name, paths in sources.items():
        if not paths:
            where = ", ".join(map(str, roots))
            raise ValueError(f"roots: expected Python files enough for three splits in {where}, got none for {name}")
    return sources


def _python_files(root: Path) -> Iterator[Path]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - _FOREIGN)
        yield from (Path(directory, name) for name in sorted(names) if name.endswith(".py"))


def _split(path: Path) -> str:
    bucket = zlib.crc32(path.as_posix().encode()) % _NUM_BUCKETS
    return {_VALID_BUCKET: "valid", _TEST_BUCKET: "test"}.get(bucket, "train")


def _paths(sources: dict[str, list[Path]]) -> list[Path]:
    return [path for paths in sources.values() for path in paths]


def _text(sources: dict[str, list[Path]], num_words: int | None) -> Arrays:
    table = WordTable()
    splits = {name: _numbers(paths, table) for name, paths in sources.items()}
    return select_words(table, splits, num_words)


def _numbers(paths: list[Path], table: WordTable) -> NDArray[np.int32]:
    """Newlines become `<eos>`, but those of blank lines, which follow another, are dropped."""
    newline = table["\n"]
    numbers = array("i", [newline])
    for path in paths:
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        numbers.extend(map(table.__getitem__, tokens(source)))
    found = np.frombuffer(numbers, dtype=np.int32)
    ends = found == newline
    found[ends] = table[EOS]
    return found[1:][~(ends[1:] & ends[:-1])]


class _Bags:
    """Bags of names, one after another, as numbers in the order of their first occurrence."""

    def __init__(self) -> None:
        self.table: dict[str, int] = {}
        self.numbers = array("i")
        self.ends = array("i", [0])

    def add(self, names: Iterable[str]) -> None:
        table = self.table
        self.numbers.extend(table.setdefault(name, len(table)) for name in names)
        self.ends.append(len(self.numbers))

    def counts(self) -> csr_matrix:
        """How often each name is in each bag, (bags, names)."""
        numbers, ends = np.array(self.numbers), np.array(self.ends)
        ones = np.ones(len(numbers), dtype=np.float32)
        matrix = csr_matrix((ones, numbers, ends), shape=(len(ends) - 1, len(self.table)))
        matrix.sum_duplicates()
        return matrix


def _calls(sources: dict[str, list[Path]]) -> Arrays:
    words, called = _Bags(), _Bags()
    ends = [0]
    with _collector_paused():
        for paths in sources.values():
            for path in paths:
                for function, called_names in _functions(path):
                    words.add(_words(function))
                    called.add(sorted(called_names))
            ends.append(len(words.ends) - 1)
    features = _tf_idf(words.counts(), ends[1])
    labels = called.counts()
    order = np.argsort(-_column_sizes(labels[: ends[1]]), kind="stable")
    names = list(called.table)
    arrays = {"label_names": pack_strings([names[number] for number in order])}
    labels = labels[:, order]
    labels.sort_indices()
    for name, start, end in zip(SPLITS, ends[:-1], ends[1:], strict=True):
        arrays |= to_arrays(XCData(features[start:end], labels[start:end]), f"{name}_")
    return arrays


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Syntax trees have no cycles, but so many nodes that looking for cycles takes as long as all the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tf_idf(counts: csr_matrix, num_train: int) -> csr_matrix:
    frequency = _column_sizes(counts[:num_train])
    kept = np.flatnonzero(frequency > 1)
    weight = 1 + np.log((1 + num_train) / (1 + frequency[kept]))
    counts = counts[:, kept]
    values = counts.data * weight[counts.indices]
    row = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))
    length = np.sqrt(np.bincount(row, values**2, minlength=counts.shape[0]))
    return csr_matrix(((values / length[row]).astype(np.float32), counts.indices, counts.indptr), shape=counts.shape)


def _column_sizes(matrix: csr_matrix) -> NDArray[np.int64]:
    """In how many rows each column occurs."""
    return np.bincount(matrix.indices, minlength=matrix.shape[1])


def _words(function: Function) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = [function.name, *(argument.arg for argument in named if argument is not None)]
    text = " ".join([*names, ast.get_docstring(function, clean=False) or ""])
    return [word.lower() for word in _WORD.findall(text)]


def _functions(path: Path) -> list[tuple[Function, set[str]]]:
    """The functions of a file that call something, with the names they call; none of a file that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes and comparisons in other people's code
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[tuple[Function, set[str], set[str]]] = []
    scopes: list[tuple[list[Any], set[str]]] = [(list(tree.body), set())]
    while scopes:
        nodes, names = scopes.pop()
        for function in _scan(nodes, names):
            inner: set[str] = set()
            found.append((function, inner, names))
            scopes.append((list(function.body), inner))
    for _, names, outer in reversed(found):
        outer |= names
    return [(function, names) for function, names, _ in found if names]


def _scan(nodes: list[Any], names: set[str]) -> Iterator[Function]:
    """The outermost functions below the nodes; adds to `names` what is called outside their bodies.

    Twice as fast as `ast.walk`, which looks up the fields of every node by name.
    """
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            nodes += (*node.decorator_list, node.args)
            continue
        if isinstance(node, ast.Call):
            names.update(_called(node.func))
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes += (item for item in value if isinstance(item, ast.AST))


def _called(function: ast.expr) -> tuple[str, ...]:
    if isinstance(function, ast.Name):
        return (function.id,)
    return (function.attr,) if isinstance(function, ast.Attribute) else ()
