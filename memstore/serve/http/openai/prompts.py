"""Prompts: the messages of a request as the turns of a conversation and a question, and the
parameters of all endpoints that generate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memstore.model.model_api import ModelAPI
from memstore.serve.answering.answers import Answers, Question
from memstore.serve.answering.long_prompts import Window
from memstore.serve.answering.sampling import Sampling, stop_texts
from memstore.serve.api_errors import ApiError
from memstore.serve.api_keys import Access
from memstore.serve.document_access import DocumentAccess
from memstore.serve.http.openai.models import ServedModel
from memstore.serve.state.conversations import Conversations
from memstore.serve.state.turns import Turn
from memstore.serve.strict import Neutral, Strict, entries


@dataclass(frozen=True)
class Backend:
    """What the endpoints that generate have of a server. most_tokens: of one answer."""

    model: ServedModel
    reader: ModelAPI
    documents: DocumentAccess
    conversations: Conversations
    window: Window
    answers: Answers
    most_tokens: int


class TextPart(Strict):
    """A part of a message; only text is understood."""

    neutral: ClassVar[Neutral] = {"annotations": (None, []), "logprobs": (None, [])}
    type: Literal["text", "input_text", "output_text"]
    text: str
    # as an earlier answer had them
    annotations: Annotated[list[dict[str, Any]], entries()] | None = None


Content = str | Annotated[list[TextPart], entries()]
Tokens = Annotated[int, Field(ge=1, lt=2**31)]
Stop = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], entries(4)]
)


class Options(Strict):
    """The `memstore` field of a request. documents: names of those to be asked; None = all. trace:
    tell all of what was read. from_memory: refuse where the gate finds no answer in the memory;
    False has the model answer without it.
    """

    documents: Annotated[list[str], entries()] | None = None
    trace: bool = False
    max_sources: int = Field(default=5, ge=0, le=64)
    from_memory: bool = True


class StreamOptions(Strict):
    """What is streamed beside the text."""

    neutral: ClassVar[Neutral] = {"include_obfuscation": (None, False)}
    include_usage: bool = False


class Generating(Strict):
    """What requests say of how an answer is generated."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    memstore: Options = Options()

    def sampling(
        self,
        backend: Backend,
        most: int | None,
        *,
        seed: int | None = None,
        stop: Stop | None = None,
        raw: bool = False,
    ) -> Sampling:
        """How it is generated. most: tokens, if the request says so; raw: what follows the prompt,
        as it is, and not an answer.
        """
        defaults = backend.reader.answering
        return Sampling(
            max_new_tokens=min(most or defaults.max_new_tokens, backend.most_tokens),
            temperature=self.temperature or 0.0,
            top_p=self.top_p or 1.0,
            seed=seed,
            stop=stop_texts(stop),
            sentence=defaults.until_sentence and not raw,
            raw=raw,
        )

    def question(
        self,
        backend: Backend,
        access: Access,
        text: str,
        sampling: Sampling,
        turns: Sequence[Turn] = (),
        *,
        documents: Sequence[str] | None = None,
        **more: Any,
    ) -> Question:
        """A question behind earlier turns. documents: those of a tool, or else those
        that the request names; more: of the Question. Raises ApiError, InvalidInput.
        """
        all_documents = None
        if documents is None:
            documents = backend.documents.readable(access, self.memstore.documents)
            if self.memstore.documents is None:
                all_documents = partial(backend.documents.readable, access)
        return Question(
            text,
            sampling,
            documents,
            all_documents,
            access.name,
            turns,
            backend.window.plan_ahead(access.name, turns, text),
            trace=self.memstore.trace,
            may_read=access.sees,
            from_memory=self.memstore.from_memory,
            **{"max_sources": self.memstore.max_sources, **more},
        )


def text_of(content: Content | None) -> str:
    """The text of a message."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def as_turns(
    messages: Sequence[tuple[str, Content | None]], *, templated: bool, param: str = "messages"
) -> tuple[list[Turn], str]:
    """Earlier turns, and the question that is asked: of messages (role, content).

    Instructions (of role system or developer) stand before what the user says next, for a reader
    with a chat template; one without takes what the user says alone. Raises ApiError for messages
    that do not end with a question.
    """
    turns: list[Turn] = []
    texts: list[str] = []  # of the user, since the last answer
    asked = False
    for role, content in messages:
        text = text_of(content)
        if role == "assistant":
            turns.append(Turn("\n\n".join(texts), text))
            texts, asked = [], False
        elif role == "user":
            texts.append(text)
            asked = asked or bool(text.strip())
        elif templated and text.strip():
            texts.append(text)
    if not asked:
        raise ApiError(
            400,
            "the last message must be the user's, and not empty",
            code="invalid_value",
            param=param,
        )
    return turns, "\n\n".join(texts)
