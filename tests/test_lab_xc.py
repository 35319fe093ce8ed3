"""The extreme classification format: what is read, and what is said of a line that cannot be."""

import gzip
import lzma
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rfsoftmax.lab.xc import XCData, load_xc, read_label_names

TEXT = "4 5 3\n0,2 0:1 4:-2.5e-1\n 1:0.05021 3:+.5\n1\n\n"
FEATURES = [[1, 0, 0, 0, -0.25], [0, 0.05021, 0, 0.5, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
LABELS = [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]]
MAX_FLOAT32 = float(np.finfo(np.float32).max)


def load(directory: Path, text: str | bytes, name: str = "data.txt") -> XCData:
    path = directory / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_xc(path, cache=directory / "cache")


def assert_is_the_example(data: XCData) -> None:
    np.testing.assert_array_equal(data.features.toarray(), np.array(FEATURES, dtype=np.float32))
    np.testing.assert_array_equal(data.labels.toarray(), LABELS)
    assert data.features.dtype == data.labels.dtype == np.float32


def test_rows_with_and_without_labels_and_features_are_read(tmp_path: Path) -> None:
    assert_is_the_example(load(tmp_path, TEXT))


@pytest.mark.parametrize(
    "text",
    [
        TEXT.removesuffix("\n") + " ",
        TEXT + "\n \n",
        TEXT.replace("\n", "\r\n"),
        TEXT.replace(" ", "  ").replace("\n", " \n"),
        TEXT.replace(" ", "\t"),
        TEXT.replace("0:1 4:-2.5e-1", "4:-25E-2 0:0.5 0:.5").replace("0,2", "2,0,2"),
    ],
    ids=["no last newline", "blank lines after", "windows", "more spaces", "tabs", "unsorted and repeated"],
)
def test_harmless_differences_change_nothing(tmp_path: Path, text: str) -> None:
    data = load(tmp_path, text)
    assert_is_the_example(data)
    assert data.features.has_canonical_format
    assert data.labels.has_canonical_format


@pytest.mark.parametrize(("name", "pack"), [("d.txt.gz", gzip.compress), ("d.txt.xz", lzma.compress)])
def test_compressed_files_are_read_as_plain_ones(tmp_path: Path, name: str, pack: object) -> None:
    assert_is_the_example(load(tmp_path, pack(TEXT.encode()), name))  # type: ignore[operator]


def test_the_cache_is_used_and_a_changed_file_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(tmp_path, TEXT)
    with monkeypatch.context() as patch:
        patch.setattr("rfsoftmax.lab.xc._read", None)
        assert_is_the_example(load_xc(tmp_path / "data.txt", cache=tmp_path / "cache"))
    assert load(tmp_path, "1 2 3\n2 1:7\n").features.toarray().tolist() == [[0, 7]]


def test_no_points_at_all_are_no_error(tmp_path: Path) -> None:
    data = load(tmp_path, "0 5 3\n")
    assert data.features.shape == (0, 5)
    assert data.labels.shape == (0, 3)


def decimals() -> st.SearchStrategy[str]:
    """Numbers as people write them: as Python does, with a fixed point, with an exponent, with many digits."""
    floats = st.floats(-MAX_FLOAT32, MAX_FLOAT32, allow_nan=False)
    written = [floats.map(repr), floats.map("{:e}".format), st.floats(-1e6, 1e6).map("{:.5f}".format)]
    return st.one_of(*written, st.from_regex(r"[-+]?[0-9]{1,30}\.[0-9]{0,30}(e-?[0-9])?", fullmatch=True))


@settings(max_examples=30, deadline=None)
@given(st.lists(decimals(), max_size=20))
def test_numbers_are_those_of_python_to_one_bit_of_float32(written: list[str]) -> None:
    row = " ".join(f"{i}:{value}" for i, value in enumerate(written))
    with tempfile.TemporaryDirectory() as directory:
        data = load(Path(directory), f"1 20 1\n0 {row}\n")
        found = data.features.toarray()[0, : len(written)]
    np.testing.assert_allclose(found, np.array([float(value) for value in written], dtype=np.float32), rtol=1.2e-7)


@pytest.mark.parametrize(
    ("line", "row", "expected", "got"),
    [
        (1, "", "a header of three whole numbers, 'points features labels'", "''"),
        (1, "2 5", "a header of three whole numbers, 'points features labels'", "'2 5'"),
        (1, "2 5 x", "a header of three whole numbers, 'points features labels'", "'2 5 x'"),
        (1, "2 5 -3", "a header of three whole numbers, 'points features labels'", "'2 5 -3'"),
        (1, "3 5 3", "3 rows, as the header says", "2"),
        (3, "1 5 3", "no more than 1 rows, as the header says", "'1' in column 1"),
        (2, "3 0:1", "a label id from 0 to 2", "'3' in column 1"),
        (2, "0,99999999999999999999 0:1", "a label id from 0 to 2", "'99999999999999999999' in column 3"),
        (2, "-1 0:1", "a label id from 0 to 2", "'-1' in column 1"),
        (2, "0, 0:1", "a label id from 0 to 2", "nothing in column 3"),
        (2, "cat 0:1", "a label id from 0 to 2", "'cat' in column 1"),
        (2, "1x 0:1", "a comma or a space after the label id", "'1x' in column 1"),
        (2, "0:1 2:1", "a comma or a space after the label id", "'0:1' in column 1"),
        (2, "1 5:1", "a feature id from 0 to 4", "'5:1' in column 3"),
        (2, "1 -1:1", "a feature id from 0 to 4", "'-1:1' in column 3"),
        (2, "1 cat:1", "a feature id from 0 to 4", "'cat:1' in column 3"),
        (2, " :1", "a feature id from 0 to 4", "':1' in column 2"),
        (2, "1 2", "a colon after the feature id", "'2' in column 3"),
        (2, "1 2 :1", "a colon after the feature id", "'2' in column 3"),
        (2, "1 2.5:1", "a colon after the feature id", "'2.5:1' in column 3"),
        (2, "1 2:", "a finite 32-bit number after the colon", "nothing in column 5"),
        (2, "1 2: 1", "a finite 32-bit number after the colon", "nothing in column 5"),
        (2, "1 2:cat", "a finite 32-bit number after the colon", "'cat' in column 5"),
        (2, "1 2:nan", "a finite 32-bit number after the colon", "'nan' in column 5"),
        (2, "1 2:-inf", "a finite 32-bit number after the colon", "'-inf' in column 5"),
        (2, "1 2:4e38", "a finite 32-bit number after the colon", "'4e38' in column 5"),
        (2, "1 2:1e99999999999999999999", "a finite 32-bit number after the colon", "'1e99999999999999999999'"),
        (2, "1 2:1e", "a finite 32-bit number after the colon", "'1e' in column 5"),
        (2, "1 2:1.2.3", "a finite 32-bit number after the colon", "'1.2.3' in column 5"),
        (2, "1 2:.", "a finite 32-bit number after the colon", "'.' in column 5"),
        (2, "1 2:1,3:1", "a finite 32-bit number after the colon", "'1,3:1' in column 5"),
        (3, "1 2:1 3:0x1", "a finite 32-bit number after the colon", "'0x1' in column 9"),
    ],
)
def test_a_malformed_line_is_named_with_what_was_expected(
    tmp_path: Path, line: int, row: str, expected: str, got: str
) -> None:
    rows = ["2 5 3", "0 0:1", "1 1:1"]
    rows[0 if line == 1 or row == "1 5 3" else line - 1] = row
    with pytest.raises(ValueError, match=r"data.txt:\d") as raised:
        load(tmp_path, "\n".join(rows) + "\n")
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / 'data.txt'}:{line}: expected {expected}")
    assert f", got {got}" in message
    assert not list((tmp_path / "cache").iterdir())


def test_a_malformed_last_line_without_newline_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.txt:2: expected a finite 32-bit number after the colon, got '1e-'"):
        load(tmp_path, "1 5 3\n0 1:1e-")


def test_an_error_deep_in_a_file_has_its_line(tmp_path: Path) -> None:
    rows = ["0 1:1"] * 5000
    rows[4321] = "0 1:one"
    with pytest.raises(ValueError, match=r"data.txt:4323: "):
        load(tmp_path, "\n".join(["5000 5 3", *rows]))


def test_names_are_one_a_line_or_the_second_column(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("first label\nsecond\n")
    (tmp_path / "tsv").write_text("id:1\tfirst label\t17\r\nid:2\tsecond\t3\r\n")
    for name in ("plain", "tsv"):
        assert read_label_names(tmp_path / name, 2) == ("first label", "second")


def test_names_are_found_by_id(tmp_path: Path) -> None:
    names, ids = tmp_path / "names.tsv", tmp_path / "ids"
    names.write_text("a\tAnt\t1\nb\tBee\t2\nc\tCat\t3\n")
    ids.write_text("c\na\n")
    assert read_label_names(names, 2, ids=ids) == ("Cat", "Ant")
    with pytest.raises(ValueError, match=re.escape(f"{ids}: expected 3 labels, one a line, got 2")):
        read_label_names(names, 3, ids=ids)
    ids.write_text("c\nd\n")
    with pytest.raises(ValueError, match=re.escape(f"{ids}:2: expected an id that {names} names, got 'd'")):
        read_label_names(names, 2, ids=ids)


def test_a_wrong_number_of_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"names: expected 3 labels, one a line, got 2"):
        read_label_names(tmp_path / "names", 3)
