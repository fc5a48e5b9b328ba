"""Chat completions through the official OpenAI client: answers, streams, sources, and which
parameters are accepted, ignored or refused.
"""

from typing import Any

import openai
import pytest

from support.diary import ANSWER, ASKED, DIARY, QUESTION
from support.serving import Served

MARE = "What is the price of the brown mare?"


def test_models_lists_the_served_model(served: Served) -> None:
    (model,) = served.openai().models.list().data
    assert model.id == "memstore"
    assert served.openai().models.retrieve("memstore").id == "memstore"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5'"):
        served.openai().models.retrieve("gpt-5")
    with served.client() as client:
        wrong = client.put("/v1/models")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")


def test_chat_answers_from_the_memory_with_its_sources(served: Served) -> None:
    answer = served.chat(QUESTION, extra_body={"memstore": {"max_sources": 2}})
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens > 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    report = answer.model_extra["memstore"]
    assert report["answered"]
    best = report["sources"][0]
    assert best["document"] == "diary" and DIARY[slice(*best["span"])] == best["text"]
    assert "The combination of the lime barn is 4467." in best["text"]


def test_streamed_chat_sends_the_same_text_usage_and_sources(served: Served) -> None:
    options = {"include_usage": True}
    chunks = list(served.chat(QUESTION, stream=True, stream_options=options))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == ANSWER
    assert chunks[-1].usage.completion_tokens > 0
    (sources,) = [one.memstore for one in chunks if hasattr(one, "memstore")]
    assert sources["sources"][0]["document"] == "diary"


def test_documents_are_not_looked_up_by_name_to_search_all(served, monkeypatch) -> None:
    store, names = served.service.store, list[object]()
    document = store.document
    monkeypatch.setattr(store, "document", lambda name: names.append(name) or document(name))
    assert served.chat(QUESTION).choices[0].message.content == ANSWER
    with served.client() as client:
        assert client.post("/v1/memstore/search", json={"query": "barn"}).json()["data"]
    assert not [name for name in names if isinstance(name, str)]  # there may be 100,000


def test_earlier_messages_are_read_before_the_question(served: Served) -> None:
    first = served.chat(QUESTION)
    second = served.chat(QUESTION, ANSWER, MARE)
    assert second.choices[0].message.content.endswith("310")
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + 5


def test_stop_texts_and_lengths_end_an_answer(served: Served) -> None:
    stopped = served.chat(QUESTION, stop=["67"])
    assert stopped.choices[0].message.content == "44"
    cut = served.chat(QUESTION, max_completion_tokens=1)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 1


HARMLESS: dict[str, Any] = {
    "store": True, "metadata": {"team": "barn"}, "reasoning_effort": "minimal", "n": 1,
    "frequency_penalty": 0.5, "response_format": {"type": "text"}, "logprobs": False,
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    "tool_choice": "auto",
}  # fmt: skip


def test_harmless_and_unknown_parameters_are_ignored(served: Served) -> None:
    answer = served.chat(QUESTION, **HARMLESS, extra_body={"colour": "red", "best_of": 3})
    assert answer.choices[0].message.content == ANSWER


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"n": 2}, "n: "),
        ({"tool_choice": "required"}, "tool_choice: "),
        ({"function_call": {"name": "look"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format.type: "),
        ({"logprobs": True}, "logprobs: "),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"memstore": {"documnets": ["diary"]}}, "memstore.documnets"),
        ({"memstore": {"documents": ["dairy"]}}, "no document 'dairy'"),
        ({"messages": [{"role": "user", "content": " "}]}, "the last message must be"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "upload it as a document"),
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 5}, "at most 4 items"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "type: Field required"),
    ],
)
def test_unsupported_options_are_refused(served: Served, given: dict[str, Any], named: str) -> None:
    with served.client() as client:
        refused = client.post("/v1/chat/completions", json=ASKED | given)
    error = refused.json()["error"]
    assert refused.status_code in (400, 404) and named in error["message"]
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_message_parts_that_are_not_text_are_refused(served: Served, kind: str) -> None:
    parts = [{"type": "text", "text": QUESTION}, {"type": kind, kind: {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match=f"'{kind}'; this server reads text only"):
        served.chat(parts)
    del parts[1]
    answer = served.chat(parts)
    assert answer.choices[0].message.content == ANSWER
