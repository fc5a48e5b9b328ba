"""Prompts longer than the model's context window: the part in front is read as a document of its
conversation, the rest stays a prompt.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from memstore.disk.format.document import PROMPT
from memstore.model.adapter import ModelAdapter
from memstore.model.texts.source_text import Text
from memstore.serve.api_errors import ApiError
from memstore.serve.state.turns import Turn, keys_of

_CHARACTERS = 8  # of a token, at most, as far as it matters here
AHEAD = 1 << 18  # characters of a conversation, beyond which planning would hold others up


@dataclass
class Plan:
    """How a conversation is read anew. keys: of the history, after each turn; documents: what
    is read as such, named and checked; recent: the turns behind them; question: what is asked.
    """

    keys: list[bytes] = field(default_factory=list)
    documents: list[Text] = field(default_factory=list)
    recent: list[Turn] = field(default_factory=list)
    question: str = ""

    @property
    def names(self) -> list[str]:
        """Of the documents, each once."""
        return list(dict.fromkeys(text.name for text in self.documents))


class Window:
    """How much of a conversation is read as one prompt."""

    def __init__(
        self, reader: ModelAdapter, tokens: int | None, *, most: int | None = None
    ) -> None:
        """tokens: None for what the reader reads at once. most: tokens of a text, where what does
        not fit into the window cannot become a document: a conversation is then read text by text,
        however long it is; None: it can.
        """
        settings = reader.lookup
        chunk = settings.chunk_blocks * reader.shape.block_size
        self.tokens = tokens or (chunk if reader.keeps is None else settings.local_tokens)
        self._most = None if most is None else max(most, self.tokens)
        self._tokenizer = reader.tokenizer

    def count(self, text: str) -> int:
        """Tokens of a text; of one far beyond the window only that it is."""
        if len(text) > 2 * _CHARACTERS * self.tokens:
            return 2 * self.tokens
        return len(self._tokenizer.encode(text))

    def fits(self, text: str) -> bool:
        """Is a text short enough to be read as it is?"""
        return self.count(text) <= self.tokens

    def takes(self, turns: Sequence[Turn], question: str) -> bool:
        """Can an open session read these turns, and be asked? Raises ApiError for a text that
        never can.
        """
        texts = [text for turn in turns for text in (turn.question, turn.answer)] + [question]
        if self._most is None:
            return sum(map(self.count, texts)) <= self.tokens
        for text in texts:
            longest = 2 * _CHARACTERS * self._most
            if len(text) > longest or len(self._tokenizer.encode(text)) > self._most:
                raise ApiError(
                    400,
                    f"a text of the prompt is longer than {self._most:,} tokens, and this memory "
                    "is only read: it cannot remember what does not fit",
                    code="context_length_exceeded",
                )
        return True

    def split(self, text: str) -> tuple[str, str]:
        """A text that does not fit as what becomes a document, and its end: the last paragraph or
        line, where people put the question, if that fits into half of the window. No space stands
        behind it.
        """
        end = text[-_CHARACTERS * self.tokens :]
        for mark in ("\n\n", "\n"):
            tail = end.rpartition(mark)[2]
            if len(tail) < len(end) and len(self._tokenizer.encode(tail)) <= self.tokens // 2:
                break
        else:
            ids = self._tokenizer.encode(end)
            cut = self._tokenizer.decode(ids[-(self.tokens // 2) :])
            tail = cut.partition(" ")[2] or cut  # from a whole word on
        return text.removesuffix(tail), tail

    def plan_ahead(self, owner: str, turns: Sequence[Turn], question: str) -> Plan | None:
        """The plan of a conversation that is so long that making it takes a while; any thread may
        do so. None for others. Raises InvalidInput.
        """
        characters = len(question) + sum(len(turn.question) + len(turn.answer) for turn in turns)
        return self.plan(owner, turns, question) if characters > AHEAD else None

    def plan(self, owner: str, turns: Sequence[Turn], question: str) -> Plan:
        """How to read a conversation from its beginning. The same beginning gives the same
        documents, however it goes on. Raises InvalidInput for a document with nothing in it,
        ApiError for what does not fit and cannot become one.
        """
        plan = Plan(keys_of(owner, turns))
        if self._most is not None:
            self.takes(turns, question)
            plan.recent, plan.question = [*turns], question
            return plan

        def document(content: str) -> None:
            text = Text(content, PROMPT)
            text.check()
            text.name = name_of(owner, text)
            plan.documents.append(text)

        def short(text: str) -> str:
            if self.fits(text):
                return text
            text = text.rstrip()  # a prompt of many empty lines is a short one
            if self.fits(text):
                return text
            front, tail = self.split(text)
            if front.strip():
                document(front)
            return tail

        tokens = 0
        for turn in turns:
            kept = Turn(short(turn.question), short(turn.answer))
            plan.recent.append(kept)
            tokens += self.count(kept.question) + self.count(kept.answer)
            if tokens > self.tokens:
                document("\n".join(f"{turn.question}\n{turn.answer}" for turn in plan.recent))
                plan.recent, tokens = [], 0
        plan.question = short(question)
        return plan


def name_of(owner: str, text: Text) -> str:
    """The name of the hidden document of a prompt's part: the same text has the same one."""
    content = f"{owner}\n{text.digest}".encode("utf-8", "replace")
    return name_prefix(owner) + hashlib.blake2b(content, digest_size=12).hexdigest()


def name_prefix(owner: str) -> str:
    """How the names of all of an owner's hidden documents begin."""
    return PROMPT + hashlib.blake2b(owner.encode("utf-8", "replace"), digest_size=4).hexdigest()
