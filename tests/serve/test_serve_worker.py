"""The worker: documents are ingested between steps of questions; concurrent answers share forward
passes and equal those made alone.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from memstore import load_model
from memstore.serve.worker import Job, Worker
from support.diary import DIARY
from support.serving import busy, serving


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


def test_a_question_waits_for_at_most_one_chunk_of_an_ingest() -> None:
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


QUESTIONS = (
    "What is the combination of the lime barn? The combination of the lime barn is",
    "In the morning",
    "We walked along the river, and",
)


def test_concurrent_answers_share_forward_passes_and_equal_those_made_alone(tmp_path, monkeypatch):
    model, together = load_model(), []
    hidden = model.hidden

    def counting(ids, attend, **options):
        together.append(len(ids))
        return hidden(ids, attend, **options)

    monkeypatch.setattr(model, "hidden", counting)
    with serving(tmp_path / "mem", model=model) as served, served.client() as client:

        def ask(question: str) -> tuple[str, list[tuple], int]:
            messages = [{"role": "user", "content": question}]
            body = {"model": "memstore", "messages": messages, "max_tokens": 20, "temperature": 0}
            sent = client.post("/v1/chat/completions", json=body | {"memstore": {"trace": True}})
            assert sent.status_code == 200, sent.text
            answer = sent.json()
            trace = answer["memstore"]
            done = trace["lookups"]["done"] + trace["lookups"]["skipped"]
            sources = [(source["document"], source["block"]) for source in trace["sources"]]
            return answer["choices"][0]["message"]["content"], sources, done

        alone = [ask(question) for question in QUESTIONS]
        assert max(together) == 1
        served.settled(active=0, waiting=0, jobs=0)  # also the last of those alone has ended
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            with served.busy():  # those that come now wait for its end
                answers = pool.map(ask, QUESTIONS)
                served.settled(active=1, waiting=3, jobs=0)  # all have come
            at_once = list(answers)
    assert max(together) > 1
    assert at_once == alone
    assert "4467" in DIARY and alone[0][0] == "4467"
