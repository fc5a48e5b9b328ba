"""The line of a server's questions: in order, as long as there is time for, and refusals that send
nobody back to the same moment.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from memstore.serve.answering.admission_queue import AdmissionQueue, Task
from memstore.serve.api_errors import Busy


def task(owner: str) -> Task:
    return Task(owner, iter(()), lambda item: None, lambda error: None)


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let so many seconds pass."""
    now = 1000.0

    def later(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(
        "memstore.serve.answering.admission_queue.time", SimpleNamespace(monotonic=lambda: now)
    )
    return later


def paced(line: AdmissionQueue, wait: Callable[[float], None], seconds: float) -> None:
    """Have answers end at this pace while others wait."""
    line.join(task("warmup/0"))
    for _ in range(65):
        wait(seconds)
        line.end()
    line.clear()


def test_two_hundred_that_ask_again_as_soon_as_they_are_answered_are_served_alike(
    wait: Callable[[float], None],
) -> None:
    line = AdmissionQueue(512, 60.0)
    served = dict.fromkeys((f"machine/{number}" for number in range(200)), 0)
    for owner in served:
        line.join(task(owner))
    for _ in range(1000):
        one = line.next(())
        assert one is not None
        wait(0.1)
        line.end()
        served[one.owner] += 1
        line.join(task(one.owner))
    assert set(served.values()) == {5}


@pytest.mark.parametrize("pace", [0.5, 4.0])
def test_there_is_room_for_those_whose_turn_comes_in_time(
    wait: Callable[[float], None], pace: float
) -> None:
    line = AdmissionQueue(512, 20.0)
    paced(line, wait, pace)
    with pytest.raises(Busy):
        for number in range(512):
            line.join(task(f"machine/{number}"))
    assert len(line) == 20 / pace + 1
    line.join(task("other/0"), at_once=True)
    wait(100.0)
    assert len(line.late()) == 20 / pace + 2


def test_those_who_are_refused_are_told_times_of_their_own(wait: Callable[[float], None]) -> None:
    line = AdmissionQueue(2, 60.0)
    paced(line, wait, 2.0)
    line.join(task("machine/0"))
    line.join(task("other/0"))

    def told(owner: str) -> int:
        with pytest.raises(Busy) as refused:
            line.join(task(owner))
        return refused.value.retry_after

    assert [told(f"machine/{number}") for number in range(3)] == [2, 4, 6]  # one place each
    assert told("other/1") == 2  # what one group is told is no other's matter
    wait(5.0)
    assert told("machine/4") == 3  # two of the three have had theirs
    assert max(told(f"machine/{number}") for number in range(100)) == 60  # what clients heed


def test_who_has_waited_twice_as_long_as_anybody_should_is_let_go(
    wait: Callable[[float], None],
) -> None:
    line = AdmissionQueue(512, 10.0)
    early = task("a/1")
    line.join(early)
    wait(15.0)
    later = task("a/2")
    line.join(later)
    assert line.late() == []
    wait(6.0)
    assert line.late() == [early]
    assert line.next(()) is later
