"""Threads that share a batch: each part is done once, an error ends it, and nothing is at work when
the call returns.
"""

import threading
import time
from collections.abc import Iterator

import pytest

from memstore.disk.read.work_sharing import Threads


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


def test_no_part_is_begun_after_an_error(threads):
    taken = []

    def work(part: int) -> None:
        taken.append(part)
        raise ValueError("a part")

    with pytest.raises(ValueError, match="a part"):
        threads.share(range(1000), work, 3)
    assert len(taken) <= 3
    done = []
    threads.share(range(10), done.append, 3)  # and they go on
    assert sorted(done) == list(range(10))


def test_parts_that_cannot_be_had_are_an_error_as_work_is(threads):
    def parts() -> Iterator[int]:
        yield 0
        raise LookupError("no second part")

    with pytest.raises(LookupError, match="no second part"):
        threads.share(parts(), lambda part: time.sleep(0.01), 3)
