"""A reader as what selectors are made for: its passages, and rows of ids that it reads alone behind
its prefix, as it reads passages.
"""

from collections.abc import Sequence

from memstore.disk.format.text_parts import Passage
from memstore.model.passages.adaptation import MadeFor
from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.passage_ingest import passages_of
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.selector import Captured, Captures
from memstore.training.selectors.make_selector import Subject


def subject_of(reader: PassageModel, made_for: MadeFor) -> Subject:
    """The reader, ready to be adapted. made_for: its sizes."""

    def cut(text: str) -> list[Passage]:
        return list(passages_of(reader, [text]))

    def walk(rows: Sequence[Sequence[int]], captures: Captures) -> list[Captured]:
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # fuller passes
        read = encode(
            reader, (rows[row] for row in order), layers=captures.layers, captures=captures
        )
        shown = dict(zip(order, (one.captured for one in read), strict=True))
        return [shown[row] for row in range(len(rows))]

    return Subject(made_for, reader.tokenizer, cut, walk, reader.passage_tokens)
