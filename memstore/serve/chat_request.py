"""The request of a chat completion: parameters, earlier turns and a question."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field

from memstore.model.answer import NOT_SURE
from memstore.serve.access import Access
from memstore.serve.answers import Question
from memstore.serve.api_errors import ApiError
from memstore.serve.requests import Lenient, Strict, entries
from memstore.serve.service import Service

_TEXT = ("text", "input_text", "output_text")


class Part(Lenient):
    """A part of a message; only text is supported."""

    type: str
    text: str = ""


Content = str | Annotated[list[Part], entries()]
Tokens = Annotated[int, Field(ge=1, lt=2**31)]
Stop = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], entries(4)]
)


class Message(Lenient):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content = ""


class StreamOptions(Lenient):
    """Options of a stream."""

    include_usage: bool = False


class Options(Strict):
    """The `memstore` field of a request. documents: names of documents to search, None for all;
    trace: report the sources of every token; from_memory: refuse if the gate finds no answer in
    the memory; False lets the model answer without it.
    """

    documents: Annotated[list[str], entries()] | None = None
    trace: bool = False
    max_sources: int = Field(default=5, ge=0, le=64)
    from_memory: bool = True


class ChatRequest(Lenient):
    """The parameters. The last ones would change the answer's meaning, and accept only their
    neutral values; unknown parameters are ignored.
    """

    model: str
    messages: Annotated[list[Message], entries(least=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    memstore: Options = Options()

    n: Literal[1] = 1
    tool_choice: Literal["auto", "none"] = "none"
    function_call: Literal["auto", "none"] = "none"
    response_format: dict[str, Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    audio: None = None
    web_search_options: None = None

    def question(self, service: Service, access: Access) -> Question:
        """The question of the request. Raises ApiError, InvalidInput."""
        turns, text = as_turns(self.messages, templated=service.model.templated)
        for part in [text, *chain(*turns)]:
            service.documents.check_length(part, "messages")
        default = service.model.answering.max_new_tokens
        most = self.max_completion_tokens or self.max_tokens or default
        settings = {
            "max_new_tokens": min(most, service.settings.max_tokens),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "max_sources": self.memstore.max_sources,
            "from_memory": self.memstore.from_memory,
        }
        return Question(
            text,
            settings,
            service.documents.chosen(access, self.memstore.documents),
            turns,
            trace=self.memstore.trace,
            may_read=access.sees,
        )


def as_turns(messages: Sequence[Message], *, templated: bool) -> tuple[list[tuple[str, str]], str]:
    """Earlier turns, and the question.

    Instructions (role system or developer) are put before the user's next message, for a model with
    a chat template; a model without one reads only the user's messages. A refusal is no answer: its
    passages would be read as one. Raises ApiError if the last message is not a question of the
    user.
    """
    turns: list[tuple[str, str]] = []
    texts: list[str] = []  # messages of the user since the last answer
    asked = False
    for message in messages:
        text = _text_of(message.content)
        if message.role == "assistant":
            turns.append(("\n\n".join(texts), "" if text.startswith(NOT_SURE) else text))
            texts, asked = [], False
        elif message.role == "user":
            texts.append(text)
            asked = asked or bool(text.strip())
        elif templated and text.strip():
            texts.append(text)
    if not asked:
        raise ApiError(400, "the last message must be the user's, and not empty", param="messages")
    return turns, "\n\n".join(texts)


def _text_of(content: Content) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXT:
            message = f"a message has a part of type {part.type!r}; this server reads text only"
            raise ApiError(400, message, param="messages")
    return "\n".join(part.text for part in content)
