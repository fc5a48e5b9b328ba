"""The gate inside a process: transactions pass together, a change of the map alone."""

import time

from memstore.disk.lmdb.locks import Gate
from support.counting_source import Aside


def wait_for(gate: Gate, waiting: int) -> None:
    """Until so many threads wait at the gate."""
    while len(gate._changed._waiters) < waiting:  # type: ignore[attr-defined]
        time.sleep(0.001)


def test_who_comes_while_the_map_changes_passes_behind_it() -> None:
    gate, inside = Gate(), list[int]()

    def change() -> None:
        with gate.alone():
            inside.append(gate._inside)

    def through() -> None:
        gate.enter()
        gate.leave()

    gate.enter()
    gate.enter()
    waiting = []
    for number, call in enumerate((change, through, change, through), start=1):
        waiting.append(Aside(call))
        wait_for(gate, number)
    gate.leave()
    assert waiting[0].is_waiting() and not inside
    gate.leave()
    for each in waiting:
        each.end()
    assert inside == [0, 0] and gate._inside == 0
