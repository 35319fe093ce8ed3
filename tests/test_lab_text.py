"""Corpora of words: the vocabulary, the layouts, the splits, the errors."""

import gzip
import lzma
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rfsoftmax.lab.text import EOS, SPLITS, UNK, TextCorpus, WordTable, load_text, select_words

TEXTS = {"train": "the cat sat\nthe dog\n\nthe <unk> sat\n", "valid": "the bird sat\n", "test": " cat dog \n"}
PTB, WIKITEXT, TOKENS = "ptb.{}.txt", "{}.txt", "wiki.{}.tokens"


def write_layout(directory: Path, layout: str = PTB) -> Path:
    for name, text in TEXTS.items():
        (directory / layout.format(name)).write_text(text)
    return directory


def read_back(corpus: TextCorpus, split: str) -> str:
    return " ".join(corpus.words[i] for i in getattr(corpus, split))


def to_numbers(table: WordTable, words: list[str]) -> NDArray[np.int32]:
    return np.array([table[word] for word in words], dtype=np.int32)


@pytest.mark.parametrize("layout", [PTB, WIKITEXT, TOKENS])
def test_each_layout_is_read_as_it_is(tmp_path: Path, layout: str) -> None:
    corpus = load_text(write_layout(tmp_path, layout), cache=tmp_path / "cache")
    assert read_back(corpus, "train") == "the cat sat <eos> the dog <eos> <eos> the <unk> sat <eos>"
    assert read_back(corpus, "valid") == "the <unk> sat <eos>"
    assert read_back(corpus, "test") == "cat dog <eos>"


def test_words_run_from_the_most_frequent_ties_by_first_occurrence(tmp_path: Path) -> None:
    corpus = load_text(write_layout(tmp_path), cache=tmp_path / "cache")
    assert corpus.words == (EOS, "the", "sat", UNK, "cat", "dog")
    assert corpus.counts.tolist() == [4, 3, 2, 1, 1, 1]


def test_num_words_counts_eos_and_unk_and_unk_takes_the_rest(tmp_path: Path) -> None:
    corpus = load_text(write_layout(tmp_path), cache=tmp_path / "cache", num_words=3)
    assert corpus.words == (UNK, EOS, "the")
    assert corpus.counts.tolist() == [5, 4, 3]
    assert read_back(corpus, "test") == "<unk> <unk> <eos>"


def test_unk_is_there_though_training_has_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a\nb\nc\n")
    corpus = load_text(tmp_path / "text", cache=tmp_path / "cache")
    assert corpus.words == (EOS, "a", UNK)
    assert corpus.counts.tolist() == [1, 1, 0]
    assert [read_back(corpus, split) for split in SPLITS] == ["a <eos>", "<unk> <eos>", "<unk> <eos>"]


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1), st.lists(st.sampled_from("abxyz")), st.integers(2, 12))
def test_the_vocabulary_is_that_of_a_counter(train: list[str], valid: list[str], num_words: int) -> None:
    table = WordTable()
    numbers = {"train": to_numbers(table, train), "valid": to_numbers(table, valid)}
    arrays = select_words(table, numbers, num_words)
    best = [word for word, _ in Counter(train).most_common(num_words - 2)]
    counts = Counter(word if word in best else UNK for word in train)
    assert arrays["counts"].sum() == len(train)
    assert sorted(arrays["counts"].tolist(), reverse=True) == arrays["counts"].tolist()
    assert sorted(c for c in arrays["counts"].tolist() if c) == sorted(counts.values())
    assert len(arrays["counts"]) == 2 + len(best)
    np.testing.assert_array_equal(np.bincount(arrays["train"], minlength=2 + len(best)), arrays["counts"])


@pytest.mark.parametrize(("num_lines", "held_out"), [(3, 1), (40, 2), (1000, 50)])
def test_a_file_is_cut_by_lines_in_order(tmp_path: Path, num_lines: int, held_out: int) -> None:
    (tmp_path / "text").write_text("".join(f"w{i % 7} x\n" for i in range(num_lines)))
    corpus = load_text(tmp_path / "text", cache=tmp_path / "cache")
    assert [len(getattr(corpus, split)) // 3 for split in SPLITS] == [num_lines - 2 * held_out, held_out, held_out]
    if num_lines > 20:
        whole = " ".join(read_back(corpus, split) for split in SPLITS)
        assert whole == " ".join(f"w{i % 7} x <eos>" for i in range(num_lines))


def test_the_last_line_needs_no_newline_and_windows_ends_are_ends(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a b\r\na\r\na b")
    corpus = load_text(tmp_path / "text", cache=tmp_path / "cache")
    assert [read_back(corpus, split) for split in SPLITS] == ["a b <eos>", "a <eos>", "a b <eos>"]


def test_compressed_files_are_read_as_plain_ones(tmp_path: Path) -> None:
    plain = load_text(write_layout(tmp_path), cache=tmp_path / "cache")
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "ptb.train.txt.xz").write_bytes(lzma.compress(TEXTS["train"].encode()))
    (packed / "ptb.valid.txt.gz").write_bytes(gzip.compress(TEXTS["valid"].encode()))
    (packed / "ptb.test.txt").write_text(TEXTS["test"])
    corpus = load_text(packed, cache=tmp_path / "cache")
    assert corpus.words == plain.words
    for split in SPLITS:
        np.testing.assert_array_equal(getattr(corpus, split), getattr(plain, split))


def test_the_cache_is_used_and_a_changed_file_or_setting_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, cache = write_layout(tmp_path), tmp_path / "cache"
    first = load_text(directory, cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr("rfsoftmax.lab.text._build", None)
        again = load_text(directory, cache=cache)
    assert again.words == first.words
    assert again.counts.tolist() == first.counts.tolist()
    assert len(load_text(directory, cache=cache, num_words=4).words) == 4
    (directory / "ptb.train.txt").write_text("new words\n")
    assert load_text(directory, cache=cache).words == (EOS, "new", "words", UNK)


def test_torch_takes_a_slice_of_a_split(tmp_path: Path) -> None:
    corpus = load_text(write_layout(tmp_path), cache=tmp_path / "cache")
    assert torch.from_numpy(corpus.train[:3]).long().tolist() == [1, 4, 2]


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"fine\nna\xefve\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: expected UTF-8 text, got byte 0xef in column 3")):
        load_text(path, cache=tmp_path / "cache")


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("keep", [3, 60])
def test_a_damaged_archive_is_named(tmp_path: Path, suffix: str, compress: object, keep: int) -> None:
    path = tmp_path / f"text{suffix}"
    whole = compress(bytes(range(32, 127)) * 2)  # type: ignore[operator]
    path.write_bytes(b"???" if keep == 3 else whole[:keep])
    with pytest.raises(ValueError, match=re.escape(f"{path}: expected a whole {suffix} file, got a damaged one")):
        load_text(path, cache=tmp_path / "cache")


def test_too_few_lines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one\ntwo\n")
    with pytest.raises(ValueError, match=r"text: expected at least 3 lines to make train, valid, test of, got 2"):
        load_text(path, cache=tmp_path / "cache")
    (write_layout(tmp_path) / "ptb.valid.txt").write_text("")
    with pytest.raises(ValueError, match=r"ptb.valid.txt: expected at least one line, got an empty file"):
        load_text(tmp_path, cache=tmp_path / "cache")


def test_a_directory_of_no_known_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").touch()
    with pytest.raises(ValueError, match=r"expected a text file or a directory with .*ptb\.train.*, got train\.txt"):
        load_text(tmp_path, cache=tmp_path / "cache")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere: expected a file, got none"):
        load_text(tmp_path / "nowhere", cache=tmp_path / "cache")


def test_a_vocabulary_without_room_for_eos_and_unk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_words: expected at least 2, .* got 1"):
        load_text(write_layout(tmp_path), cache=tmp_path / "cache", num_words=1)
