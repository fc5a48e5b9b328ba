"""What is asked of documents: questions, where in the text the answer is, and in which passages."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal, NamedTuple

Rule = Literal["forced", "all"]


@dataclass(frozen=True)
class Stated:
    """Characters start .. stop - 1 of a document that state what a question asks for."""

    document: str
    start: int
    stop: int


@dataclass(frozen=True)
class Question:
    """A question about some documents, which are given in order.

    text: the question as a user types it. primed: the words that begin its answer, if the model
    gets them. answers: the parts of the right answer; empty if the documents do not have it. rule:
    "forced" is right if greedy decoding continues `primed` with the only part; "all" counts the
    parts that are in the generated answer. stated: every sentence that is needed.
    """

    name: str
    task: str
    length: int
    documents: tuple[str, ...]
    text: str
    primed: str
    answers: tuple[str, ...]
    rule: Rule
    stated: tuple[Stated, ...] = ()

    @property
    def following(self) -> str:
        """What has to follow `primed` if the answer is forced."""
        return self.answers[0] if self.primed.endswith(" ") else " " + self.answers[0]

    def marks(self, generated: str) -> float:
        """The share of the answer's parts that occur in a text as words of their own."""
        found = [_occurs(part, generated) for part in self.answers]
        return sum(found) / max(1, len(found))


@dataclass
class Plan:
    """Documents by name, and the questions about them."""

    documents: dict[str, str] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)

    def of(
        self, tasks: Iterable[str], lengths: Iterable[int], most: int | None = None
    ) -> list[Question]:
        """The questions of some tasks and lengths; the first `most` of each task and length."""
        found = []
        for task, length in product(dict.fromkeys(tasks), dict.fromkeys(lengths)):
            found += [q for q in self.questions if (q.task, q.length) == (task, length)][:most]
        return found


def _occurs(part: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part.strip())}(?!\w)", text, re.IGNORECASE) is not None


Block = tuple[str, int]  # of a document, the number


class Span(NamedTuple):
    """Characters start .. end - 1 of a text."""

    start: int
    end: int


class Blocks:
    """Documents cut into passages when they are needed."""

    def __init__(self, cut: Callable[[str], Iterable[Any]], documents: Mapping[str, str]) -> None:
        """cut: a text -> its passages, each with `start` and `end`, the characters that it has."""
        self.cut, self.documents = cut, documents
        self._cut: dict[str, list[Any]] = {}

    def passages(self, document: str) -> Sequence[Any]:
        """What `cut` makes of a document."""
        if document not in self._cut:
            self._cut[document] = list(self.cut(self.documents[document]))
        return self._cut[document]

    def scope(self, documents: Iterable[str]) -> list[Block]:
        """All blocks of some documents, in the order of the text."""
        return [(name, number) for name in documents for number in range(len(self.passages(name)))]

    def text(self, block: Block) -> str:
        """The text of a block."""
        one = self.passages(block[0])[block[1]]
        return self.documents[block[0]][one.start : one.end]

    def right(self, question: Question) -> list[Block]:
        """The blocks with the sentences that are needed, in the order of the text."""
        return [
            (name, number)
            for name in question.documents
            for number, one in enumerate(self.passages(name))
            if any(
                stated.document == name and one.start < stated.stop and one.end > stated.start
                for stated in question.stated
            )
        ]
