"""The admission queue of questions that wait for the model: which comes next, for how many there is
time, and when those that are refused may come again.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from memstore.serve.api_errors import Busy

_ENDS_KEPT = 64  # of the latest questions, to tell how fast the queue moves
_LONGEST = 60  # seconds to come again after: what OpenAI's clients heed


@dataclass(eq=False)
class Task:
    """Work in steps, and who gets what it yields, on the worker's thread. waits: in the queue, for
    a place among those that are active; what does not is the server's own.
    """

    owner: str
    work: Iterator[Any]
    on_item: Callable[[Any], None]
    on_end: Callable[[BaseException | None], None]
    waits: bool = True
    arrived: float = 0.0  # in the queue
    due: float = 0.0  # its next step, by the time that the worker has spent on all of them
    cancelled: bool = False
    cut_off: bool = False

    @property
    def group(self) -> str:
        """Of the owner, "GROUP/WHO"."""
        return self.owner.partition("/")[0]


class AdmissionQueue:
    """Tasks that wait, in their order of arrival; the caller has the lock.

    There is room for as many as can be begun in `seconds` at the pace at which answers end, and for
    `most`. Those of a group are served in order: who was refused would have to be lucky to find
    room again, and wait longer than others the more often he is not.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._tasks: list[Task] = []
        self._served: dict[str, int] = {}  # steps of each group that asks now
        self._intervals: deque[float] = deque(maxlen=_ENDS_KEPT)  # between two ends
        self._ended: float | None = None  # when the last one did, if others wait since
        self._promised: dict[str, float] = {}  # until when room is promised to a group

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def expected(self) -> float:
        """Seconds that who comes now would wait, by the latest pace; 0 while none is known."""
        return len(self._tasks) * self._interval

    @property
    def _interval(self) -> float:
        return sum(self._intervals) / len(self._intervals) if self._intervals else 0.0

    def join(self, task: Task, *, at_once: bool = False) -> Task | None:
        """Have a task wait; who must give his place up for it. at_once: its turn is the next.
        Raises Busy where there is no room.
        """
        displaced = None
        if not at_once and (len(self._tasks) >= self._most or self.expected > self._seconds):
            displaced = self._newest_of_a_crowd(task.group)
            if displaced is None:
                raise self.busy(task.group)
            self._tasks.remove(displaced)
        task.arrived = time.monotonic()
        self._tasks.append(task)
        return displaced

    def busy(self, group: str, why: str = "") -> Busy:
        """The refusal of one of a group. A place becomes free with every answer that ends: those
        who are refused are told a time of their own each, and not all to come at once.
        """
        now = time.monotonic()
        self._promised = {name: at for name, at in self._promised.items() if at > now}
        at = self._promised.get(group, now) + self._interval
        self._promised[group] = min(at, now + _LONGEST)
        why = why or f"{len(self._tasks)} questions wait already"
        return Busy(f"{why}; ask again later", max(1, min(_LONGEST, math.ceil(at - now))))

    def leave(self, task: Task) -> None:
        """Take a task out, if it is in it."""
        if task in self._tasks:
            self._tasks.remove(task)

    def clear(self) -> list[Task]:
        """Take all of them out."""
        tasks, self._tasks = self._tasks, []
        return tasks

    def late(self) -> list[Task]:
        """Take out those that have waited twice the time that any should."""
        before = time.monotonic() - 2 * self._seconds
        late = [task for task in self._tasks if task.arrived < before]
        if late:
            self._tasks = [task for task in self._tasks if task not in late]
        return late

    def next(self, running: Collection[Task]) -> Task | None:
        """Take out the one that comes next beside those that run: who waits longest of the group
        that was served least, if nothing of its owner runs.
        """
        owners = {task.owner for task in running}
        able = [task for task in self._tasks if task.owner not in owners]
        if not able:
            return None
        groups = {task.group for task in [*self._tasks, *running]}
        least = min((self._served[g] for g in groups if g in self._served), default=0)
        # who comes back after a while has no claim to what he did not ask for meanwhile
        self._served = {group: self._served.get(group, least) for group in groups}
        first = min(able, key=lambda task: (self._served[task.group], task.arrived))
        self._tasks.remove(first)
        return first

    def step(self, task: Task) -> None:
        """One is taken of this task."""
        self._served[task.group] = self._served.get(task.group, 0) + 1

    def end(self) -> None:
        """One that ran has ended: what the pace is taken from, where others wait for it."""
        now = time.monotonic()
        if self._tasks and self._ended is not None:
            self._intervals.append(now - self._ended)
        self._ended = now if self._tasks else None

    def _newest_of_a_crowd(self, group: str) -> Task | None:
        """What came last of the group of which most wait, if that is more than will wait of this
        one: nobody keeps others out by asking much.
        """
        waiting = Counter(task.group for task in self._tasks)
        if not waiting:
            return None
        crowd, most = waiting.most_common(1)[0]
        if most <= waiting[group] + 1:
            return None
        return next(task for task in reversed(self._tasks) if task.group == crowd)
