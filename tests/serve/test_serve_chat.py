"""Chat completions as the official client asks for them."""

from support.diary import ANSWER, QUESTION
from support.serving import Served


def test_the_model_is_listed(served: Served) -> None:
    (model,) = served.openai().models.list().data
    assert model.id == "memstore"


def test_a_chat_is_answered_from_the_memory(served: Served) -> None:
    said = served.openai().chat.completions.create(
        model="memstore", messages=[{"role": "user", "content": QUESTION}]
    )
    assert said.choices[0].message.content == ANSWER
    assert said.choices[0].finish_reason == "stop"
    assert said.usage.prompt_tokens > 5
    assert said.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_says_the_same(served: Served) -> None:
    chunks = list(
        served.openai().chat.completions.create(
            model="memstore",
            messages=[{"role": "user", "content": QUESTION}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == ANSWER
    assert chunks[-1].usage.completion_tokens > 0


def test_a_history_that_was_said_before_is_not_read_again(served: Served) -> None:
    client = served.openai()
    said = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model="memstore", messages=said)
    said += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "What is the price of the brown mare?"},
    ]
    second = client.chat.completions.create(model="memstore", messages=said)
    assert second.choices[0].message.content.endswith("310")
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    other = client.chat.completions.create(model="memstore", messages=[said[0], *said[:1], said[2]])
    assert other.usage.prompt_tokens_details.cached_tokens == 0
