"""The lab's cache: an entry is whole or absent, whatever happens to its writer."""

import os
import resource
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

from rfsoftmax.lab.cache import Arrays, cached, fingerprint, pack_strings, unpack_strings

KEY = "numbers-1"


def numbers() -> Arrays:
    return {"ids": np.arange(10, dtype=np.int32), "none": np.zeros((0, 3)), "words": pack_strings(["a", "\n", "ü\0"])}


def unwanted() -> Arrays:
    raise AssertionError("built again")


def names_below(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_was_built_once_comes_back_from_disk(tmp_path: Path) -> None:
    cached(tmp_path / "a" / "b", KEY, numbers)
    again = cached(tmp_path / "a" / "b", KEY, unwanted)
    for name, array in numbers().items():
        assert again[name].dtype == array.dtype
        np.testing.assert_array_equal(again[name], array)
    assert unpack_strings(again["words"]) == ("a", "\n", "ü\0")


def test_torch_takes_the_arrays_and_writing_to_them_never_reaches_the_disk(tmp_path: Path) -> None:
    torch.from_numpy(cached(tmp_path, KEY, numbers)["ids"]).zero_()
    assert cached(tmp_path, KEY, unwanted)["ids"].tolist() == list(range(10))


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="built again"):
        cached(tmp_path, KEY, unwanted)
    assert names_below(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_other_entries_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def save_half(file: BinaryIO, array: np.ndarray) -> None:
        if array.size == 0:
            raise error
        save(file, array)

    save = np.save
    cached(tmp_path, "other", numbers)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", save_half)
        with pytest.raises(error):
            cached(tmp_path, KEY, numbers)
    assert names_below(tmp_path) == ["other"]
    cached(tmp_path, "other", unwanted)
    cached(tmp_path, KEY, numbers)


def test_no_room_on_the_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"cache: expected to write 1000000 bytes below .*, got "):
            cached(tmp_path, KEY, lambda: {"large": np.ones(1_000_000, dtype=np.int8)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_below(tmp_path) == []


@pytest.mark.parametrize("name", ["ids.npy", "names.json"])
@pytest.mark.parametrize("size", [None, 0, 1, 140])
def test_a_damaged_entry_is_built_again(tmp_path: Path, name: str, size: int | None) -> None:
    """A file of it is lost or cut short; at 140 bytes, after the header of an array."""
    cached(tmp_path, KEY, numbers)
    path = tmp_path / KEY / name
    path.unlink() if size is None else path.write_bytes(path.read_bytes()[:size])
    assert cached(tmp_path, KEY, numbers)["ids"].tolist() == list(range(10))
    cached(tmp_path, KEY, unwanted)
    assert names_below(tmp_path) == [KEY]


def test_of_two_writers_of_one_entry_both_succeed(tmp_path: Path) -> None:
    def while_another_writes() -> Arrays:
        return cached(tmp_path, KEY, numbers)

    assert cached(tmp_path, KEY, while_another_writes)["ids"].tolist() == list(range(10))
    assert names_below(tmp_path) == [KEY]


def test_what_a_killed_writer_left_is_not_read_and_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, young = tmp_path / f"{KEY}.1.partial", tmp_path / f"{KEY}.2.partial"
    for partial in (old, young):
        partial.mkdir()
        (partial / "ids.npy").write_bytes(b"half")
    os.utime(old, (0, 0))
    assert cached(tmp_path, KEY, numbers)["ids"].tolist() == list(range(10))
    assert names_below(tmp_path) == [KEY, young.name]


def test_a_cache_that_is_a_file_is_refused_before_building(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cache: expected a directory to write to, got .*file"):
        cached(tmp_path / "file", KEY, unwanted)


def test_the_fingerprint_tells_files_sizes_times_and_settings_apart(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    for file in (path, other):
        file.write_text("text")
        os.utime(file, (1000, 1000))
    found = [fingerprint([path]), fingerprint([other]), fingerprint([path, other]), fingerprint([path], 3)]
    os.utime(path, (1000, 1001))
    found.append(fingerprint([path]))
    path.write_text("texts")
    os.utime(path, (1000, 1001))
    found.append(fingerprint([path]))
    assert len(set(found)) == len(found)
    assert fingerprint([path]) == found[-1]


def test_a_fingerprint_needs_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere: expected a file, got none"):
        fingerprint([tmp_path / "nowhere"])
    with pytest.raises(FileNotFoundError, match=r"expected a file, got a directory"):
        fingerprint([tmp_path])
