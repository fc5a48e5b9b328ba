"""The passages of a plan's documents: their text, and those where an answer stands."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from benchmarks.real.plan import Question, Stated
from memstore.hf.passage_adapter import LONGEST
from memstore.model.passages.passage_ingest import Passages
from memstore.model.tokenizer import TokenText

Block = tuple[str, int]  # of a document, the number


class Span(NamedTuple):
    """Characters first .. end - 1 of a text."""

    first: int
    end: int


Cut = Callable[[str], list[Span]]
"""A text -> where each of its passages stands."""


def passages(tokenizer: TokenText, size: int = 64, most: int = LONGEST) -> Cut:
    """As a memory of a model with this tokenizer cuts them."""

    def cut(text: str) -> list[Span]:
        found = Passages(tokenizer, [text], size=size, most=most)
        return [Span(one.start, one.end) for one in found]

    return cut


class Blocks:
    """Documents cut into passages, as a memory cuts them, when they are needed."""

    def __init__(self, cut: Cut, documents: Mapping[str, str]) -> None:
        self.cut, self.documents = cut, documents
        self._cut: dict[str, list[Span]] = {}

    def spans(self, document: str) -> list[Span]:
        """Where each block stands."""
        if document not in self._cut:
            self._cut[document] = self.cut(self.documents[document])
        return self._cut[document]

    def scope(self, documents: Iterable[str]) -> list[Block]:
        """All blocks of some documents, in the order of the text."""
        return [(name, number) for name in documents for number in range(len(self.spans(name)))]

    def text(self, block: Block) -> str:
        """The text of a block."""
        first, end = self.spans(block[0])[block[1]]
        return self.documents[block[0]][first:end]

    def texts(self, blocks: Sequence[Block]) -> list[str]:
        """The texts of blocks, in their order; blocks that follow one another are one text."""
        joined: list[tuple[str, Span]] = []
        for at, (name, number) in enumerate(blocks):
            span = self.spans(name)[number]
            if at and blocks[at - 1] == (name, number - 1):
                span = joined.pop()[1]._replace(end=span.end)
            joined.append((name, span))
        return [self.documents[name][span.first : span.end] for name, span in joined]

    def right(self, question: Question) -> list[Block]:
        """The blocks on which the sentences that are needed stand, in the order of the text."""
        found = set(chain.from_iterable(self.needed(question)))
        return sorted(found, key=lambda block: (question.documents.index(block[0]), block[1]))

    def needed(self, question: Question) -> list[list[Block]]:
        """Of each sentence that is needed, the blocks on which it stands."""
        return [self._on(stated) for stated in question.stated]

    def values(self, question: Question) -> list[Block]:
        """The block in which each value that is asked for begins."""
        return [
            self._on(Stated(one.document, one.value, one.value + 1, one.value))[0]
            for one in question.stated
            if one.value is not None
        ]

    def _on(self, stated: Stated) -> list[Block]:
        spans = self.spans(stated.document)
        return [
            (stated.document, number)
            for number, (first, end) in enumerate(spans)
            if first < stated.stop and end > stated.start
        ]
