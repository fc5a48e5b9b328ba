"""Background jobs: work in steps behind the answers, and whose job takes the next step."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(eq=False)
class Job:
    """Work in the background. state: "waiting", "running", "done", "failed" or "cancelled"; error:
    why it failed; result: what its generator returned.
    """

    owner: str
    work: Iterator[Any]
    on_end: Callable[["Job"], None] | None = None
    state: Literal["waiting", "running", "done", "failed", "cancelled"] = "waiting"
    error: BaseException | None = None
    result: Any = None
    cancelled: bool = False
    finished: threading.Event = field(default_factory=threading.Event)

    @property
    def group(self) -> str:
        """Of the owner, "GROUP/WHO"."""
        return self.owner.partition("/")[0]

    def step(self) -> bool:
        """Take a step, or end where it was cancelled; has it ended?"""
        try:
            if self.cancelled:
                close(self.work)
                self.state = "cancelled"
            else:
                self.state = "running"
                next(self.work)
                return False
        except StopIteration as end:
            self.state, self.result = "done", end.value
        except Exception as error:
            self.state, self.error = "failed", error
        return True

    def end(self) -> None:
        """Have whoever waits know of its end."""
        if self.on_end is not None:
            self.on_end(self)
        self.finished.set()


class Jobs:
    """Jobs that have not ended: those of a group in order, those of several a step each in turn.
    The caller has the lock.
    """

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._turns: dict[str, int] = {}  # when a group whose jobs wait had its last step

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter([*self._jobs])

    def add(self, job: Job) -> None:
        """Have a job wait behind those of its group."""
        self._jobs.append(job)

    def remove(self, job: Job) -> None:
        """Take a job out, which has ended."""
        self._jobs.remove(job)

    @property
    def urgent(self) -> bool:
        """Was one cancelled, whose end comes before all steps?"""
        return any(job.cancelled for job in self._jobs)

    def next(self) -> Job:
        """One that was cancelled, or else the first of the group whose last step is longest ago."""
        first: dict[str, Job] = {}
        for job in self._jobs:
            if job.cancelled:
                return job
            first.setdefault(job.group, job)
        now = max(self._turns.values(), default=0) + 1
        self._turns = {group: self._turns.get(group, 0) for group in first}
        group = min(first, key=lambda group: self._turns[group])
        self._turns[group] = now
        return first[group]


def close(work: Iterator[Any]) -> None:
    """End work in steps where it is."""
    end = getattr(work, "close", None)
    if end is not None:
        end()
