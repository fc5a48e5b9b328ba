"""Threads that share a batch: each part is done once, the first error is the one that is raised,
and nothing is under way when the call returns, in whatever way it does.
"""

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
