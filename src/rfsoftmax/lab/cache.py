"""Arrays kept on disk between runs. An entry is there whole or not at all, whatever stopped its writing."""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

Arrays = dict[str, np.ndarray]

# To be raised when a reader makes other arrays of the same files, lest old entries be taken for new ones.
_FORMAT = 1
# Written last, so that an entry from which a file was lost is known as damaged.
_NAMES = "names.json"
# A directory in the making that is older than this was left by a process that was killed.
_ABANDONED_SECONDS = 3600


def fingerprint(paths: Iterable[Path], *settings: object) -> str:
    """A key that changes when a file is replaced or a setting differs: of paths, sizes, times and settings."""
    digest = hashlib.sha256(repr((_FORMAT, *settings)).encode())
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: expected a file, got {'a directory' if path.is_dir() else 'none'}")
        status = path.stat()
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:24]


def cached(directory: Path, key: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays of entry `key`, memory-mapped; `build()` makes them where the entry is missing or damaged.

    They are mapped copy-on-write: `torch.from_numpy` takes them, and what is written to them never reaches the disk.
    """
    entry = directory / key
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cache: expected a directory to write to, got {error}") from error
    arrays = _load(entry)
    if arrays is None:
        _store(entry, build())
        arrays = _load(entry)
    if arrays is None:
        raise OSError(f"cache: expected to read back what was written to {entry}, got a damaged entry")
    return arrays


def pack_strings(strings: Sequence[str]) -> np.ndarray:
    """Strings as one array of bytes, for `cached`."""
    return np.frombuffer(json.dumps(strings).encode(), dtype=np.uint8)


def unpack_strings(packed: np.ndarray) -> tuple[str, ...]:
    return tuple(json.loads(packed.tobytes()))


def _load(entry: Path) -> Arrays | None:
    try:
        names = json.loads((entry / _NAMES).read_text())
        return {name: np.asarray(np.load(entry / f"{name}.npy", mmap_mode="c")) for name in names}
    except (FileNotFoundError, ValueError, EOFError):
        return None


def _store(entry: Path, arrays: Arrays) -> None:
    """Written beside and renamed: renaming is the one step that makes the entry, and it cannot be half done."""
    beside = entry.with_name(f"{entry.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        beside.mkdir()
        _remove_abandoned(entry.parent)
        for name, array in arrays.items():
            with (beside / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                _flush(file)
        with (beside / _NAMES).open("w") as names:
            json.dump(list(arrays), names)
            _flush(names)
        _rename(beside, entry)
    except OSError as error:
        size = sum(array.nbytes for array in arrays.values())
        raise OSError(f"cache: expected to write {size} bytes below {entry.parent}, got {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _flush(file: IO[Any]) -> None:
    """To the disk itself, which a rename may reach before the bytes do."""
    file.flush()
    os.fsync(file.fileno())


def _rename(beside: Path, entry: Path) -> None:
    if _load(entry) is None:
        shutil.rmtree(entry, ignore_errors=True)
        try:
            beside.rename(entry)
        except OSError:
            if _load(entry) is None:  # else another process made the same entry meanwhile
                raise


def _remove_abandoned(directory: Path) -> None:
    for partial in directory.glob("*.partial"):
        try:
            abandoned = time.time() - partial.stat().st_mtime > _ABANDONED_SECONDS
        except FileNotFoundError:  # its writer has just renamed it
            continue
        if abandoned:
            shutil.rmtree(partial, ignore_errors=True)
