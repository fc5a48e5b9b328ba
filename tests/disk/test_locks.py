"""The gate inside a process: transactions pass together, a change of the map alone."""

import time

from memstore.disk.lmdb.locks import Gate
from support.counting_source import Aside


def wait_for(gate: Gate, waiting: int) -> None:
    """Until so many threads wait at the gate."""
    while len(gate._changed._waiters) < waiting:  # type: ignore[attr-defined]
        time.sleep(0.001)


def test_a_change_waits_for_the_last_one_out() -> None:
    gate, inside = Gate(), list[int]()

    def change() -> None:
        with gate.alone():
            inside.append(gate._inside)

    gate.enter()
    gate.enter()
    waiting = Aside(change)
    wait_for(gate, 1)
    gate.leave()
    assert waiting.is_waiting() and not inside
    gate.leave()
    waiting.end()
    assert inside == [0]


def test_who_comes_while_the_map_changes_passes_behind_it() -> None:
    gate, changed = Gate(), list[bool]()

    def change() -> None:
        with gate.alone():
            changed.append(True)

    def through() -> None:
        gate.enter()
        gate.leave()

    gate.enter()
    waiting = []
    for number, call in enumerate((change, through, change, through), start=1):
        waiting.append(Aside(call))
        wait_for(gate, number)
    waiters = gate._changed._waiters  # type: ignore[attr-defined]
    with gate._lock:  # of those that the last one out wakes, the first change looks last
        change_waits = waiters.popleft()
        gate.leave()
    wait_for(gate, 3)
    with gate._lock:
        waiters.appendleft(change_waits)
        gate._changed.notify()
    for each in waiting:
        each.end()
    assert changed == [True, True]
