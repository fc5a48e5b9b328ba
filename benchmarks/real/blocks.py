"""The passages of documents: their text, and those where an answer is."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.real.plan import Question

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
