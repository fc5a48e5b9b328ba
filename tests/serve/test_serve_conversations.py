"""Conversations that last: responses and completions as the official client asks for them, long
prompts, forgetting, and what a restart leaves.
"""

from pathlib import Path
from typing import Any

import openai
import pytest

from memstore.disk.format.document import is_of_prompt
from memstore.serve.settings import ServeSettings
from support.diary import ANSWER, LETTER, QUESTION
from support.serving import Served, serving
from support.tiny_decoder import word_reader

NEXT, SECOND = "What is the price of the brown mare?", "310"


def hidden(server: Served) -> list[str]:
    """The names of documents that hold what did not fit into prompts."""
    return [row.name for row in server.service.store.documents() if is_of_prompt(row.name)]


def test_a_completion_goes_on_with_the_text_as_it_is(served: Served) -> None:
    prompt = "The combination of the lime barn is"
    said = served.openai().completions.create(model="memstore", prompt=prompt, max_tokens=6)
    assert said.choices[0].text.startswith(f" {ANSWER}")
    assert said.choices[0].finish_reason == "length"
    assert said.usage.completion_tokens == 6
    parts = served.openai().completions.create(
        model="memstore", prompt=prompt, max_tokens=6, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == said.choices[0].text


def test_a_stop_text_ends_a_completion_and_is_not_part_of_it(served: Served) -> None:
    prompt = "The combination of the lime barn is"
    client = served.openai().completions
    whole = client.create(model="memstore", prompt=prompt, max_tokens=6).choices[0].text
    said = client.create(model="memstore", prompt=prompt, max_tokens=6, stop="67")
    assert said.choices[0].text == whole[: whole.index("67")]
    assert said.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stop", [" ", " 4467", " 44"])
def test_no_stop_text_is_found_in_space_that_nobody_sees(served: Served, stop: str) -> None:
    said = [{"role": "user", "content": QUESTION}]
    client = served.openai().chat.completions
    whole = client.create(model="memstore", messages=said, stop=stop)
    assert whole.choices[0].message.content == ANSWER
    streamed = client.create(model="memstore", messages=said, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == ANSWER


def test_the_same_seed_samples_the_same_and_top_p_bounds_what_is_sampled(served: Served) -> None:
    def said(**sampling: Any) -> str:
        client = served.openai().completions
        made = client.create(model="memstore", prompt="The valley", max_tokens=5, **sampling)
        text: str = made.choices[0].text
        return text

    assert said(temperature=1.5, seed=7) == said(temperature=1.5, seed=7)
    assert said(temperature=1.5, seed=7, top_p=1e-6) == said()
    assert len({said(temperature=1.5, seed=seed) for seed in range(3)}) > 1


def test_a_response_goes_on_with_the_one_before(served: Served) -> None:
    client = served.openai()
    first = client.responses.create(model="memstore", input=QUESTION)
    assert first.output_text == ANSWER
    second = client.responses.create(model="memstore", input=NEXT, previous_response_id=first.id)
    assert second.output_text.endswith(SECOND)
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    (item,) = client.responses.input_items.list(second.id).data
    assert item.content[0].text == NEXT
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(second.id, extra_query={"stream": "true"})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(
        model="memstore", input=QUESTION, previous_response_id=second.id
    )
    assert third.usage.input_tokens_details.cached_tokens > cached


def test_a_streamed_response_says_the_same(served: Served) -> None:
    with served.openai().responses.stream(model="memstore", input=QUESTION) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == ANSWER
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_a_named_conversation_is_forgotten_when_asked(served: Served) -> None:
    client = served.openai()
    name = client.conversations.create(metadata={"of": "barns"}).id
    client.responses.create(model="memstore", input=QUESTION, conversation=name)
    second = client.responses.create(model="memstore", input=NEXT, conversation=name)
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert [len(client.conversations.items.list(name).data)] == [4]
    client.conversations.delete(name)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="memstore", input=NEXT, conversation=name)


def test_what_was_said_is_listed_a_page_at_a_time_in_either_order(served: Served) -> None:
    client = served.openai()
    name = client.conversations.create().id
    for question in (QUESTION, NEXT, QUESTION):
        answer = client.responses.create(model="memstore", input=question, conversation=name)
    items = client.conversations.items
    rising = [item.id for item in items.list(name, order="asc")]
    assert len(rising) == 6 and [item.id for item in items.list(name)] == rising[::-1]
    for order, ids in (("asc", rising), ("desc", rising[::-1])):
        first = items.list(name, order=order, limit=4)
        assert [item.id for item in first.data] == ids[:4] and first.has_more
        rest = items.list(name, order=order, limit=4, after=ids[3])
        assert [item.id for item in rest.data] == ids[4:] and not rest.has_more
        before = {"before": ids[4]}
        (item,) = items.list(name, order=order, limit=1, extra_query=before).data
        assert item.id == ids[3]
    with pytest.raises(openai.BadRequestError, match="no object"):
        items.list(name, after="msg_none")
    given = [{"role": "user", "content": "First."}, {"role": "user", "content": QUESTION}]
    answer = client.responses.create(model="memstore", input=given, instructions="Be brief.")
    told = client.responses.input_items.list(answer.id, order="asc", limit=2).data
    assert [item.content[0].text for item in told] == ["First.", QUESTION]
    client.conversations.delete(name)


def test_a_header_names_the_conversation_of_a_client_that_sends_no_history(served: Served) -> None:
    client = served.openai()

    def ask(text: str) -> Any:
        return client.chat.completions.create(
            model="memstore",
            messages=[{"role": "user", "content": text}],
            extra_headers={"memstore-conversation": "barns"},
        ).usage

    first = ask(QUESTION)
    assert ask(NEXT).prompt_tokens_details.cached_tokens >= first.prompt_tokens
    client.conversations.delete("barns")
    assert ask(NEXT).prompt_tokens_details.cached_tokens == 0
    client.conversations.delete("barns")


def test_a_prompt_longer_than_the_window_is_remembered_and_not_read_again(tmp_path: Path) -> None:
    with serving(tmp_path / "mem", ServeSettings(window_tokens=64), diary=False) as server:
        client = server.openai()
        prompt = f"{LETTER * 3}\n\nWhat is the name of the new foal?"
        said = [{"role": "user", "content": prompt}]
        first = client.chat.completions.create(model="memstore", messages=said)
        assert "Clover" in first.choices[0].message.content
        assert len(hidden(server)) == 1
        assert server.service.store.ready() == []  # it is no part of "every document"
        again = client.chat.completions.create(model="memstore", messages=said)
        cached = again.usage.prompt_tokens_details.cached_tokens
        assert 100 < cached < again.usage.prompt_tokens == first.usage.prompt_tokens
        said.append({"role": "assistant", "content": again.choices[0].message.content})
        said.append({"role": "user", "content": "And what is in the jar?"})
        more = client.chat.completions.create(model="memstore", messages=said)
        assert more.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens
        assert len(hidden(server)) == 1


@pytest.mark.parametrize(
    "said",
    [
        [{"role": "user", "content": "\n" * 600 + QUESTION}],
        [{"role": "user", "content": QUESTION + " \n" * 1100}],
        [
            {"role": "user", "content": NEXT},
            {"role": "assistant", "content": " " * 6000},
            {"role": "user", "content": QUESTION},
        ],
    ],
)
def test_space_that_does_not_fit_is_not_remembered(served: Served, said: Any) -> None:
    before = len(hidden(served))
    answer = served.openai().chat.completions.create(model="memstore", messages=said)
    assert answer.choices[0].message.content.endswith(ANSWER)
    assert len(hidden(served)) == before


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path / "mem", ServeSettings(window_tokens=32)) as server:
        client = server.openai()
        name = client.conversations.create().id
        for question in (QUESTION, NEXT):
            client.responses.create(model="memstore", input=question, conversation=name)
        turns = client.conversations.items.list(name).data
    with serving(tmp_path / "mem", ServeSettings(window_tokens=32)) as server:
        client = server.openai()
        assert client.conversations.items.list(name).data == turns
        third = client.responses.create(model="memstore", input=QUESTION, conversation=name)
        assert third.output_text.endswith(ANSWER)
        assert len(hidden(server)) == 1  # what was said before is a document of the conversation
        client.conversations.delete(name)
        assert hidden(server) == []
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(third.id)


def test_a_reader_with_a_chat_template_is_told_instructions_and_goes_on(tmp_path: Path) -> None:
    reader = word_reader(top_k=2)
    with serving(tmp_path / "mem", ServeSettings(window_tokens=128), model=reader) as server:
        client = server.openai()

        def ask(said: list[Any]) -> Any:
            return client.chat.completions.create(model="memstore", messages=said, max_tokens=4)

        said: list[Any] = [{"role": "user", "content": QUESTION}]
        plain = ask(said)
        instructed = ask([{"role": "system", "content": "Be brief."}, *said])
        assert instructed.usage.prompt_tokens > plain.usage.prompt_tokens
        said.append({"role": "assistant", "content": plain.choices[0].message.content})
        said.append({"role": "user", "content": NEXT})
        warm = ask(said)
        assert warm.usage.prompt_tokens_details.cached_tokens >= plain.usage.prompt_tokens
        server.service.worker.call("test/1", server.service.sessions.forget).result()
        anew = ask(said)
        assert anew.usage.prompt_tokens_details.cached_tokens == 0
        said[-1]["content"] = f"{LETTER * 2}\n\n{NEXT}"
        long = ask(said)
        assert long.usage.prompt_tokens > 128 and len(hidden(server)) == 1
