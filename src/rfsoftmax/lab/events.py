"""TensorBoard events, written without TensorBoard: the numbers of a run as scalars, a file of records.

A record is the length of the data (8 bytes), its checksum (4), the data and its checksum. The data is a protocol
buffer `Event`: wall_time (field 1, double), step (2, varint), file_version (3, string) and summary (5), which holds
values (1) of a tag (1, string) and a simple_value (2, float).
"""

import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Self, final

_CRC32C = 0x82F63B78


@final
class EventWriter:
    """Appends scalars to a new event file at `path`; TensorBoard finds files with `tfevents` in their name."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("wb")
        self._write(_event(time.time(), 0, _bytes(3, b"brain.Event:2")))

    def add(self, step: int, scalars: Mapping[str, float], wall_time: float | None = None) -> None:
        values = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in scalars.items())
        self._write(_event(time.time() if wall_time is None else wall_time, step, _bytes(5, values)))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_checksum(length) + data + _masked_checksum(data))
        self._file.flush()


def _event(wall_time: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + what


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def _table() -> list[int]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_CRC32C if entry & 1 else 0)
        entries.append(entry)
    return entries


_TABLE = _table()


def _masked_checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted, lest checksums of data with checksums in it be regular."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
