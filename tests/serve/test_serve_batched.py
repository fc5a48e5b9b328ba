"""Answers that are made at the same time share forward passes, and equal those made alone."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from memstore import load_model
from support.diary import DIARY
from support.serving import serving

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

        def ask(question: str) -> tuple[str, list[dict], int]:
            messages = [{"role": "user", "content": question}]
            body = {"model": "memstore", "messages": messages, "max_tokens": 20, "temperature": 0}
            sent = client.post("/v1/chat/completions", json=body | {"memstore": {"trace": True}})
            assert sent.status_code == 200, sent.text
            answer = sent.json()
            trace = answer["memstore"]
            done = trace["lookups"]["done"] + trace["lookups"]["skipped"]
            return answer["choices"][0]["message"]["content"], trace["sources"], done

        alone = [ask(question) for question in QUESTIONS]
        assert max(together) == 1
        served.settled(active=0, waiting=0, jobs=0)  # also the last of those alone has ended
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            with served.busy():  # those that come now wait for its end
                answers = pool.map(ask, QUESTIONS)
                served.settled(active=1, waiting=3, jobs=0)  # all have come
            at_once = list(answers)
    assert max(together) > 1
    assert [said for said, _, _ in at_once] == [said for said, _, _ in alone]
    assert [done for _, _, done in at_once] == [done for _, _, done in alone]
    for (_, shared, _), (_, own, _) in zip(at_once, alone):
        assert [(s["document"], s["block"]) for s in shared] == [
            (s["document"], s["block"]) for s in own
        ]
    assert "4467" in DIARY and alone[0][0] == "4467"


def test_an_answer_cut_off_in_a_shared_forward_pass_leaves_the_others_unchanged(
    tmp_path, monkeypatch
):
    """Its client leaves while a forward pass reads a token of it and of the others."""
    model, rows = load_model(), []
    model.answering = replace(model.answering, until_sentence=False)
    hidden = model.hidden
    shared, cut = threading.Event(), threading.Event()

    def waiting(ids, attend, **options):
        rows.append(len(ids))
        if len(ids) == 3:
            shared.set()
            assert cut.wait(60)
        return hidden(ids, attend, **options)

    monkeypatch.setattr(model, "hidden", waiting)
    with serving(tmp_path / "mem", model=model) as served:
        worker = served.service.worker

        def body(question: str, most: int) -> dict:
            messages = [{"role": "user", "content": question}]
            return {"model": "memstore", "messages": messages, "max_tokens": most}

        def said(question: str) -> str:
            with served.client() as client:
                sent = client.post("/v1/chat/completions", json=body(question, 20))
            assert sent.status_code == 200, sent.text
            return sent.json()["choices"][0]["message"]["content"]

        alone = [said(question) for question in QUESTIONS[:2]]
        endless = body(QUESTIONS[2], 4000) | {"stream": True}
        with ThreadPoolExecutor(2) as pool:
            with (
                served.client() as client,
                client.stream("POST", "/v1/chat/completions", json=endless) as answer,
            ):
                lines = answer.iter_lines()
                next(lines)
                with served.busy():  # those that come now wait for its end
                    others = [pool.submit(said, question) for question in QUESTIONS[:2]]
                    while worker.load["active"] + worker.load["waiting"] < 4:
                        time.sleep(0.01)
                assert shared.wait(60)
            while not any(task.cancelled for task in worker._active):
                time.sleep(0.01)  # until the server knows that its client is gone
            at = len(rows)
            cut.set()
            assert [other.result(60) for other in others] == alone
        assert 2 in rows[at:] and 3 not in rows[at:]  # they went on together, without it
        served.settled(active=0, waiting=0, jobs=0)
