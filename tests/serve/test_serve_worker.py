"""The worker: questions take turns of a step, documents are ingested between them, and what is too
much or comes too late is refused.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from memstore.serve.api_errors import Busy, Stopped
from memstore.serve.worker import Job, Worker
from support.serving import busy


@contextmanager
def working(**limits: Any) -> Iterator[Worker]:
    worker = Worker(**limits)
    try:
        yield worker
    finally:
        worker.stop(0.0)


def noting(steps: list[str], name: str, count: int) -> Iterator[str]:
    for _ in range(count):
        steps.append(name)
        yield name


async def all_of(worker: Worker, work: Iterator[str]) -> list[str]:
    return [item async for item in worker.steps(work)]


def together(worker: Worker, *works: Iterator[str]) -> None:
    """Queue these while the model is busy, in this order, and wait for their end."""

    async def run() -> None:
        with busy(worker):
            tasks = []
            for work in works:
                tasks.append(asyncio.create_task(all_of(worker, work)))
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_active_questions_take_a_step_each_in_turn() -> None:
    steps: list[str] = []
    with working(active=4) as worker:
        together(worker, *(noting(steps, name, 3) for name in "abc"))
    assert [sorted(steps[at : at + 3]) for at in (0, 3, 6)] == [["a", "b", "c"]] * 3


def test_a_question_waits_for_one_chunk_and_a_document_is_ingested_all_the_same() -> None:
    steps: list[str] = []
    with working(active=2, between=4) as worker:
        jobs: list[Job] = []

        async def run() -> None:
            with busy(worker):
                jobs.append(worker.in_background(noting(steps, "chunk", 5)))
                asked = asyncio.create_task(all_of(worker, noting(steps, "token", 8)))
                await asyncio.sleep(0.001)
            await asked

        asyncio.run(run())
        assert jobs[0].finished.wait(30)
    tokens_between = "".join(step[0] for step in steps).split("c")
    assert max(map(len, tokens_between)) <= 4
    assert "cc" not in "".join(step[0] for step in steps[: steps.index("token") + 8])
    assert jobs[0].state == "done" and jobs[0].latest == "chunk"


def test_a_cancelled_job_ends_before_any_other_step() -> None:
    steps: list[str] = []

    async def run() -> None:
        with working(between=1000) as worker:
            with busy(worker):
                asked = asyncio.create_task(all_of(worker, noting(steps, "token", 8)))
                await asyncio.sleep(0)  # it is queued
                worker.in_background(noting(steps, "other", 1))
                given_up = noting(steps, "chunk", 5)
                job = worker.in_background(given_up, lambda job: steps.append(job.state))
                worker.cancel(job)
            await asked

    asyncio.run(run())
    assert steps[:9] == ["cancelled", *["token"] * 8]


def test_more_questions_than_may_wait_are_refused_with_a_time_to_come_again() -> None:
    async def ask(worker: Worker) -> None:
        waiting = asyncio.create_task(worker.run(lambda: None))
        await asyncio.sleep(0)  # it is queued
        with pytest.raises(Busy) as refused:
            await worker.run(lambda: None)
        assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1
        waiting.cancel()

    with working(active=1, waiting=1) as worker, busy(worker):
        asyncio.run(ask(worker))


def test_closing_a_question_closes_its_work_on_the_models_thread() -> None:
    closed: list[str] = []

    def endless() -> Iterator[str]:
        try:
            while True:
                yield "token"
        finally:
            closed.append(threading.current_thread().name)

    async def run(worker: Worker) -> None:
        async with aclosing(worker.steps(endless())) as tokens:
            async for _ in tokens:
                break
        while worker.load["active"]:
            await asyncio.sleep(0.001)

    with working() as worker:
        asyncio.run(run(worker))
    assert closed == ["memstore-model"]


def test_an_error_in_a_step_ends_only_its_own_question() -> None:
    def failing() -> Iterator[str]:
        yield "token"
        raise ValueError("no")

    with working() as worker:
        with pytest.raises(ValueError, match="no"):
            asyncio.run(all_of(worker, failing()))
        assert asyncio.run(worker.run(lambda: 7)) == 7


def test_at_the_end_what_waits_is_refused_and_jobs_stop_at_a_chunk() -> None:
    steps: list[str] = []

    async def ask(worker: Worker) -> Job:
        with busy(worker):
            waiting = asyncio.create_task(worker.run(lambda: None))
            await asyncio.sleep(0)  # it is queued
            job = worker.in_background(noting(steps, "chunk", 1000))
            worker.refuse()
        for refused in (waiting, worker.run(lambda: None)):
            with pytest.raises(Stopped):
                await refused
        return job

    with working(active=1) as worker:
        job = asyncio.run(ask(worker))
        assert job.finished.wait(30) and job.state == "cancelled"
        assert len(steps) <= 1
