"""What kernels are made of: how numba compiles them, dot products, prefetches, and exp, cos and sin by series.

numba does not see changes in another file: after one to what kernels elsewhere call, delete its cache, the files
`__pycache__/*.nb*`.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Reassociation lets dot products use vector instructions; the flags that assume no NaN and no inf stay off.
compiled = functools.partial(njit, cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
inlined = functools.partial(compiled, inline="always")
# For what other kernels call: each has its own copy. Else a process takes the copy that it loaded first, compiled for
# another caller and rounding differently, and results depend on what ran before.
embedded = functools.partial(compiled, forceinline=True)
# For what makes no arrays: without it numba counts the references to every row that is taken of an array, by calls that
# empty the vector registers, and, for arrays made in compiled code, by locked instructions, which memory waits for.
lean = functools.partial(embedded, _nrt=False)
# Rows on their way to the cache ahead of the one in use.
AHEAD = 16
# pi/2 in three parts: whole multiples of the first two, up to 2^14, are exact in float32.
_QUARTERS = (1.5703125, 4.8375129699707031e-4, 7.549789954891882e-8)


@intrinsic
def number(context: Any, x: Any) -> Any:
    """A float as it is; an int8 or int16 as a float32."""

    def widen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sitofp(arguments[0], ir.FloatType())

    def keep(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0]

    return (types.float32(x), widen) if x in (types.int8, types.int16) else (x(x), keep)


def _fetching(locality: int) -> Any:
    """A function for kernels, of an address, that has its line on the way; `locality` as LLVM has it, 0 to 3."""

    @intrinsic
    def fetch(context: Any, address: Any) -> Any:
        def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
            prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            line = builder.inttoptr(arguments[0], pointer)
            builder.call(prefetch, [line, *(ir.Constant(flag, value) for value in (0, locality, 1))])
            return context.get_dummy_value()

        return types.void(types.uintp), make

    return fetch


_fetch, _fetch_once = _fetching(3), _fetching(0)


@lean
def _prefetch_line(address: int, once: bool) -> None:
    if once:
        _fetch_once(np.uintp(address))
    else:
        _fetch(np.uintp(address))


@lean
def _prefetch_bytes(address: int, size: int, once: bool) -> None:
    """Have so many bytes on their way, by tests in place of a loop: one beside each row would cost as much as a row."""
    lines = (size + 63) >> 6
    if lines & 1:
        _prefetch_line(address, once)
        address += 64
    if lines & 2:
        for k in range(2):
            _prefetch_line(address + 64 * k, once)
        address += 128
    if lines & 4:
        for k in range(4):
            _prefetch_line(address + 64 * k, once)
        address += 256
    if lines & 8:
        for k in range(8):
            _prefetch_line(address + 64 * k, once)
        address += 512
    for _ in range(lines >> 4):
        for k in range(16):
            _prefetch_line(address + 64 * k, once)
        address += 1024


@lean
def prefetch(array: np.ndarray, first: int, last: int) -> None:
    """Have rows first..last of a matrix on their way to the cache."""
    size = array.itemsize * array.shape[1]
    _prefetch_bytes(array.ctypes.data + first * size, (last - first) * size, False)


@lean
def prefetch_once(array: np.ndarray, first: int, last: int) -> None:
    """The same of rows that are soon read and not again: they drive nothing out of the larger caches."""
    size = array.itemsize * array.shape[1]
    _prefetch_bytes(array.ctypes.data + first * size, (last - first) * size, True)


@lean
def prefetch_number(array: np.ndarray, i: int) -> None:
    _prefetch_line(array.ctypes.data + array.itemsize * i, False)


@lean
def prefetch_columns(array: np.ndarray, row: int, start: int, stop: int) -> None:
    """Have columns start..stop of a row on their way to the cache."""
    first = array.ctypes.data + (row * array.shape[1] + start) * array.itemsize
    _prefetch_bytes(first, (stop - start) * array.itemsize, False)


@lean
def dot(x: np.ndarray, y: np.ndarray) -> float:
    # A zero of their own type, so that the loop keeps all its elements and whole vectors.
    total = number(x[0]) - number(x[0])
    for i in range(x.shape[0]):
        total += number(x[i]) * number(y[i])
    return total


@lean
def dot_and_square(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """x . y and y . y, in one pass."""
    total = x[0] - x[0]
    square = total
    for i in range(x.shape[0]):
        total += x[i] * y[i]
        square += y[i] * y[i]
    return total, square


@intrinsic
def _two_to(context: Any, power: Any) -> Any:
    """2 to the power of a whole number, of the same float type; it must not under- or overflow."""
    bits, kind, excess, mantissa = (32, ir.FloatType(), 127, 23)
    if power == types.float64:
        bits, kind, excess, mantissa = (64, ir.DoubleType(), 1023, 52)

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = builder.fptosi(arguments[0], ir.IntType(bits))
        exponent = builder.add(whole, ir.Constant(ir.IntType(bits), excess))
        return builder.bitcast(builder.shl(exponent, ir.Constant(ir.IntType(bits), mantissa)), kind)

    return power(power), make


def _series(ratios: tuple[float, ...], single: int) -> Any:
    """A function of x for kernels, 1 + r_1 x (1 + r_2 x (1 + ...)); `ratios` from the last down, of which float32 takes
    the `single` lowest. Its steps stand in the code one by one: a loop over them would keep the loop around it, over
    the numbers x, from using vector instructions."""

    @intrinsic
    def sum_of(context: Any, x: Any) -> Any:
        taken = ratios[-single:] if x == types.float32 else ratios

        def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            flags, (number,) = ("reassoc", "contract", "nsz"), arguments
            one = total = ir.Constant(number.type, 1.0)
            for ratio in taken:
                term = builder.fmul(
                    builder.fmul(total, number, flags=flags), ir.Constant(number.type, ratio), flags=flags
                )
                total = builder.fadd(one, term, flags=flags)
            return total

        return x(x), make

    return sum_of


_exp_series = _series(tuple(1 / k for k in range(13, 0, -1)), 7)
# Of x^2: sin(x)/x and cos(x).
_sine_series = _series(tuple(-1 / (2 * k * (2 * k + 1)) for k in range(9, 0, -1)), 6)
_cosine_series = _series(tuple(-1 / (2 * k * (2 * k - 1)) for k in range(9, 0, -1)), 6)


@njit(cache=True, nogil=True, fastmath={"contract"}, forceinline=True)
def less(x: float, times: float, high: float, low: float) -> float:
    """x - times (high + low), where times x high is exact: not to be reassociated, which would round the sum."""
    return x - times * high - times * low


@intrinsic
def _greater(context: Any, x: Any, y: Any) -> Any:
    """The greater of two floats of one type that are not NaN: loops without heed of NaN use vector instructions."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        maxnum = builder.module.declare_intrinsic("llvm.maxnum", [kind], ir.FunctionType(kind, [kind, kind]))
        return builder.call(maxnum, arguments, fastmath=("nnan", "nsz"))

    return x(x, x), make


@lean
def greatest(x: np.ndarray, size: int) -> float:
    found = x[0]
    for i in range(size):
        found = _greater(found, x[i])
    return found


@lean
def exp(x: np.ndarray, largest: float, out: np.ndarray, size: int) -> None:
    """exp(x - largest) for x <= largest, exact to out's type and vectorised: 2^k times a series; at least 1e-37."""
    kind = out.dtype.type
    most, least = kind(largest), kind(-85.0)
    per_log, high, low = kind(1.4426950408889634), kind(0.693359375), kind(-2.1219444005469057e-4)
    for i in range(size):
        y = max(x[i] - most, least)
        whole = np.rint(y * per_log)
        out[i] = _exp_series(less(y, whole, high, low)) * _two_to(whole)


@lean
def cos_sin(angles: np.ndarray, cosines: np.ndarray, sines: np.ndarray, scale: float) -> None:
    """scale x cos and sin of angles, exact to their own type and vectorised: series about multiples of pi/2."""
    kind = cosines.dtype.type
    per_turn = kind(2 / np.pi)
    high, middle, low = kind(_QUARTERS[0]), kind(_QUARTERS[1]), kind(_QUARTERS[2])
    for i in range(angles.shape[0]):
        angle = kind(angles[i])
        turns = np.rint(angle * per_turn)
        x = less(less(angle, turns, high, middle), turns, low, kind(0.0))
        s, c = x * _sine_series(x * x), _cosine_series(x * x)
        quarter = np.int32(turns) & 3
        odd = (quarter & 1) == 1
        cosine, sine = (s, c) if odd else (c, s)
        cosines[i] = (-cosine if quarter == 1 or quarter == 2 else cosine) * kind(scale)
        sines[i] = (-sine if quarter >= 2 else sine) * kind(scale)
