"""The worker: the one thread that owns the model. Answers take turns there, a step each, and
background jobs (the ingest of documents) go on in between.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from memstore.serve.answering.admission_queue import AdmissionQueue, Task
from memstore.serve.answering.jobs import Job, Jobs, close
from memstore.serve.api_errors import Stopped

T = TypeVar("T")
_SHORT = 0.05  # seconds of a step that every turn has


class Worker:
    """Runs steps on its own thread.

    Jobs of one owner run in order, those of several owners a step each in turn, at most `active` at
    a time; one whose step took long sits out until the others had as much time. Beside them the
    jobs in the background, those of a group one after the other and those of several groups a step
    each in turn: one whenever nobody asks, and at the latest after `between` steps of those who do;
    that of a cancelled one, its end, comes next. An owner is "GROUP/WHO": who waits longest of the
    group that was served least comes next.
    """

    def __init__(
        self,
        *,
        active: int = 8,
        waiting: int = 512,
        wait_seconds: float = 60.0,
        between: int = 32,
        before_step: Callable[[Sequence[Iterator[Any]]], None] | None = None,
    ) -> None:
        """before_step: called with the work of the next step and then that of all others that are
        active: it may do what several of them wait for at once.
        """
        self._most_active, self._between, self._before_step = active, between, before_step
        self._changed = threading.Condition()
        self._queue = AdmissionQueue(waiting, wait_seconds)
        self._active: deque[Task] = deque()
        self._jobs = Jobs()
        self._steps_since_job = 0
        self._spent = 0.0  # seconds of the thread, on steps of those who ask
        self._refusing = self._ending = False
        self._thread = threading.Thread(target=self._run, name="memstore-model", daemon=True)
        self._thread.start()

    # What others call, from any thread

    async def steps(self, owner: str, work: Iterator[T]) -> AsyncGenerator[T, None]:
        """What `work` yields; each next() runs on the model's thread. Closing this closes `work`
        there. Raises Busy, Stopped, and what `work` raises.
        """
        loop = asyncio.get_running_loop()
        given: asyncio.Queue[tuple[bool, Any]] = asyncio.Queue()

        def give(entry: tuple[bool, Any]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(given.put_nowait, entry)

        task = Task(
            owner, work, lambda item: give((True, item)), lambda error: give((False, error))
        )
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
            self._cancel(task)

    def call(self, owner: str, work: Callable[[], T], *, at_once: bool = False) -> "Future[T]":
        """The result of one step; cancelling the future keeps it from being begun. at_once: the
        next one, however many are active and wait. Raises Busy, Stopped.
        """
        future: Future[T] = Future()

        def step() -> Iterator[None]:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
            yield from ()

        def ended(error: BaseException | None) -> None:
            if error is not None and not future.done():
                with suppress(InvalidStateError):  # cancelled just now
                    future.set_exception(error)

        self._admit(Task(owner, step(), lambda item: None, ended, waits=not at_once))
        return future

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """`call`, awaited."""
        return await asyncio.wrap_future(self.call(owner, work))

    def in_background(
        self, owner: str, work: Iterator[Any], on_end: Callable[[Job], None] | None = None
    ) -> Job:
        """Have `work` run, a step (a chunk) at a time, behind what of its group waits there
        already. on_end: called with the job when it is done, failed or cancelled, on the model's
        thread. Raises Stopped.
        """
        job = Job(owner, work, on_end)
        with self._changed:
            if self._refusing:
                raise Stopped
            self._jobs.add(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """End a job before its next step."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    @property
    def load(self) -> dict[str, int]:
        """How many questions are "active" and "waiting", and "jobs" in the background."""
        with self._changed:
            counts = len(self._active), len(self._queue), len(self._jobs)
        return dict(zip(("active", "waiting", "jobs"), counts))

    def jobs_of(self, owner: str) -> int:
        """How many jobs the group of an owner has in the background."""
        group = owner.partition("/")[0]
        with self._changed:
            return sum(job.group == group for job in self._jobs)

    def refuse(self) -> None:
        """Begin nothing new: what waits is refused, jobs end at their next step, answers go on."""
        with self._changed:
            self._refusing = True
            waiting = self._queue.clear()
            for job in self._jobs:
                job.cancelled = True
            self._changed.notify()
        for task in waiting:
            task.on_end(Stopped())

    def cut_off(self) -> None:
        """End the answers that are still being made: Stopped is what their askers get."""
        with self._changed:
            for task in self._active:
                task.cut_off = True

    def stop(self, seconds: float = 5.0) -> None:
        """End: answers that are not done by then are cut off."""
        self.refuse()
        until = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(
                lambda: not self._active and not self._jobs, max(0.0, until - time.monotonic())
            )
            self._ending = True
            self._changed.notify_all()
        self._thread.join(max(0.1, until + 2.0 - time.monotonic()))

    # Who comes next

    def _admit(self, task: Task) -> None:
        with self._changed:
            if self._refusing:
                raise Stopped
            if not task.waits:
                self._active.appendleft(task)
                self._changed.notify()
                return
            at_once = not self._queue and len(self._active) < self._most_active
            displaced = self._queue.join(task, at_once=at_once)
            if displaced is not None:
                displaced.on_end(self._queue.busy(displaced.group))
            self._changed.notify()

    def _cancel(self, task: Task) -> None:
        with self._changed:
            task.cancelled = True
            self._queue.leave(task)
            self._changed.notify()

    def _next(self) -> Task | Job | None:
        """What takes the next step; the caller holds the lock."""
        while len(self._active) < self._most_active and (task := self._queue.next(self._active)):
            self._active.append(task)
        due = not self._active or self._steps_since_job >= self._between
        if self._jobs and (due or self._jobs.urgent):
            self._steps_since_job = 0
            return self._jobs.next()
        if self._active:
            self._steps_since_job += 1
            return self._in_turn()
        return None

    def _in_turn(self) -> Task:
        """The next of those that are active."""
        for _ in range(len(self._active)):
            self._active.rotate(-1)
            task = self._active[-1]
            if task.due <= self._spent or task.cancelled or task.cut_off:
                return task
        task = min(self._active, key=lambda task: task.due)
        self._active.remove(task)
        self._active.append(task)
        return task

    # On the model's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._refuse_late()
                turn = self._next()
                while turn is None and not self._ending:
                    self._changed.notify_all()
                    self._changed.wait()
                    turn = self._next()
                if self._ending:
                    break
            assert turn is not None
            if isinstance(turn, Job):
                self._step_job(turn)
            else:
                self._step(turn)
        for task in list(self._active):
            self._end(task, Stopped())
        for job in self._jobs:
            job.cancelled = True
            self._step_job(job)

    def _refuse_late(self) -> None:
        for task in self._queue.late():
            task.on_end(self._queue.busy(task.group, "it waited too long for its turn"))

    def _step(self, task: Task) -> None:
        if task.cancelled or task.cut_off:
            self._end(task, None if task.cancelled else Stopped())
            return
        self._queue.step(task)
        began = time.thread_time()
        try:
            if self._before_step is not None:
                with self._changed:
                    others = [one for one in self._active if one is not task and not one.cancelled]
                self._before_step([task.work, *(one.work for one in others)])
            task.on_item(next(task.work))
        except StopIteration:
            self._end(task, None)
        except Exception as error:
            self._end(task, error)
        finally:
            took = time.thread_time() - began
            self._spent += took
            task.due = self._spent + max(0.0, took - _SHORT)

    def _end(self, task: Task, error: BaseException | None) -> None:
        with self._changed:
            self._active.remove(task)
            if task.waits:
                self._queue.end()
        try:
            close(task.work)
        finally:
            task.on_end(error)

    def _step_job(self, job: Job) -> None:
        if job.step():
            with self._changed:
                self._jobs.remove(job)
            job.end()
