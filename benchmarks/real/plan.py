"""What is asked of documents: questions, and where in the text the answer is."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

Rule = Literal["forced", "all"]


@dataclass(frozen=True)
class Stated:
    """Characters start .. stop - 1 of a document that state what a question asks for."""

    document: str
    start: int
    stop: int


@dataclass(frozen=True)
class Question:
    """What is asked of some documents, in their order.

    text: the question as it is typed. primed: the words that begin its answer, if it is begun for
    the model. answers: the parts of the right answer; none where the documents do not hold it.
    rule: "forced", right if the only part is what greedy decoding goes on with after `primed`;
    "all", the parts that occur in the generated answer. stated: every sentence that is needed.
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
