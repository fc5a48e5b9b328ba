"""The blocks of a plan's documents: their text, and those where an answer stands."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from benchmarks.real.hay import Offsets
from benchmarks.real.plan import Question, Stated

Block = tuple[str, int]  # of a document, the number


class Blocks:
    """Documents cut into blocks of `size` tokens, as a memory cuts them, when they are needed."""

    def __init__(self, offsets: Offsets, documents: Mapping[str, str], size: int = 64) -> None:
        self.offsets, self.documents, self.size = offsets, documents, size
        self._cut: dict[str, list[tuple[int, int]]] = {}

    def spans(self, document: str) -> list[tuple[int, int]]:
        """The characters (first, end) of each block."""
        if document not in self._cut:
            tokens = self.offsets(self.documents[document])
            firsts = [tokens[at][0] for at in range(0, len(tokens), self.size)]
            ends = [*firsts[1:], len(self.documents[document])]
            self._cut[document] = list(zip(firsts, ends))
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
        joined: list[str] = []
        for at, (name, number) in enumerate(blocks):
            if at and blocks[at - 1] == (name, number - 1):
                joined[-1] += self.text((name, number))
            else:
                joined.append(self.text((name, number)))
        return joined

    def right(self, question: Question) -> list[Block]:
        """The blocks on which the sentences that are needed stand, in the order of the text."""
        found = set(chain.from_iterable(self.needed(question)))
        return sorted(found, key=lambda block: (question.documents.index(block[0]), block[1]))

    def needed(self, question: Question) -> list[list[Block]]:
        """Of each sentence that is needed, the blocks on which it stands."""
        return [self._on(stated) for stated in question.stated]

    def values(self, question: Question) -> list[Block]:
        """The block in which each value that is asked for begins."""
        return [self._on(_only_value(stated))[0] for stated in question.stated]

    def _on(self, stated: Stated) -> list[Block]:
        spans = self.spans(stated.document)
        return [
            (stated.document, number)
            for number, (first, end) in enumerate(spans)
            if first < stated.stop and end > stated.start
        ]


def _only_value(stated: Stated) -> Stated:
    return Stated(stated.document, stated.value, stated.value + 1, stated.value)
