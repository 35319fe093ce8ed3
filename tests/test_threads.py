"""Work spread over threads: all of it is done, once, and errors come out, on torch's threads and on our own."""

import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from rfsoftmax import threads

PLENTY = 10**9


@pytest.fixture(params=["team", "pool"])
def two_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "pool":
        monkeypatch.setattr(threads, "_team", lambda process: None)
    elif threads._team(threads._PROCESS) is None:
        pytest.skip("torch has another OpenMP library")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 1000])
@pytest.mark.parametrize("pieces_each", [1, 4])
def test_all_is_done_once(two_threads: str, size: int, pieces_each: int) -> None:
    done: list[int] = []
    threads.spread(lambda start, stop: done.extend(range(start, stop)), size, PLENTY, pieces_each)
    assert sorted(done) == list(range(size))


def test_two_threads_work_at_a_time(two_threads: str) -> None:
    seen, meeting = set(), threading.Barrier(2, timeout=20)

    def work(start: int, stop: int) -> None:
        meeting.wait()  # lasts until both are here
        seen.add(threading.get_ident())

    threads.spread(work, 2, PLENTY, 1)
    assert len(seen) == 2


def test_little_work_stays_on_one(two_threads: str) -> None:
    seen: list[tuple[int, int, int]] = []
    threads.spread(lambda start, stop: seen.append((start, stop, threading.get_ident())), 10, 1)
    assert seen == [(0, 10, threading.get_ident())]


@pytest.mark.parametrize("bad", [0, 7])
def test_an_error_comes_out_and_the_next_work_is_done(two_threads: str, bad: int) -> None:
    def work(start: int, stop: int) -> None:
        time.sleep(0.01)  # for both threads to get some
        if start == bad:
            raise ValueError("piece")

    with pytest.raises(ValueError, match="piece"):
        threads.spread(work, 8, PLENTY)
    test_all_is_done_once(two_threads, 100, 4)


def test_threads_of_a_program_may_all_spread_work(two_threads: str) -> None:
    done: list[int] = []

    def spread_some() -> None:
        for _ in range(20):
            threads.spread(lambda start, stop: done.extend(range(start, stop)), 100, PLENTY)

    callers = [threading.Thread(target=spread_some) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(done) == sorted(60 * list(range(100)))


def _in_child(answers: "multiprocessing.Queue[int]") -> None:
    done: list[int] = []
    threads.spread(lambda start, stop: done.extend(range(start, stop)), 100, PLENTY)
    answers.put(len(done))


def test_a_forked_process_has_threads_of_its_own(two_threads: str) -> None:
    test_all_is_done_once(two_threads, 100, 4)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(answers,))
    child.start()
    assert answers.get(timeout=30) == 100
    child.join()
