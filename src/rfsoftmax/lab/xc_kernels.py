"""The parser of `xc.py`, compiled by numba: one pass over the bytes, which knows where it stands when it fails."""

import functools

import numpy as np
from numba import njit
from numpy.typing import NDArray

_compile = functools.partial(njit, cache=True, nogil=True)

# What the parser missed, in the words of the error message.
EXPECTED = (
    "",
    "a label id from 0 to {last_label}",
    "a comma or a space after the label id (a row without labels begins with a space)",
    "a feature id from 0 to {last_feature}",
    "a colon after the feature id",
    "a finite 32-bit number after the colon",
)
OK, _LABEL, _LABEL_END, _FEATURE, _COLON, _VALUE = range(len(EXPECTED))
_NEWLINE, _SPACE, _TAB, _RETURN, _COMMA, _COLON_SIGN, _POINT, _PLUS, _MINUS = b"\n \t\r,:.+-"
_ZERO, _NINE, _SMALL_E, _LARGE_E = b"09eE"
# Ids and exponents stop growing here, before they can overflow.
_LARGEST = 1 << 40
# What is smaller rounds to a finite float32: half a step above the largest of them.
_FLOAT32_OVERFLOW = float(np.finfo(np.float32).max) + 2.0**103


@_compile
def parse(
    text: NDArray[np.uint8],
    at: int,
    num_features: int,
    num_labels: int,
    label_ends: NDArray[np.int64],
    label_ids: NDArray[np.int32],
    feature_ends: NDArray[np.int64],
    feature_ids: NDArray[np.int32],
    values: NDArray[np.float32],
) -> tuple[int, int]:
    """Reads the rows from a position on; returns what was missed and where, or `OK` and the end of the last row.

    The text ends with a newline and holds that many rows, so no look ahead leaves it.
    """
    num_read_labels, num_read = 0, 0
    for row in range(len(label_ends) - 1):
        more = not _ends_field(text[at])
        while more:
            label, end = _whole(text, at)
            if end == at or label >= num_labels:
                return _LABEL, at
            label_ids[num_read_labels] = label
            num_read_labels += 1
            more = text[end] == _COMMA
            if not more and not _ends_field(text[end]):
                return _LABEL_END, at
            at = end + more
        label_ends[row + 1] = num_read_labels
        while text[at] != _NEWLINE:
            if _ends_field(text[at]):
                at += 1
                continue
            feature, end = _whole(text, at)
            if end == at or feature >= num_features:
                return _FEATURE, at
            if text[end] != _COLON_SIGN:
                return _COLON, at
            at = end + 1
            value, end = _decimal(text, at)
            if end == at or not _ends_field(text[end]) or not abs(value) < _FLOAT32_OVERFLOW:
                return _VALUE, at
            feature_ids[num_read], values[num_read] = feature, value
            num_read += 1
            at = end
        feature_ends[row + 1] = num_read
        at += 1
    return OK, at


@_compile
def _whole(text: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """The whole number at a position and where it ends: there, if there is none."""
    number = 0
    while _ZERO <= text[at] <= _NINE:
        number = min(number * 10 + (text[at] - _ZERO), _LARGEST)
        at += 1
    return number, at


@_compile
def _decimal(text: NDArray[np.uint8], at: int) -> tuple[float, int]:
    """The number -1.5e-3 at a position and where it ends: there, if there is none.

    Up to 18 digits make one integer, which a power of ten then scales: off by rounding in float64 alone.
    """
    start = at
    negative = text[at] == _MINUS
    if negative or text[at] == _PLUS:
        at += 1
    digits, exponent, num_digits, after_point = 0, 0, 0, False
    while _ZERO <= text[at] <= _NINE or (text[at] == _POINT and not after_point):
        if text[at] == _POINT:
            after_point = True
        else:
            num_digits += 1
            if digits < 10**17:
                digits = digits * 10 + (text[at] - _ZERO)
                exponent -= after_point
            else:
                exponent += not after_point
        at += 1
    if num_digits == 0:
        return 0.0, start
    if text[at] == _SMALL_E or text[at] == _LARGE_E:
        sign = -1 if text[at + 1] == _MINUS else 1
        first = at + 2 if text[at + 1] == _MINUS or text[at + 1] == _PLUS else at + 1
        power, at = _whole(text, first)
        if at == first:
            return 0.0, start
        exponent += sign * power
    magnitude = float(digits)
    if digits > 0:
        magnitude = magnitude * 10.0**exponent if exponent > 0 else magnitude / 10.0**-exponent
    return (-magnitude if negative else magnitude), at


@_compile
def _ends_field(byte: int) -> bool:
    return byte in (_SPACE, _NEWLINE, _TAB, _RETURN)
