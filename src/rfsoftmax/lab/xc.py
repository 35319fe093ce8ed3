"""Extreme classification data: the repository's text format, read by a compiled parser into sparse matrices.

The format: a header `points features labels`, then a row `l1,l2 f:v f:v ...` a point, ids from 0. A row without labels
begins with a space.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from .cache import Arrays, cached, fingerprint
from .files import lines, opened
from .xc_kernels import EXPECTED, OK, parse


@dataclass(frozen=True, eq=False)
class XCData:
    """Point i has the features `features[i]`, (points, features) float32, and the labels `labels[i]`, whose ones say
    which, (points, labels) float32. Ids are sorted in each row and occur once."""

    features: csr_matrix
    labels: csr_matrix


@dataclass(frozen=True, eq=False)
class XCSplits:
    """Three parts of one data set, of equal widths; `label_names[j]` names column j of their labels."""

    train: XCData
    valid: XCData
    test: XCData
    label_names: tuple[str, ...]


def load_xc(path: str | Path, *, cache: str | Path) -> XCData:
    """The points of a file in the repository's format; equal features of a row are summed, equal labels are one."""
    path = Path(path)
    arrays = cached(Path(cache), f"xc-{fingerprint([path])}", lambda: to_arrays(_read(path)))
    return from_arrays(arrays)


def read_label_names(path: str | Path, num_labels: int, *, ids: str | Path | None = None) -> tuple[str, ...]:
    """Names of the labels, from lines `name` or `id<TAB>name`.

    Line i of the file names label i; where `ids` is given, line i of that file holds the id of label i, and its name
    is looked up by it, so `path` may hold more names than there are labels, in any order.
    """
    rows = [line.rstrip("\r\n").split("\t") for line in lines(Path(path))]
    names = [row[min(1, len(row) - 1)] for row in rows]
    if ids is not None:
        named = {row[0]: name for row, name in zip(rows, names, strict=True)}
        wanted = [line.strip() for line in lines(Path(ids))]
        for number, label in enumerate(wanted, 1):
            if label not in named:
                raise ValueError(f"{ids}:{number}: expected an id that {path} names, got {label!r}")
        names = [named[label] for label in wanted]
    if len(names) != num_labels:
        raise ValueError(f"{path if ids is None else ids}: expected {num_labels} labels, one a line, got {len(names)}")
    return tuple(names)


def to_arrays(data: XCData, prefix: str = "") -> Arrays:
    """The arrays that `from_arrays` makes the data of again; the ones of the labels need no array."""
    features, labels = data.features, data.labels
    arrays = {
        "widths": np.array([features.shape[1], labels.shape[1]]),
        "values": features.data,
        "feature_ids": features.indices,
        "feature_ends": features.indptr,
        "label_ids": labels.indices,
        "label_ends": labels.indptr,
    }
    return {prefix + name: array for name, array in arrays.items()}


def from_arrays(arrays: Arrays, prefix: str = "") -> XCData:
    num_features, num_labels = arrays[f"{prefix}widths"].tolist()
    features = _matrix(arrays, f"{prefix}feature", arrays[f"{prefix}values"], num_features)
    ones = np.ones(len(arrays[f"{prefix}label_ids"]), dtype=np.float32)
    return XCData(features, _matrix(arrays, f"{prefix}label", ones, num_labels))


def _matrix(arrays: Arrays, name: str, values: NDArray[np.float32], width: int) -> csr_matrix:
    ids, ends = arrays[f"{name}_ids"], arrays[f"{name}_ends"]
    return csr_matrix((values, ids, ends), shape=(len(ends) - 1, width))


def _read(path: Path) -> XCData:
    with opened(path) as file:
        data = file.read()
    if not data.endswith(b"\n"):
        data += b"\n"
    start = data.index(b"\n") + 1
    num_rows, num_features, num_labels = _header(path, data[:start])
    found_rows = data.count(b"\n") - 1
    if found_rows < num_rows:
        raise ValueError(f"{path}:1: expected {num_rows} rows, as the header says, got {found_rows}")
    # A label but the first of a row follows a comma, a value follows a colon.
    label_ids = np.empty(num_rows + data.count(b","), dtype=np.int32)
    feature_ids = np.empty(data.count(b":"), dtype=np.int32)
    values = np.empty(len(feature_ids), dtype=np.float32)
    label_ends, feature_ends = np.zeros((2, num_rows + 1), dtype=np.int64)
    text = np.frombuffer(data, dtype=np.uint8)
    missed, end = parse(text, start, num_features, num_labels, label_ends, label_ids, feature_ends, feature_ids, values)
    if missed != OK:
        expected = EXPECTED[missed].format(last_label=num_labels - 1, last_feature=num_features - 1)
        raise _error(path, data, end, expected)
    if data[end:].strip():
        raise _error(path, data, end, f"no more than {num_rows} rows, as the header says")
    features = _sorted(values, feature_ids, feature_ends, num_features)
    labels = _sorted(np.ones(len(label_ids), dtype=np.float32), label_ids, label_ends, num_labels)
    return XCData(features, labels)


def _header(path: Path, line: bytes) -> list[int]:
    fields = line.split()
    if len(fields) == 3 and all(re.fullmatch(rb"[0-9]{1,9}", field) for field in fields):
        return [int(field) for field in fields]
    got = repr(line[:60].decode(errors="replace").rstrip())
    raise ValueError(f"{path}:1: expected a header of three whole numbers, 'points features labels', got {got}")


def _error(path: Path, data: bytes, position: int, expected: str) -> ValueError:
    """What stands at the position, up to the next blank, is what came in place of the expected."""
    line = data.count(b"\n", 0, position) + 1
    column = position - data.rfind(b"\n", 0, position)
    found = re.match(rb"\S{0,40}", data[position : position + 40])
    got = repr(found[0].decode(errors="replace")) if found and found[0] else "nothing"
    return ValueError(f"{path}:{line}: expected {expected}, got {got} in column {column}")


def _sorted(values: NDArray[np.float32], ids: NDArray[np.int32], ends: NDArray[np.int64], width: int) -> csr_matrix:
    size = int(ends[-1])
    if size < 2**31:
        ends = ends.astype(np.int32)  # scipy keeps both in one type
    matrix = csr_matrix((values[:size], ids[:size], ends), shape=(len(ends) - 1, width))
    matrix.sum_duplicates()
    return matrix
