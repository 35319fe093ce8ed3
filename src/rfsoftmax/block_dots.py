"""Dot products of one vector with many rows, by vector instructions that are written out.

A compiler sums each product up by itself, which takes longer than its multiplications. Here those of several rows are
added up together: vectors of partial sums are folded by pairs until one vector holds a sum for each row. Rows in bytes
are multiplied as whole numbers, exactly, by instructions that take two at a time where a processor has them.
"""

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vectors import dot, lean

# 32-bit numbers of a vector, and so the rows whose products are summed together: as many as registers have room for.
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
# Numbers of a row that are taken at once.
_CHUNK = 2 * LANES


@lean
def dots(x: np.ndarray, rows: np.ndarray, start: int, size: int, out: np.ndarray) -> None:
    """out[k] = x . rows[start + k], x int16 for int8 rows."""
    whole, dim = size // LANES * LANES, x.shape[0]
    for k in range(0, whole, LANES):
        _dots_together(x, rows, start + k, out, k)
        rest = dim // _CHUNK * _CHUNK
        if rest < dim:
            for i in range(k, k + LANES):
                out[i] += dot(x[rest:], rows[start + i, rest:])
    for k in range(whole, size):
        out[k] = dot(x, rows[start + k])


@intrinsic
def _dots_together(context: Any, x: Any, rows: Any, first: Any, out: Any, place: Any) -> Any:
    """out[place + k] = x . rows[first + k] for LANES rows, over as many whole chunks as they have."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip((x, rows, out), (arguments[0], arguments[1], arguments[3]), strict=True)
        ]
        dim = cgutils.unpack_tuple(builder, arrays[0].shape, 1)[0]
        row = builder.gep(arrays[1].data, [builder.mul(arguments[2], dim)])
        target = builder.gep(arrays[2].data, [arguments[4]])
        # Of 64-bit floats half as many fit in a vector.
        lanes = LANES // 2 if x.dtype == types.float64 else LANES
        for part in range(0, LANES, lanes):
            starts = [builder.gep(row, [builder.mul(ir.Constant(dim.type, part + k), dim)]) for k in range(lanes)]
            sums = _folded(builder, _partial_sums(builder, arrays[0].data, starts, dim, lanes))
            _store(builder, sums, builder.gep(target, [ir.Constant(dim.type, part)]))
        return context.get_dummy_value()

    return types.void(x, rows, types.int64, out, types.int64), make


def _partial_sums(builder: Any, x: Any, rows: list[Any], dim: Any, lanes: int) -> list[Any]:
    """For each of rows a vector that sums up to x . row, over whole chunks."""
    of_bytes = isinstance(x.type.pointee, ir.IntType)
    element = ir.IntType(32) if of_bytes else x.type.pointee
    width = 2 * lanes if of_bytes else lanes
    none = ir.Constant(ir.VectorType(element, lanes), [ir.Constant(element, 0)] * lanes)
    before, loop, done = builder.block, builder.append_basic_block("chunk"), builder.append_basic_block("chunks_done")
    stop = builder.and_(dim, ir.Constant(dim.type, -_CHUNK))
    builder.cbranch(builder.icmp_signed("<", ir.Constant(dim.type, 0), stop), loop, done)
    builder.position_at_end(loop)
    j = builder.phi(dim.type)
    totals = [builder.phi(none.type) for _ in rows]
    values = _wide(builder, x, j, width)
    sums = [
        _added(builder, total, values, _wide(builder, row, j, width), lanes)
        for total, row in zip(totals, rows, strict=True)
    ]
    following = builder.add(j, ir.Constant(dim.type, width))
    builder.cbranch(builder.icmp_signed("<", following, stop), loop, done)
    for phi, start, end in [
        (j, ir.Constant(dim.type, 0), following),
        *((t, none, s) for t, s in zip(totals, sums, strict=True)),
    ]:
        phi.add_incoming(start, before)
        phi.add_incoming(end, loop)
    builder.position_at_end(done)
    found = [builder.phi(none.type) for _ in rows]
    for phi, end in zip(found, sums, strict=True):
        phi.add_incoming(none, before)
        phi.add_incoming(end, loop)
    return found


def _wide(builder: Any, row: Any, j: Any, width: int) -> Any:
    """Numbers j to j + width of a row, whole ones in 32 bits."""
    kind = ir.VectorType(row.type.pointee, width)
    place = builder.bitcast(builder.gep(row, [j]), kind.as_pointer())
    size = row.type.pointee.width // 8 if isinstance(row.type.pointee, ir.IntType) else 4
    loaded = builder.load(place, align=size)
    whole = isinstance(row.type.pointee, ir.IntType)
    return builder.sext(loaded, ir.VectorType(ir.IntType(32), width)) if whole else loaded


def _added(builder: Any, total: Any, x: Any, row: Any, lanes: int) -> Any:
    """total plus the products of x and row: of floats one a lane, of whole numbers two."""
    flags = ("reassoc", "contract", "nsz")
    if not isinstance(total.type.element, ir.IntType):
        return builder.fadd(total, builder.fmul(x, row, flags=flags), flags=flags)
    products = builder.mul(x, row)
    nothing = ir.Constant(products.type, ir.Undefined)
    even, odd = (_picked(builder, products, nothing, range(first, 2 * lanes, 2)) for first in (0, 1))
    return builder.add(total, builder.add(even, odd))


def _folded(builder: Any, vectors: list[Any]) -> Any:
    """One vector whose lane k is the sum of vector k, for as many vectors as they have lanes."""
    lanes = width = len(vectors)
    while width > 1:
        # Of two vectors whose groups of `width` lanes are to be summed up, each group's halves are added.
        width //= 2
        groups = range(0, lanes, 2 * width)
        low = [i + k for g in groups for i in (g, lanes + g) for k in range(width)]
        high = [i + width for i in low]
        half = len(vectors) // 2
        vectors = [
            _sum(builder, *(_picked(builder, vectors[i], vectors[i + half], lane) for lane in (low, high)))
            for i in range(half)
        ]
    return vectors[0]


def _sum(builder: Any, x: Any, y: Any) -> Any:
    return builder.add(x, y) if isinstance(x.type.element, ir.IntType) else builder.fadd(x, y)


def _picked(builder: Any, x: Any, y: Any, lanes: Any) -> Any:
    chosen = list(lanes)
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(chosen)), chosen))


def _store(builder: Any, sums: Any, target: Any) -> None:
    element = target.type.pointee
    kind = ir.VectorType(element, sums.type.count)
    if isinstance(sums.type.element, ir.IntType):
        sums = builder.sitofp(sums, kind)
    builder.store(sums, builder.bitcast(target, kind.as_pointer()), align=4)
