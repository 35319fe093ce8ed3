"""Files as they come: plain, `.gz` or `.xz`, with errors that name the file and the line."""

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
COMPRESSED = tuple(_OPENERS)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of `path`; a damaged archive is told from a damaged text."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path}: expected a whole {path.suffix} file, got a damaged one ({error})") from error


def lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text, their ends kept; only a newline ends a line."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                got = f"byte 0x{line[error.start]:02x} in column {error.start + 1}"
                raise ValueError(f"{path}:{number}: expected UTF-8 text, got {got}") from error
