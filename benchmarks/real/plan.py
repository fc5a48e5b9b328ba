"""What is asked of a real model's memory: documents, questions, and where in the text the answer
stands.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

Rule = Literal["forced", "all", "any"]


@dataclass(frozen=True)
class Stated:
    """Where a document says what a question asks for: characters of its text, and the first one of
    the value among them; None where the sentence is needed but has no value.
    """

    document: str
    start: int
    stop: int
    value: int | None


@dataclass(frozen=True)
class Question:
    """What is asked of some documents, in their order.

    text: the question as it is typed. primed: the words that begin its answer, if it is begun for
    the model. answers: the parts of the right answer; none where the documents do not tell it.
    rule: "forced", right if the only part is what greedy decoding goes on with after `primed`;
    "all" or "any", the parts that occur in the answer generated. most: tokens to generate at most.
    stated: every sentence that is needed.
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
    most: int = 24

    @property
    def following(self) -> str:
        """What has to follow `primed` if the answer is forced."""
        return self.answers[0] if self.primed.endswith(" ") else " " + self.answers[0]

    def marks(self, generated: str) -> float:
        """The share of the answer's parts that occur in a text as words of their own; 1 or 0 by the
        rule "any".
        """
        found = [_occurs(part, generated) for part in self.answers]
        return float(any(found)) if self.rule == "any" else sum(found) / max(1, len(found))


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

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Read what `save` wrote."""
        content = json.loads(path.read_text())
        questions = []
        for row in content["questions"]:
            row["stated"] = tuple(Stated(**stated) for stated in row["stated"])
            row["documents"], row["answers"] = tuple(row["documents"]), tuple(row["answers"])
            questions.append(Question(**row))
        return cls(content["documents"], questions)


def _occurs(part: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part.strip())}(?!\w)", text, re.IGNORECASE) is not None
