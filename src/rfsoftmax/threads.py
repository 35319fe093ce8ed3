"""Compiled work on several threads: on torch's own, where they can be had.

Torch's threads wait for their next work by spinning, a few milliseconds long. Threads beside them would meanwhile share
their cores, and a training step changes between torch and us all the time. So the work is given to the team of threads
that torch itself uses, by the entry of its OpenMP library that compilers call; with another library, to a pool. What a
thread of the team runs is compiled throughout: Python's lock, were it needed, would cost more than a small work.
"""

import ctypes
import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from .vectors import compiled

# Below this many multiplications a second thread costs more than it saves: it may have to be woken.
_MIN_WORK_PER_THREAD = 200_000
# Neither a team nor a pool survives a fork.
_PROCESS = os.getpid()

_Team = tuple[int, int, int, int, int]  # the entry of the library, threads, pieces, and the range they are of
_BYTES, _INT, _LONG = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
_WORK = ir.FunctionType(ir.VoidType(), [_BYTES])
# What the threads of a team share.
_JOB = ("arguments", "pieces", "first", "last", "next", "failed")


def spread(kernel: Any, arguments: tuple[Any, ...], size: int, cost: int, pieces_each: int = 4) -> None:
    """kernel(*arguments, start, stop) over [0, size), each at the given cost, on as many threads as torch uses and the
    work is worth.

    Each thread takes a piece when it is done with the last, so that one whose core is busy otherwise does not hold up
    the rest; `pieces_each` is 1 where a piece has a cost of its own. The kernel is to be an `embedded` one, and not to
    raise: which error it was is lost.
    """
    run = _runner(kernel)
    threads = min(torch.get_num_threads(), size, 1 + size * cost // _MIN_WORK_PER_THREAD)
    pieces, entry = min(size, threads * pieces_each), _entry(os.getpid())
    if threads <= 1:
        failed = run((0, 1, 1, 0, size), *arguments)
    elif entry:
        failed = run((entry, threads, pieces, 0, size), *arguments)
    else:
        ranges = itertools.pairwise([size * i // pieces for i in range(pieces + 1)])
        works = _pool(os.getpid(), torch.get_num_threads()).map(lambda part: run((0, 1, 1, *part), *arguments), ranges)
        failed = any(list(works))
    if failed:
        raise RuntimeError(f"{kernel.__name__}: failed, most likely for want of memory")


@functools.lru_cache(maxsize=1)
def _entry(process: int) -> int:
    """The address of GOMP_parallel(work, argument, threads, flags) in the library that torch brings along, 0 if it has
    none."""
    root = Path(torch.__file__).parent
    found = [*root.glob("lib/libgomp*"), *root.parent.glob("torch.libs/libgomp*")]
    if process != _PROCESS or not found:
        return 0
    return ctypes.cast(ctypes.CDLL(str(found[0])).GOMP_parallel, ctypes.c_void_p).value or 0


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rfsoftmax")


@functools.cache
def _runner(kernel: Any) -> Any:
    """A compiled function of (team, *arguments) that has the kernel work on all pieces, and says whether it failed.

    It is `_run` with `_on_team` for this kernel, under a name of its own in the kernel's file: numba caches functions
    by file and name, and none that another function returns.
    """
    source = kernel.py_func
    name = f"{source.__name__}_pieces"
    code = _run.__code__.replace(
        co_filename=source.__code__.co_filename,
        co_firstlineno=source.__code__.co_firstlineno,
        co_name=name,
        co_qualname=name,
    )
    run = FunctionType(code, {"_on_team": _on_team_for(kernel), "__name__": source.__module__}, name)
    run.__module__ = source.__module__
    return compiled(run)


def _run(team: _Team, *arguments: Any) -> bool:
    return _on_team(arguments, *team)  # type: ignore[name-defined]  # noqa: F821


def _on_team_for(kernel: Any) -> Any:
    """A function for compiled code, of (arguments, *team): kernel(*arguments, start, stop) for all pieces, by threads
    that each take the next; whether any call failed."""
    of_kernel = typeof(kernel)

    @intrinsic
    def on_team(typing: Any, arguments: Any, entry: Any, threads: Any, pieces: Any, first: Any, last: Any) -> Any:
        call = of_kernel.get_call_type(typing, (*arguments.types, types.int64, types.int64), {})

        def make(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            given, address, team, *extent = values
            given = _uncounted(context, builder, arguments, given)
            job_type = ir.LiteralStructType([given.type, *[_LONG] * len(_JOB[1:])])
            job = cgutils.alloca_once(builder, job_type)
            for name, value in zip(_JOB, (given, *extent, _LONG(0), _LONG(0)), strict=True):
                builder.store(value, _field(builder, job, name))
            shared = builder.bitcast(job, _BYTES)
            work = _work(context, builder.module, job_type, kernel.overloads[tuple(call.args)], call)
            with builder.if_else(builder.icmp_signed("==", address, _LONG(0))) as (alone, together):
                with alone:
                    builder.call(work, [shared])
                with together:
                    parallel = ir.FunctionType(ir.VoidType(), [_WORK.as_pointer(), _BYTES, _INT, _INT])
                    library = builder.inttoptr(address, parallel.as_pointer())
                    builder.call(library, [work, shared, builder.trunc(team, _INT), _INT(0)])
            return builder.icmp_signed("!=", builder.load(_field(builder, job, "failed")), _LONG(0))

        return types.boolean(arguments, *[types.int64] * 5), make

    return on_team


def _uncounted(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The same arrays without their counts of references, which all threads would change; the caller holds them."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for i, part in enumerate(kind.types):
            new = _uncounted(context, builder, part, builder.extract_value(value, i))
            value = builder.insert_value(value, new, i)
    return value


def _work(context: Any, module: Any, job_type: Any, kernel: Any, call: Any) -> Any:
    """What each thread of a team runs, a function of a pointer to the job: the kernel on piece after piece."""
    context.active_code_library.add_linking_library(kernel.library)
    work = ir.Function(module, _WORK, module.get_unique_name("work"))
    work.linkage = "internal"
    builder = ir.IRBuilder(work.append_basic_block())
    take, do, end = (work.append_basic_block() for _ in range(3))
    job = builder.bitcast(work.args[0], job_type.as_pointer())
    given, pieces, first, last = (builder.load(_field(builder, job, name)) for name in _JOB[:4])
    builder.branch(take)
    builder.position_at_end(take)
    piece = builder.atomic_rmw("add", _field(builder, job, "next"), _LONG(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", piece, pieces), do, end)
    builder.position_at_end(do)
    size, following = builder.sub(last, first), builder.add(piece, _LONG(1))
    edges = [builder.add(first, builder.sdiv(builder.mul(size, k), pieces)) for k in (piece, following)]
    arguments = [builder.extract_value(given, i) for i in range(len(call.args) - len(edges))]
    status, _ = context.call_internal_no_propagate(builder, kernel.fndesc, call, [*arguments, *edges])
    with cgutils.if_unlikely(builder, status.is_error):
        builder.store(_LONG(1), _field(builder, job, "failed"))
    builder.branch(take)
    builder.position_at_end(end)
    builder.ret_void()
    return work


def _field(builder: Any, job: Any, name: str) -> Any:
    return builder.gep(job, [_INT(0), _INT(_JOB.index(name))], inbounds=True)
