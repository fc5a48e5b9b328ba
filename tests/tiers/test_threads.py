"""Threads that share a batch: each part is done once, the first error is the one that is raised,
and nothing is under way when the call returns, in whatever way it does.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from memstore.disk.read.work_sharing import Threads, _Batch

HERE = threading.main_thread()


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads(3)
    yield made
    made.close()


def test_parts_are_done_once_each_by_several_threads_at_the_same_time(threads):
    together, done = threading.Barrier(3), []

    def work(part: int) -> None:
        if part < 3:
            together.wait(60)  # nobody passes alone
        done.append(part)

    threads.share(range(50), work, 3)
    assert sorted(done) == list(range(50))


def test_the_error_of_the_first_part_is_raised_however_late_it_comes(threads):
    second_failed, taken = threading.Event(), []

    def work(part: int) -> None:
        taken.append(part)
        if part == 0:
            assert second_failed.wait(60)
            time.sleep(0.01)
            raise ValueError("the first")
        second_failed.set()
        raise ValueError("another")

    with pytest.raises(ValueError, match="the first"):
        threads.share(range(1000), work, 3)
    assert len(taken) <= 3  # what came after an error was not begun
    threads.share(range(10), taken.append, 3)  # and they go on


def test_parts_that_cannot_be_had_are_an_error_as_work_is(threads):
    def parts() -> Iterator[int]:
        yield 0
        raise LookupError("no second part")

    with pytest.raises(LookupError, match="no second part"):
        threads.share(parts(), lambda part: time.sleep(0.01), 3)


def test_an_interrupt_at_work_leaves_when_the_others_have_ended(threads, monkeypatch):
    begun, batches, ended = threading.Event(), list[_Batch](), []
    end = _Batch.end

    def leave(batch: _Batch) -> None:
        batches.append(batch)
        end(batch)

    def work(part: int) -> None:
        if threading.current_thread() is HERE:
            assert begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        while not (batches and batches[0]._ended):  # until the interrupt leaves
            time.sleep(0.001)
        time.sleep(0.05)
        ended.append(part)

    monkeypatch.setattr(_Batch, "end", leave)
    with pytest.raises(KeyboardInterrupt):
        threads.share(range(1000), work, 2)
    assert len(ended) == 1


def test_interrupts_while_it_waits_for_the_others_do_not_cut_that_short(threads):
    begun, waits, last, ended = *(threading.Event() for _ in range(3)), []

    def interrupt() -> None:
        assert waits.wait(60)
        for _ in range(3):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        last.set()

    def work(part: int) -> None:
        if threading.current_thread() is HERE:
            assert begun.wait(60)  # then there is no part left
            waits.set()
            return
        begun.set()
        assert last.wait(60)
        ended.append(part)

    interrupting = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupting.start()
            threads.share(range(2), work, 2)
    finally:
        interrupting.join()
        signal.signal(signal.SIGINT, before)
    assert len(ended) == 1


def test_after_a_batch_that_nobody_came_to_help_with_some_are_done_alone(threads, monkeypatch):
    monkeypatch.setattr("memstore.disk.read.work_sharing._ALONE", 2)
    with monkeypatch.context() as busy:
        busy.setattr("memstore.disk.read.work_sharing._Batch.help", lambda batch: None)
        threads.share(range(3), lambda part: None, 3)
    by: list[threading.Thread] = []

    def note(part: int) -> None:
        time.sleep(0.02)  # somebody could come
        by.append(threading.current_thread())

    for _ in range(2):
        threads.share(range(3), note, 3)
    assert by == 6 * [HERE]
    together = threading.Barrier(3)
    threads.share(range(3), lambda part: together.wait(60) and None, 3)


def test_without_more_threads_the_caller_does_it_alone(threads, monkeypatch):
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done: list[int] = []
    threads.share(range(20), done.append, 3)
    assert done == list(range(20))


def test_closing_ends_the_threads_and_what_comes_after_is_done_alone(threads):
    others, by = set(threading.enumerate()), set()
    together = threading.Barrier(2)
    threads.share(range(2), lambda part: together.wait(60) and None, 2)
    assert set(threading.enumerate()) - others
    threads.close()
    threads.close()
    assert set(threading.enumerate()) <= others
    threads.share(range(20), lambda part: by.add(threading.current_thread()), 3)
    assert by == {threading.current_thread()}
