"""The gate inside a process: transactions pass together, a change of the map alone."""

from memstore.disk.lmdb.locks import Gate
from support.counting_source import Aside


def test_a_change_waits_for_the_last_one_out() -> None:
    gate, done = Gate(), list[str]()

    def change() -> None:
        with gate.alone():
            done.append("changed")

    gate.enter()
    gate.enter()
    waiting = Aside(change)
    assert waiting.is_waiting()
    gate.leave()
    assert waiting.is_waiting() and not done
    gate.leave()
    waiting.end()
    assert done == ["changed"]


def test_who_comes_while_the_map_changes_passes_behind_it() -> None:
    """In any order in which those who wait are woken: many rounds, as the system chooses it."""
    gate = Gate()

    def change() -> None:
        with gate.alone():
            pass

    def through() -> None:
        gate.enter()
        gate.leave()

    for _ in range(300):
        gate.enter()
        waiting = [Aside(call) for call in (change, through, change, through)]
        gate.leave()
        for each in waiting:
            each.end()
