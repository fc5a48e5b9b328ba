"""A server refuses questions that the memory does not answer, as the command line does."""

from collections.abc import Iterator

import anyio
import pytest

from memstore.model.answer import NOT_SURE
from memstore.model.passages.adaptation import Refusal
from memstore.model.passages.selector import Gate
from support.serving import Served, serving
from support.tiny_decoder import word_reader

ABSENT = "Why do whales sing?"
PRESENT = "What is the price of the brown mare?"


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model has a gate."""
    model = word_reader(gate=Gate((0.5,) * 5))
    with serving(tmp_path_factory.mktemp("gated") / "m", model=model) as served:
        yield served


def reply(served: Served, *said: str, stream: bool = False, **memstore: object) -> tuple:
    """The text of a chat's answer and the field `memstore` of its reply."""
    done = served.chat(*said, stream=stream, max_tokens=4, extra_body={"memstore": memstore})
    if not stream:
        return done.choices[0].message.content, done.memstore, done.usage
    chunks = list(done)
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    found = [one.memstore for one in chunks if getattr(one, "memstore", None)]
    return text, found[-1], None


@pytest.mark.parametrize("stream", [False, True])
def test_chat_refuses_and_lists_the_closest_passages(gated: Served, stream: bool) -> None:
    text, report, usage = reply(gated, ABSENT, stream=stream)
    assert text.startswith(NOT_SURE) and "diary" in text
    assert not report["answered"] and report["sources"]
    with gated.client() as client:
        assert "memstore_refused_total 0.0" not in client.get("/metrics").text
    weights = [source["weight"] for source in report["sources"]]
    assert weights == sorted(weights, reverse=True) and weights[0] < report["needed"]
    assert usage is None or usage.completion_tokens == 0
    _, traced, _ = reply(gated, ABSENT, stream=stream, trace=True)
    assert [source["tiers"] for source in traced["sources"]] == [[]] * len(report["sources"])


def test_trace_names_a_needed_score_only_if_that_decides(gated: Served, monkeypatch) -> None:
    for refusal in (None, Refusal(5, (0.5,) * 5)):
        monkeypatch.setattr(gated.service.model, "refusal", refusal)
        _, report, _ = reply(gated, PRESENT, trace=True)
        assert report["choice"]["threshold"] == report["needed"] == (None if refusal else 0.5)


def test_chat_answers_without_the_memory_where_it_is_allowed_to(gated: Served) -> None:
    text, report, usage = reply(gated, ABSENT, from_memory=False)
    assert not text.startswith(NOT_SURE) and usage.completion_tokens > 0
    assert not report["answered"] and not report["sources"]


def test_chat_turn_that_asks_nothing_is_not_refused(gated: Served) -> None:
    for said in (["Hi!"], [PRESENT, "310", "Make that shorter."], [ABSENT, NOT_SURE, "Thanks!"]):
        text, report, usage = reply(gated, *said)
        assert not text.startswith(NOT_SURE) and usage.completion_tokens > 0
        assert report["answered"]


def test_conversation_goes_on_after_a_refusal(gated: Served) -> None:
    refused, _, _ = reply(gated, ABSENT)
    text, report, usage = reply(gated, ABSENT, refused, PRESENT)
    assert report["answered"] and report["sources"] and not text.startswith(NOT_SURE)
    assert usage == reply(gated, ABSENT, "", PRESENT)[2]  # its passages are not read as an answer


def test_mcp_refuses_and_lists_the_closest_passages(gated: Served) -> None:
    async def ask() -> None:
        async with gated.mcp() as client:
            answer = (await client.call_tool("ask", {"question": ABSENT})).structured_content
            assert answer["answer"].startswith(NOT_SURE) and not answer["answered"]
            assert answer["sources"]
            found = (await client.call_tool("search", {"phrase": ABSENT})).structured_content
            assert found["passages"] and not found["answered"]
            found = (await client.call_tool("search", {"phrase": PRESENT})).structured_content
            assert found["answered"]

    anyio.run(ask)
