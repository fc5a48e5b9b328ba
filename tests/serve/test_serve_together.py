"""Answers that are made at the same time share walks through the model, and are those that each
would be alone.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from memstore import load_model
from memstore.serve.settings import ServeSettings
from support.diary import DIARY
from support.serving import serving

PATIENT = ServeSettings(wait_seconds=600)  # who is held waits, however slow the machine is

QUESTIONS = (
    "What is the combination of the lime barn? The combination of the lime barn is",
    "In the morning",
    "We walked along the river, and",
)


def test_answers_made_at_once_share_walks_and_are_those_made_alone(tmp_path, monkeypatch):
    model, together = load_model(), []
    hidden = model.hidden

    def counting(ids, attend, **options):
        together.append(len(ids))
        return hidden(ids, attend, **options)

    monkeypatch.setattr(model, "hidden", counting)
    with serving(tmp_path / "mem", PATIENT, model=model) as served, served.client() as client:

        def ask(question: str) -> tuple[str, list[dict], int]:
            messages = [{"role": "user", "content": question}]
            body = {"model": "memstore", "messages": messages, "max_tokens": 20, "temperature": 0}
            told = client.post("/v1/chat/completions", json=body | {"memstore": {"trace": True}})
            assert told.status_code == 200, told.text
            answer = told.json()
            trace = answer["memstore"]
            done = trace["lookups"]["done"] + trace["lookups"]["skipped"]
            return answer["choices"][0]["message"]["content"], trace["sources"], done

        alone = [ask(question) for question in QUESTIONS]
        assert max(together) == 1
        served.settled(active=0, waiting=0, jobs=0)  # also the last of those alone has ended
        worker, holds, go = served.service.worker, threading.Event(), threading.Event()
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            held = worker.call("holder/0", lambda: holds.set() or go.wait())
            assert holds.wait(60)  # those that come now wait behind it
            told = pool.map(ask, QUESTIONS)
            try:
                served.settled(active=1, waiting=3, jobs=0)  # all have come
            finally:
                go.set()
            at_once = list(told)
        assert held.result()
    assert max(together) > 1
    assert [said for said, _, _ in at_once] == [said for said, _, _ in alone]
    assert [done for _, _, done in at_once] == [done for _, _, done in alone]
    for (_, shared, _), (_, own, _) in zip(at_once, alone):
        assert [(s["document"], s["block"]) for s in shared] == [
            (s["document"], s["block"]) for s in own
        ]
    assert "4467" in DIARY and alone[0][0] == "4467"


def test_an_answer_that_is_cut_in_a_shared_walk_leaves_the_others_as_they_are(
    tmp_path, monkeypatch
):
    """Its client goes away while a walk reads a token of it and of the others."""
    model, rows = load_model(), []
    hidden = model.hidden
    go, shared, cut, held = (threading.Event() for _ in range(4))

    def walking(ids, attend, **options):
        rows.append(len(ids))
        if len(ids) == 3:
            shared.set()
            assert cut.wait(60)
        return hidden(ids, attend, **options)

    monkeypatch.setattr(model, "hidden", walking)
    with serving(tmp_path / "mem", PATIENT, model=model) as served:
        worker = served.service.worker

        def said(question: str) -> str:
            body = {"model": "memstore", "prompt": question, "max_tokens": 20}
            with served.client() as client:
                told = client.post("/v1/completions", json=body)
            assert told.status_code == 200, told.text
            return told.json()["choices"][0]["text"]

        alone = [said(question) for question in QUESTIONS[:2]]
        endless = {"model": "memstore", "prompt": QUESTIONS[2], "max_tokens": 4000, "stream": True}
        with ThreadPoolExecutor(2) as pool:
            with (
                served.client() as client,
                client.stream("POST", "/v1/completions", json=endless) as answer,
            ):
                lines = answer.iter_lines()
                next(lines)
                worker.call("holder/0", lambda: (held.set(), go.wait()))
                assert held.wait(60)  # those that come now wait behind it
                others = [pool.submit(said, question) for question in QUESTIONS[:2]]
                try:
                    served.settled(active=2, waiting=2, jobs=0)  # both have come
                finally:
                    go.set()
                assert shared.wait(60)
            while not any(task.cancelled for task in worker._active):
                time.sleep(0.01)  # until the server knows that its client is gone
            at = len(rows)
            cut.set()
            assert [other.result(60) for other in others] == alone
        assert 2 in rows[at:] and 3 not in rows[at:]  # they went on together, without it
        assert worker.load == {"active": 0, "waiting": 0, "jobs": 0}
