"""The worker: documents are ingested between the steps of questions."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

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


def test_a_question_waits_for_one_chunk_and_a_document_is_ingested_all_the_same() -> None:
    steps: list[str] = []
    with working(active=2, between=4) as worker:
        jobs: list[Job] = []

        async def run() -> None:
            with busy(worker):
                jobs.append(worker.in_background(noting(steps, "chunk", 5), lambda job: None))
                asked = asyncio.create_task(all_of(worker, noting(steps, "token", 8)))
                await asyncio.sleep(0.001)
            await asked

        asyncio.run(run())
        assert jobs[0].finished.wait(30)
    tokens_between = "".join(step[0] for step in steps).split("c")
    assert max(map(len, tokens_between)) <= 4
    assert "cc" not in "".join(step[0] for step in steps[: steps.index("token") + 8])
    assert jobs[0].error is None and jobs[0].latest == "chunk"


def test_an_error_in_a_step_ends_only_its_own_question() -> None:
    def failing() -> Iterator[str]:
        yield "token"
        raise ValueError("no")

    with working() as worker:
        with pytest.raises(ValueError, match="no"):
            asyncio.run(all_of(worker, failing()))
        assert asyncio.run(worker.run(lambda: 7)) == 7
