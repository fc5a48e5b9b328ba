"""The thread that owns the model: questions take turns on it, one step each; between their steps it
ingests documents, one chunk at a time.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from memstore.serve.api_errors import Busy, Stopped

T = TypeVar("T")
_PAUSE = 0.2  # seconds until a job that cannot go on is tried again


@dataclass(eq=False)
class Job:
    """Work in steps: a question, a search, or an ingest in the background, which yields None if it
    cannot go on yet.

    on_item: called with each yielded value; on_end: called when the work is done, failed or
    stopped; both on the model's thread. latest: the last yielded value; result: the returned value,
    None until it is done; error: of failed work; stopping: end before the next step; finished: set
    at the end.
    """

    work: Iterator[Any]
    on_end: Callable[["Job"], None] = lambda job: None
    on_item: Callable[[Any], None] = lambda item: None
    latest: Any = None
    result: Any = None
    error: BaseException | None = None
    stopping: bool = False
    finished: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Runs steps of work on one thread.

    Up to `active` tasks take turns, one step each; up to `waiting` more are queued, and further
    tasks are refused. Jobs run in order: one step whenever there is no task, and at the latest
    after `between` steps of tasks.
    """

    def __init__(
        self,
        *,
        active: int = 8,
        waiting: int = 64,
        between: int = 32,
        before_step: Callable[[Sequence[Iterator[Any]]], None] | None = None,
    ) -> None:
        """before_step: called before each step, with its work and that of all other active tasks,
        so that it can process them as a batch.
        """
        self._most_active, self._most = active, active + waiting
        self._between, self._before_step = between, before_step
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._active: deque[Job] = deque()
        self._jobs: deque[Job] = deque()
        self._steps_since_job, self._paused_until = 0, 0.0
        self._refusing = self._ending = False
        self._thread = threading.Thread(target=self._run, name="memstore-model", daemon=True)
        self._thread.start()

    # Called from any thread

    async def steps(self, work: Iterator[T]) -> AsyncGenerator[T, None]:
        """The values that `work` yields; each next() runs on the model's thread, and so does its
        close() when this iterator is closed. Raises Busy, Stopped, and what `work` raises.
        """
        loop = asyncio.get_running_loop()
        given: asyncio.Queue[tuple[bool, Any]] = asyncio.Queue()

        def give(entry: tuple[bool, Any]) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(given.put_nowait, entry)

        task = Job(work, lambda ended: give((False, ended.error)), lambda item: give((True, item)))
        self._admit(task)
        try:
            while True:
                more, item = await given.get()
                if more:
                    yield item
                elif item is None:
                    return
                else:
                    raise item
        finally:
            self.cancel(task)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of one call. Raises Busy, Stopped, and what `work` raises."""

        def step() -> Iterator[T]:
            yield work()

        async with aclosing(self.steps(step())) as results:
            return await anext(results)

    def in_background(self, work: Iterator[Any], on_end: Callable[[Job], None]) -> Job:
        """Queue a job. Raises Stopped."""
        job = Job(work, on_end)
        with self._changed:
            if self._refusing:
                raise Stopped
            self._jobs.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """End a job, or a question, before its next step."""
        with self._changed:
            job.stopping = True
            with suppress(ValueError):  # not in the queue
                self._queue.remove(job)
            self._changed.notify()

    @property
    def load(self) -> dict[str, int]:
        """The numbers of "active" and "waiting" questions, and of "jobs"."""
        with self._changed:
            counts = len(self._active), len(self._queue), len(self._jobs)
        return dict(zip(("active", "waiting", "jobs"), counts))

    def refuse(self) -> None:
        """Refuse new and queued questions, and end jobs at their next step."""
        with self._changed:
            self._refusing = True
            waiting = [*self._queue]
            self._queue.clear()
            for job in self._jobs:
                job.stopping = True
            self._changed.notify()
        for task in waiting:
            task.error = Stopped()
            task.on_end(task)

    def cut_off(self) -> None:
        """End running answers; their clients get Stopped."""
        with self._changed:
            for task in self._active:
                task.stopping, task.error = True, Stopped()

    def stop(self, seconds: float = 5.0) -> None:
        """End the thread; running answers are cut off after `seconds`. The store stays open."""
        self.refuse()
        until = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(
                lambda: not self._active and not self._jobs, max(0.0, until - time.monotonic())
            )
            self._ending = True
            self._changed.notify_all()
        self._thread.join(max(0.1, until + 2.0 - time.monotonic()))

    def _admit(self, task: Job) -> None:
        with self._changed:
            if self._refusing:
                raise Stopped
            if len(self._active) + len(self._queue) >= self._most:
                raise Busy("too many questions are waiting; ask again later")
            self._queue.append(task)
            self._changed.notify()

    # On the model's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                turn = self._next()
                while turn is None and not self._ending:
                    self._changed.notify_all()
                    self._changed.wait(_PAUSE if self._jobs else None)
                    turn = self._next()
            if self._ending or turn is None:
                break
            self._step(turn)
        self.cut_off()
        for job in [*self._active, *self._jobs]:
            job.stopping = True
            self._step(job)

    def _next(self) -> Job | None:
        """The work of the next step; the caller holds the lock."""
        while self._queue and len(self._active) < self._most_active:
            self._active.append(self._queue.popleft())
        if self._jobs:
            stopping = next((job for job in self._jobs if job.stopping), None)
            turn = not self._active or self._steps_since_job >= self._between
            if stopping or (turn and time.monotonic() >= self._paused_until):
                self._steps_since_job = 0
                return stopping or self._jobs[0]
        if self._active:
            self._steps_since_job += 1
            self._active.rotate(-1)
            return self._active[-1]
        return None

    def _step(self, job: Job) -> None:
        """Run a step of a job, or end it."""
        try:
            if not job.stopping:
                if self._before_step is not None and job in self._active:
                    self._before_step([job.work, *self._others(job)])
                job.latest = next(job.work)
                if job.latest is None:
                    self._paused_until = time.monotonic() + _PAUSE
                job.on_item(job.latest)
                return
            _close(job.work)
        except StopIteration as end:
            job.result, job.error = end.value, None
        except Exception as error:
            job.error = error
            with suppress(Exception):  # usually it has ended already
                _close(job.work)
        with self._changed:
            (self._active if job in self._active else self._jobs).remove(job)
        job.on_end(job)
        job.finished.set()

    def _others(self, job: Job) -> list[Iterator[Any]]:
        """The work of all other active tasks."""
        with self._changed:
            return [one.work for one in self._active if one is not job and not one.stopping]


def _close(work: Iterator[Any]) -> None:
    """Close work that has a close method, such as a generator."""
    end = getattr(work, "close", None)
    if end is not None:
        end()
