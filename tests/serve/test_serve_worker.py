"""The worker: turns of a token each, documents in between, and what becomes of too much."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from memstore.serve.answering.jobs import Job
from memstore.serve.answering.worker import Worker
from memstore.serve.api_errors import Busy, Stopped


@contextmanager
def working(**limits: Any) -> Iterator[Worker]:
    worker = Worker(**limits)
    try:
        yield worker
    finally:
        worker.stop(0.0)


@contextmanager
def held(worker: Worker) -> Iterator[None]:
    """Keep the model's thread busy with one step while others come."""
    go = threading.Event()
    began = threading.Event()

    def wait() -> None:
        began.set()
        go.wait(30)

    call = worker.call("holder/0", wait)
    began.wait(30)
    try:
        yield
    finally:
        go.set()
        call.result(30)


def noting(steps: list[str], name: str, count: int) -> Iterator[str]:
    for _ in range(count):
        steps.append(name)
        yield name


async def all_of(worker: Worker, owner: str, work: Iterator[str]) -> list[str]:
    return [item async for item in worker.steps(owner, work)]


def together(worker: Worker, *work: tuple[str, Iterator[str]]) -> None:
    """Ask for all of it while the model is busy, in this order, and wait for its end."""

    async def run() -> None:
        with held(worker):
            tasks = []
            for owner, steps in work:
                tasks.append(asyncio.create_task(all_of(worker, owner, steps)))
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_several_askers_take_a_step_each_in_turn() -> None:
    steps: list[str] = []
    with working(active=4) as worker:
        together(worker, *((f"{name}/1", noting(steps, name, 3)) for name in "abc"))
    assert [sorted(steps[at : at + 3]) for at in (0, 3, 6)] == [["a", "b", "c"]] * 3


def test_who_asks_much_does_not_keep_others_waiting() -> None:
    steps: list[str] = []
    with working(active=1) as worker:
        many = [(f"many/{n}", noting(steps, "many", 2)) for n in range(4)]
        together(worker, *many, ("one/1", noting(steps, "one", 2)))
    assert steps.index("one") <= 2  # behind the one that had its turn, before three that wait


def test_who_takes_long_for_a_step_lets_others_have_as_much_time() -> None:
    steps: list[str] = []

    def reading(count: int) -> Iterator[str]:
        for _ in range(count):
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                pass
            steps.append("chunk")
            yield "chunk"

    with working(active=2) as worker:
        together(worker, ("a/1", reading(3)), ("b/1", noting(steps, "token", 20)))
    assert "".join(step[0] for step in steps) in ("c" + "t" * 20 + "cc", "tc" + "t" * 19 + "cc")


def test_jobs_of_one_owner_run_in_their_order() -> None:
    steps: list[str] = []
    with working(active=4) as worker:
        together(worker, *(("a/1", noting(steps, name, 2)) for name in "xyz"))
    assert steps == ["x", "x", "y", "y", "z", "z"]


def test_a_question_waits_for_one_chunk_and_a_document_is_read_all_the_same() -> None:
    steps: list[str] = []
    with working(active=2, between=4) as worker:
        jobs: list[Job] = []

        async def run() -> None:
            with held(worker):
                jobs.append(worker.in_background("b/1", noting(steps, "chunk", 5)))
                asked = asyncio.create_task(all_of(worker, "a/1", noting(steps, "token", 8)))
                await asyncio.sleep(0.001)
            await asked

        asyncio.run(run())
        assert jobs[0].finished.wait(30)
    run_lengths = "".join(step[0] for step in steps).split("c")
    assert max(map(len, run_lengths)) <= 4  # of tokens between two chunks
    assert "cc" not in "".join(step[0] for step in steps[: steps.index("token") + 8])
    assert jobs[0].state == "done"


def test_documents_of_several_groups_are_read_in_turn_and_those_of_one_in_order() -> None:
    steps: list[str] = []
    with working() as worker:
        with held(worker):
            jobs = [
                worker.in_background(owner, noting(steps, name, 3))
                for owner, name in (("a/1", "A"), ("a/2", "a"), ("b/1", "b"), ("c/1", "c"))
            ]
        assert all(job.finished.wait(30) for job in jobs)
    assert "".join(steps) == "AbcAbcAbcaaa"


def test_a_document_that_is_given_up_ends_however_much_is_asked() -> None:
    steps: list[str] = []

    async def run() -> None:
        with working(between=1000) as worker:
            with held(worker):
                asked = asyncio.create_task(all_of(worker, "a/1", noting(steps, "token", 8)))
                await asyncio.sleep(0)  # it has come
                given_up = noting(steps, "chunk", 5)
                job = worker.in_background("b/1", given_up, lambda job: steps.append(job.state))
                worker.cancel(job)
            await asked

    asyncio.run(run())
    assert steps == ["cancelled", *["token"] * 8]


def test_more_than_may_wait_is_refused_with_a_time_to_come_again() -> None:
    with working(active=1, waiting=1) as worker, held(worker):
        waiting = worker.call("a/1", lambda: None)
        with pytest.raises(Busy) as refused:
            worker.call("a/2", lambda: None)
        assert refused.value.retry_after >= 1
        waiting.cancel()


def test_what_is_the_servers_own_takes_the_next_step_however_many_are_active() -> None:
    async def run() -> None:
        steps: list[str] = []
        with working(active=2, waiting=4) as worker:
            with held(worker):
                asked = [
                    asyncio.create_task(all_of(worker, f"{who}/0", noting(steps, who, 50)))
                    for who in "abcd"
                ]
                await asyncio.sleep(0.05)
                own = worker.call("server/forget", lambda: steps.append("own"), at_once=True)
            await asyncio.wrap_future(own)
            assert steps.index("own") <= 2
            await asyncio.gather(*asked)
            assert len(steps) == 201

    asyncio.run(run())


def test_what_takes_the_next_step_disturbs_nobody() -> None:
    """It joins those that are active while the model's thread looks at them."""

    def looking(works: Sequence[Any]) -> None:
        assert len(list(works)) <= 12

    async def run() -> None:
        with working(active=8, before_step=looking) as worker:
            asked = [
                asyncio.create_task(all_of(worker, f"{who}/0", noting([], "step", 300)))
                for who in "abcdefgh"
            ]
            own = [
                threading.Thread(
                    target=lambda: [
                        worker.call("server/forget", lambda: None, at_once=True).result(60)
                        for _ in range(100)
                    ]
                )
                for _ in range(3)
            ]
            for thread in own:
                thread.start()
            assert [len(steps) for steps in await asyncio.gather(*asked)] == [300] * 8
            for thread in own:
                await asyncio.to_thread(thread.join)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asyncio.run(run())
    finally:
        sys.setswitchinterval(before)


def test_who_waits_too_long_is_refused() -> None:
    with working(active=1, wait_seconds=0.01) as worker:
        with held(worker):
            late = worker.call("a/1", lambda: None)
            time.sleep(0.05)
        with pytest.raises(Busy):
            late.result(30)


def test_closing_a_question_closes_its_work_on_the_models_thread() -> None:
    closed: list[str] = []

    def endless() -> Iterator[str]:
        try:
            while True:
                yield "token"
        finally:
            closed.append(threading.current_thread().name)

    async def run(worker: Worker) -> None:
        async with aclosing(worker.steps("a/1", endless())) as tokens:
            async for _ in tokens:
                break
        await worker.run("a/1", lambda: None)  # in order behind it

    with working() as worker:
        asyncio.run(run(worker))
    assert closed == ["memstore-model"]


def test_an_error_of_a_step_is_its_askers_alone() -> None:
    def failing() -> Iterator[str]:
        yield "token"
        raise ValueError("no")

    with working() as worker:
        with pytest.raises(ValueError, match="no"):
            asyncio.run(all_of(worker, "a/1", failing()))
        assert worker.call("a/1", lambda: 7).result(30) == 7


def test_at_the_end_what_waits_is_refused_and_documents_stop_at_a_chunk() -> None:
    steps: list[str] = []
    with working(active=1) as worker:
        with held(worker):
            waiting = worker.call("a/1", lambda: None)
            job = worker.in_background("b/1", noting(steps, "chunk", 1000))
            worker.refuse()
        with pytest.raises(Stopped):
            waiting.result(30)
        with pytest.raises(Stopped):
            worker.call("a/1", lambda: None)
        assert job.finished.wait(30) and job.state == "cancelled"
        assert len(steps) <= 1
