"""A text as passages: whole sentences, filled up to a size, one after the other."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from memstore.disk.format.citations import PAGE, Place
from memstore.disk.format.text_parts import Passage
from memstore.model.adapter import TextTokenizer
from memstore.model.passages.cutting.filling import anchors, fill, prices
from memstore.model.passages.cutting.token_counts import Group, Measure
from memstore.model.texts.altered_text import report_altered
from memstore.model.texts.passage_context import Context, Contexts
from memstore.model.texts.sentences import Level, Unit, divide, split

_WINDOW = 1 << 17  # characters that are looked at together
_REACH = 4096  # characters on each side of an anchor without a better one


class Passages:
    """The passages of a text that arrives in pieces, and what stands behind the last.

    size: tokens that a passage is filled up to; most: that none exceeds. places: of the whole
    document. start, gap: the text follows a document of so many characters, of which gap is the
    tail. context: what is read in front, up to `size` tokens of it. name: of the document, to
    report a tokenizer that alters its text; None for no report. While it is iterated, `characters`
    is where the last passage ended; afterwards, `tail` is the text behind it.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        pieces: Iterable[str],
        places: Sequence[Place] = (),
        *,
        size: int,
        most: int,
        start: int = 0,
        gap: str = "",
        context: Context = "none",
        name: str | None = None,
    ) -> None:
        self.characters, self.tail = start - len(gap), gap
        self._pieces, self._size, self._most = pieces, size, most
        self._begins = start  # of the text that was not cut yet
        self._level = Level.PARAGRAPH  # what it begins
        self._gap = [gap]  # what stands between the last passage and that
        self._tokenizer, self._measure = tokenizer, Measure(tokenizer, most)
        self._name, self._altered = name, False
        self._headings = [place.start for place in places if place.level != PAGE and place.name]
        self._contexts = Contexts(context, places)

    def __iter__(self) -> Iterator[Passage]:
        text, at, pieces = "", 0, iter(self._pieces)
        while True:
            arrived = [text[at:]]
            missing = _WINDOW + 1 - len(arrived[0])
            while missing > 0 and (piece := next(pieces, None)) is not None:
                arrived.append(piece)
                missing -= len(piece)
            text, at = "".join(arrived), 0
            while len(text) - at > _WINDOW:
                at += yield from self._cut(text[at : at + _WINDOW], last=False)
            if missing > 0:
                yield from self._cut(text[at:], last=True)
                self.tail = "".join(self._gap)
                return

    def _cut(self, text: str, last: bool) -> Generator[Passage, None, int]:
        """The passages of a window up to its last anchor; returns the characters before that."""
        white = len(text) - len(text.lstrip())
        if white == len(text) or (white and not last):
            self._gap.append(text[:white])
            self._begins += white
            return white
        begins = self._begins
        known = (start - begins for start in self._headings)
        units = list(split(text, frozenset(at for at in known if at >= 0), self._level))
        counts = self._measure.count(text, units)
        price = prices(text, units, counts, self._size)
        ends = anchors(units, price, _REACH)
        if last:
            ends.append(len(units))
        else:  # what is an anchor depends on the text behind it, too
            ends = [end for end in ends if units[end].start + 2 * _REACH <= len(text)]
            if not ends:  # no end far and wide
                units = _divided(text, units)
                counts = self._measure.count(text, units)
                price = prices(text, units, counts, self._size)
                half = range(max(1, len(units) // 2), len(units))
                ends.append(min(half, key=price.__getitem__, default=1))
        groups = list(self._groups(text, units, counts, [0, *ends]))
        yield from self._passages(text, groups)
        end = ends[-1]
        done = units[end].start if end < len(units) else len(text)
        self._level = units[end].level if end < len(units) else Level.PARAGRAPH
        self._gap.append(text[self.characters - begins : done])
        self._begins = begins + done
        return done

    def _groups(
        self, text: str, units: Sequence[Unit], counts: Sequence[int], ends: Sequence[int]
    ) -> Iterator[Group]:
        """The units of each passage; counts: tokens of each unit; ends: those that stand fast."""
        for first, end in pairwise(ends):
            some, lengths = self._measure.shortened(text, units[first:end], counts[first:end])
            price = prices(text, some, lengths, self._size)
            for begin, close in fill(some, lengths, price, self._size, self._most):
                fits = sum(lengths[begin:close]) <= self._size
                yield Group(some[begin:close], self._size if fits else self._most)

    def _passages(self, text: str, groups: Sequence[Group]) -> Iterator[Passage]:
        begins, made = self._begins, self._measure.encoded(text, groups)
        contexts = [self._contexts.before(text, units, begins) for units, _ in made]
        owns = [text[units[0].start : units[-1].end] for units, _ in made]
        leads = self._measure.led(owns, [ids for _, ids in made], contexts, self._size)
        for (units, _), own, (ids, lead) in zip(made, owns, leads):
            start = begins + units[0].start
            self._gap.append(text[max(0, self.characters - begins) : units[0].start])
            if not ids:  # nothing that the model could read
                self._gap.append(own)
                self.characters = start + len(own)
                continue
            if self._name is not None and not self._altered:
                read = self._tokenizer.decode(ids[lead:])
                self._altered = report_altered(self._name, own, read)
            gap = "".join(self._gap)
            self._gap = []
            self.characters = start + len(own)
            yield Passage(np.array(ids, dtype=np.int64), lead, gap, start, len(own))


def _divided(text: str, units: list[Unit]) -> list[Unit]:
    """Units of which the last may be left for later: one that fills all is divided."""
    if len(units) > 1 or units[0].end < len(text):
        return units
    for level in (Level.CLAUSE, Level.WORD, Level.CHARACTER):
        if len(parts := list(divide(text, units[0], level))) > 1:
            return parts
    return units
