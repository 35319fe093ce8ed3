"""Work spread over threads: all of it is done, once, and failures come out, on torch's threads and on our own."""

import ctypes
import multiprocessing
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numba import njit

from rfsoftmax import threads
from rfsoftmax.vectors import embedded

pytestmark = pytest.mark.filterwarnings("ignore:Cannot cache compiled function")  # those that call `sleep`
PLENTY = 10**9
# Which thread runs a piece, and a pause in which others can take the next.
this_thread, sleep = ctypes.CDLL(None).pthread_self, ctypes.CDLL(None).usleep
this_thread.restype, this_thread.argtypes = ctypes.c_int64, ()
sleep.restype, sleep.argtypes = ctypes.c_int, (ctypes.c_uint32,)


@embedded
def count(done: np.ndarray, step: float, pair: tuple[np.ndarray, bool], start: int, stop: int) -> None:
    for i in range(start, stop):
        done[i] += step
        pair[0][i] = pair[1]


@njit(nogil=True)
def note_thread(seen: np.ndarray, start: int, stop: int) -> None:
    for i in range(start, stop):
        seen[i] = this_thread()
    sleep(20_000)


@embedded
def fail(done: np.ndarray, bad: int, start: int, stop: int) -> None:
    for i in range(start, stop):
        if i == bad:
            raise ValueError("a piece")
        done[i] += 1


@pytest.fixture(params=["team", "pool"])
def two_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "pool":
        monkeypatch.setattr(threads, "_entry", lambda process: 0)
    elif not threads._entry(threads._PROCESS):
        pytest.skip("torch has another OpenMP library")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield request.param
    torch.set_num_threads(before)


def counted(size: int, pieces_each: int = 4, times: int = 1) -> np.ndarray:
    done, marked = np.zeros(size), np.zeros(size, bool)
    for _ in range(times):
        threads.spread(count, (done, 1.0, (marked, True)), size, PLENTY, pieces_each)
    assert marked.all()
    return done


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 1000])
@pytest.mark.parametrize("pieces_each", [1, 4])
def test_all_is_done_once(two_threads: str, size: int, pieces_each: int) -> None:
    assert counted(size, pieces_each).tolist() == size * [1.0]


def test_nothing_to_do_is_done(two_threads: str) -> None:
    assert len(counted(0)) == 0


def test_two_threads_work_at_a_time(two_threads: str) -> None:
    seen = np.zeros(8, np.int64)
    threads.spread(note_thread, (seen,), 8, PLENTY)
    assert len(set(seen.tolist())) == 2


def test_little_work_stays_on_one(two_threads: str) -> None:
    seen = np.zeros(8, np.int64)
    threads.spread(note_thread, (seen,), 8, 1)
    assert seen.tolist() == 8 * [this_thread()]


@pytest.mark.parametrize("bad", [0, 7])
def test_a_failure_comes_out_and_the_other_work_is_done(two_threads: str, bad: int) -> None:
    done = np.zeros(8)
    with pytest.raises(RuntimeError, match="fail: failed"):
        threads.spread(fail, (done, bad), 8, PLENTY)
    assert done.tolist() == [float(i != bad) for i in range(8)]
    threads.spread(fail, (done, -1), 8, PLENTY)
    assert done.sum() == 15


def test_threads_of_a_program_may_all_spread_work(two_threads: str) -> None:
    found: list[np.ndarray] = []
    callers = [threading.Thread(target=lambda: found.append(counted(100, times=20))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [each.tolist() for each in found] == 3 * [100 * [20.0]]


def _in_child(answers: "multiprocessing.Queue[float]") -> None:
    answers.put(float(counted(100).sum()))


def test_a_forked_process_has_threads_of_its_own(two_threads: str) -> None:
    counted(100)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(answers,))
    child.start()
    assert answers.get(timeout=30) == 100
    child.join()
