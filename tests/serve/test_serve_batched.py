"""Answers that are made at the same time share forward passes, and equal those made alone."""

from concurrent.futures import ThreadPoolExecutor

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
