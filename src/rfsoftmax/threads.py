"""Compiled work on several threads: on torch's own, where they can be had.

Torch's threads wait for their next work by spinning, a few milliseconds long. Threads beside them would meanwhile share
their cores, and a training step changes between torch and us all the time. So the work is given to the team of threads
that torch itself uses, by the entry of its OpenMP library that compilers call; with another library, to a pool.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

# Below this many multiplications waking a second thread costs more than it saves.
_MIN_WORK_PER_THREAD = 1_000_000
# Neither a team nor a pool survives a fork.
_PROCESS = os.getpid()
_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def spread(work: Callable[[int, int], None], size: int, cost: int, pieces_each: int = 4) -> None:
    """work(start, stop) over [0, size), each at the given cost, on as many threads as torch uses and the work is worth.

    The work has to release the GIL. Each thread takes a piece when it is done with the last, so that one whose core is
    busy otherwise does not hold up the rest; `pieces_each` is 1 where a piece has a cost of its own.
    """
    threads = min(torch.get_num_threads(), size, 1 + size * cost // _MIN_WORK_PER_THREAD)
    if threads <= 1:
        work(0, size)
        return
    num = min(size, threads * pieces_each)
    pieces = itertools.pairwise([size * i // num for i in range(num + 1)])

    def work_on() -> None:
        for start, stop in pieces:
            work(start, stop)

    team = _team(os.getpid())
    if team is not None:
        _on_team(team, work_on, threads)
        return
    pool = _pool(os.getpid(), torch.get_num_threads())
    waiting = [pool.submit(work_on) for _ in range(threads - 1)]
    work_on()
    for part in waiting:
        part.result()


def _on_team(team: Any, work_on: Callable[[], None], threads: int) -> None:
    raised: list[BaseException] = []

    def guarded(_: object) -> None:
        try:
            work_on()
        except BaseException as error:  # it cannot pass through the library
            raised.append(error)

    team(_Work(guarded), None, threads, 0)
    if raised:
        raise raised[0]


@functools.lru_cache(maxsize=1)
def _team(process: int) -> Any:
    """GOMP_parallel(work, argument, threads, flags) of the library that torch brings along, None if there is none."""
    root = Path(torch.__file__).parent
    found = [*root.glob("lib/libgomp*"), *root.parent.glob("torch.libs/libgomp*")]
    if process != _PROCESS or not found:
        return None
    team = ctypes.CDLL(str(found[0])).GOMP_parallel
    team.argtypes, team.restype = (_Work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return team


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rfsoftmax")
