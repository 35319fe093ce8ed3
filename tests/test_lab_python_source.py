"""The data sets made of Python sources: tokens, functions, and splits that depend on the path alone."""

import gc
import io
import math
import tokenize
from pathlib import Path

import numpy as np
import pytest

from rfsoftmax.lab.python_source import python_calls, python_text, tokens
from rfsoftmax.lab.text import EOS, SPLITS, UNK, TextCorpus
from rfsoftmax.lab.xc import XCSplits

AWKWARD = '''
import os  # a comment with "quotes' in it
x = rb"a # b" + b'\\'' + f"{x!r:>{n}}"; y = r"\\" 'two' u"three"
z: int = 0x_ff + 1.5e-3 + .5 + 1_000j - 1e+10 ** 2 // 3 >> 1 @ m
z //= 2; z **= 2; z >>= 1; a = lambda *b, **c: ...
def naïve(bare, rb, *, f=None) -> "str":
    """A docstring with 'quotes', \\""" and # no comment

    in it."""
    if (n := 10) != 9 and x[1:2, ::3] <= 2 or ~x: return \'\'\'it's\'\'\'
    return rb
'''
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
NUM_FILES = 80


def write_files(root: Path, num_files: int = NUM_FILES) -> Path:
    """File i has one function; words `read` and `file`, and the calls of `common` and of its own `call_i`."""
    (root / "package").mkdir(parents=True)
    for i in range(num_files):
        (root / "package" / f"m{i}.py").write_text(f"def readFile(own_{i}):\n    common()\n    own.call_{i}()\n")
    return root


def called(splits: XCSplits, split: str) -> list[set[str]]:
    labels = getattr(splits, split).labels
    return [{splits.label_names[j] for j in labels[i].indices} for i in range(labels.shape[0])]


def calls_of(tmp_path: Path, source: str | bytes) -> list[set[str]]:
    """The calls of the functions of `source` in a training file, in any order, without those of the other files."""
    root = write_files(tmp_path / "root")
    (root / "extra.py").write_bytes(source.encode() if isinstance(source, str) else source)
    found = called(python_calls(cache=tmp_path / "cache", roots=[root]), "train")
    return sorted((names for names in found if "common" not in names), key=sorted)


def read_back(corpus: TextCorpus, split: str) -> list[str]:
    return [corpus.words[i] for i in getattr(corpus, split)]


def test_tokens_are_those_of_tokenize() -> None:
    reference = tokenize.generate_tokens(io.StringIO(AWKWARD.replace('f"{', '"{')).readline)
    expected = [token.string for token in reference if token.type not in LAYOUT]
    assert [token for token in tokens(AWKWARD.replace('f"{', '"{')) if token != "\n"] == expected


def test_a_formatted_string_is_one_token_and_a_comment_none() -> None:
    assert tokens('f"{x!r:>{n}}" # "it"') == ['f"{x!r:>{n}}"', "\n"]


def test_an_unfinished_string_ends_with_its_line() -> None:
    assert tokens("x = 'abc\ny") == ["x", "=", "'", "abc", "\n", "y", "\n"]


def test_a_line_of_tokens_is_a_sentence_and_blank_lines_are_none(tmp_path: Path) -> None:
    root = write_files(tmp_path / "root")
    for i in range(NUM_FILES):
        (root / "package" / f"m{i}.py").write_text("\n# comment\nx = 1\n\n    # more\n\ny = f(x)")
    corpus = python_text(cache=tmp_path / "cache", roots=[root])
    sentences = ["x", "=", "1", EOS, "y", "=", "f", "(", "x", ")", EOS]
    for split in SPLITS:
        found = read_back(corpus, split)
        assert found == sentences * (len(found) // len(sentences))
    assert sum(len(getattr(corpus, split)) for split in SPLITS) == NUM_FILES * len(sentences)
    assert corpus.words[-1] == UNK


def test_the_vocabulary_has_the_most_frequent_tokens(tmp_path: Path) -> None:
    corpus = python_text(cache=tmp_path / "cache", roots=[write_files(tmp_path / "root")], num_words=6)
    assert set(corpus.words) == {"(", ")", EOS, UNK, "def", "readFile"}
    assert read_back(corpus, "valid")[:8] == ["def", "readFile", "(", UNK, ")", UNK, EOS, UNK]


def test_a_file_that_is_not_utf8_is_no_text(tmp_path: Path) -> None:
    root = write_files(tmp_path / "root")
    before = python_text(cache=tmp_path / "cache", roots=[root])
    (root / "extra.py").write_bytes(b"# coding: latin-1\nx = '\xe4'\n")
    after = python_text(cache=tmp_path / "cache", roots=[root])
    assert [len(getattr(before, split)) for split in SPLITS] == [len(getattr(after, split)) for split in SPLITS]


def test_a_split_depends_on_the_path_below_the_root_alone(tmp_path: Path) -> None:
    few = python_calls(cache=tmp_path / "cache", roots=[write_files(tmp_path / "a")])
    many = python_calls(cache=tmp_path / "cache", roots=[write_files(tmp_path / "b" / "c", 3 * NUM_FILES)])
    for split in SPLITS:
        fewer, more = (set.union(*called(splits, split)) for splits in (few, many))
        assert fewer < more
    parts = [set.union(*called(many, split)) for split in SPLITS]
    assert sum(map(len, parts)) == 3 * NUM_FILES + 3  # each file in one split, `common` in all
    assert len(parts[0]) > 5 * max(len(parts[1]), len(parts[2]))


def test_other_peoples_packages_are_left_out(tmp_path: Path) -> None:
    root = write_files(tmp_path / "root")
    write_files(root / "site-packages")
    splits = python_calls(cache=tmp_path / "cache", roots=[root])
    assert sum(getattr(splits, split).features.shape[0] for split in SPLITS) == NUM_FILES


def test_labels_are_the_names_that_the_body_calls(tmp_path: Path) -> None:
    source = """
@decorated()
def outer(x=default()):
    a.b.attribute(argument())
    def inner(): nested()
    calls[0](); (lambda: anonymous())()
class Kept(Base()):
    async def method(self):
        return await waited(x for x in [listed()])
    def silent(self): return self
module_level()
"""
    outer = {"attribute", "argument", "nested", "anonymous"}
    assert calls_of(tmp_path, source) == sorted([outer, {"nested"}, {"waited", "listed"}], key=sorted)


@pytest.mark.parametrize("source", ["def f(: g()", b"def f(): g('\xff')", b"def f(): g()\n\0", "(" * 5000])
def test_a_file_that_does_not_parse_is_skipped(tmp_path: Path, source: str | bytes) -> None:
    assert calls_of(tmp_path, source) == []


def test_warnings_about_the_sources_are_not_ours(tmp_path: Path) -> None:
    assert calls_of(tmp_path, "def f(): g('\\d') is 1") == [{"g"}]


def test_labels_run_from_the_most_frequent_and_name_the_columns(tmp_path: Path) -> None:
    splits = python_calls(cache=tmp_path / "cache", roots=[write_files(tmp_path / "root")])
    counts = splits.train.labels.sum(axis=0).tolist()[0]
    assert counts == sorted(counts, reverse=True)
    assert splits.label_names[0] == "common"
    assert len(splits.label_names) == NUM_FILES + 1
    assert all(getattr(splits, split).labels.has_canonical_format for split in SPLITS)


def test_features_are_tf_idf_of_the_words_of_name_arguments_and_docstring(tmp_path: Path) -> None:
    source = 'def write_file(HTTPResponse, *, file):\n    "The file. HTTP response."\n    g()\ndef response(): g()\n'
    root = write_files(tmp_path / "root")
    (root / "extra.py").write_text(source)
    train = python_calls(cache=tmp_path / "cache", roots=[root]).train
    size = train.features.shape[0]
    # Words of two functions or more: read, file, own; and response. The others are of a single one.
    assert train.features.shape[1] == 4
    weight_of_file, weight_of_response = (1 + math.log((1 + size) / (1 + df)) for df in (size - 1, 2))
    expected = np.array([3 * weight_of_file, 2 * weight_of_response])
    rows = [train.features[i].data for i in range(size)]
    [found] = [row for row in rows if len(row) == 2]
    np.testing.assert_allclose(np.sort(found), np.sort(expected / np.linalg.norm(expected)), rtol=1e-6)
    np.testing.assert_allclose([np.linalg.norm(row) for row in rows], 1, rtol=1e-6)


def test_the_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = write_files(tmp_path / "root"), tmp_path / "cache"
    text, calls = python_text(cache=cache, roots=[root]), python_calls(cache=cache, roots=[root])
    monkeypatch.setattr("rfsoftmax.lab.python_source._numbers", None)
    monkeypatch.setattr("rfsoftmax.lab.python_source._functions", None)
    assert python_text(cache=cache, roots=[root]).words == text.words
    assert called(python_calls(cache=cache, roots=[root]), "valid") == called(calls, "valid")


def test_the_collector_runs_again_afterwards(tmp_path: Path) -> None:
    python_calls(cache=tmp_path / "cache", roots=[write_files(tmp_path / "root")])
    assert gc.isenabled()


def test_too_few_files_are_refused(tmp_path: Path) -> None:
    for build in (python_text, python_calls):
        with pytest.raises(
            ValueError, match=r"roots: expected Python files enough for three splits in .*, got none for"
        ):
            build(cache=tmp_path / "cache", roots=[tmp_path])


def test_a_vocabulary_without_room_for_eos_and_unk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_words: expected at least 2, .* got 1"):
        python_text(cache=tmp_path, num_words=1)


@pytest.mark.slow
def test_the_standard_library_and_torch_are_large_data_sets(tmp_path: Path) -> None:
    text, calls = python_text(cache=tmp_path), python_calls(cache=tmp_path)
    assert len(text.words) == 50_000
    assert len(text.train) > 5_000_000
    assert text.counts[text.words.index(UNK)] < 0.1 * len(text.train)
    assert len(calls.label_names) > 20_000
    assert calls.train.features.shape[0] > 40_000
    assert 3 < calls.train.labels.nnz / calls.train.labels.shape[0] < 6
