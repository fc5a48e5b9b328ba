"""Ingest by a passage model: a text cut into passages of whole sentences, each passage computed and
committed.

As many sentences as fit stand together, with ends that follow from the text next to them, so that
an edit changes only its neighbours. Greedy filling would carry a shift on and on. Here every end
has a price that the words on both sides draw (a hash), and the cheapest way through the text is
taken: two ways meet again at the next end that is cheap for both. Ends that are the cheapest of a
long stretch are on every way (anchors), so that nothing depends on more text than lies between two
of them.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice, pairwise, tee
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from memstore.disk.format.citations import PAGE, Place, Places
from memstore.disk.tables.texts import Keep, Passage
from memstore.index.word_index import around
from memstore.model.passages.passage_encoding import Encoded, encode
from memstore.model.passages.repositioned_attention import PassageModel
from memstore.model.sentences import Level, Unit, divide, split
from memstore.model.source_text import Text
from memstore.model.tokenizer import TokenText
from memstore.store.write.writer import DocumentWriter, Known

_LONG = 64  # characters for each token that may be there: such a part is not counted


class Group(NamedTuple):
    """Units that stand together, and the tokens that they may have."""

    units: Sequence[Unit]
    limit: int


class Measure:
    """Counts with a tokenizer; most: tokens that no passage exceeds."""

    def __init__(self, tokenizer: TokenText, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._gaps = {"": 0, " ": 0}  # tokens of what stands between two units

    def count(self, text: str, units: Sequence[Unit]) -> list[int]:
        """About the tokens of each unit and of what stands before it; more than `most`, told as
        they are, for what is far too long.
        """
        parts, gaps, end = list[str](), list[str](), 0
        for unit in units:
            gap = text[end : unit.start] if end else ""
            long = unit.end - unit.start > _LONG * self._most
            parts.append("" if long else text[unit.start - (gap == " ") : unit.end])
            gaps.append(gap[:_LONG])
            end = unit.end
        missing = list({gap for gap in gaps if gap not in self._gaps})
        found = self._tokenizer.encode_batch(missing + parts)
        new = dict(zip(missing, map(len, found)))
        if len(self._gaps) < 1000:
            self._gaps |= new
        return [
            len(ids) + (new.get(gap) or self._gaps.get(gap, 0)) if part else unit.end - unit.start
            for unit, part, gap, ids in zip(units, parts, gaps, found[len(missing) :])
        ]

    def shortened(
        self, text: str, units: Sequence[Unit], counts: Sequence[int]
    ) -> tuple[Sequence[Unit], Sequence[int]]:
        """The units with those divided that have more than `most` tokens, and their counts: in
        clauses, where that is not enough in words, and at last in halves.
        """
        level = Level.CLAUSE
        while max(counts, default=0) > self._most:
            parts = [
                list(divide(text, unit, level)) if count > self._most else [unit]
                for unit, count in zip(units, counts)
            ]
            changed = [part for some in parts if len(some) > 1 for part in some]
            if not changed and level is Level.CHARACTER:
                break
            new = iter(self.count(text, changed))
            counts = [
                length
                for some, count in zip(parts, counts)
                for length in ([next(new) for _ in some] if len(some) > 1 else [count])
            ]
            units = [part for some in parts for part in some]
            level = Level.WORD if level is Level.CLAUSE else Level.CHARACTER
        return units, counts

    def encoded(self, text: str, groups: Iterable[Group]) -> list[tuple[Sequence[Unit], list[int]]]:
        """The groups' units and ids, those taken apart that have more tokens than they may: counts
        of parts need not add up.
        """
        made, rest = list[tuple[Sequence[Unit], list[int]]](), list(groups)
        owns = [text[units[0].start : units[-1].end] for units, _ in rest]
        for (units, limit), ids in zip(rest, self._tokenizer.encode_batch(owns)):
            if len(ids) <= limit or (limit < self._most and len(units) == 1):
                made.append((units, ids))
            elif parts := _halves(text, units):
                limit = limit if len(units) > 1 else self._most
                made += self.encoded(text, [Group(part, self._most) for part in parts])
            else:
                made.append((units, ids[: self._most]))
        return made


def _parts(text: str, unit: Unit) -> list[Unit]:
    """A unit in clauses, in words or in halves: the first of these that divides it; the unit itself
    where it is a single character.
    """
    for level in (Level.CLAUSE, Level.WORD, Level.CHARACTER):
        if len(parts := list(divide(text, unit, level))) > 1:
            return parts
    return [unit]


def _halves(text: str, units: Sequence[Unit]) -> list[Sequence[Unit]]:
    """Two groups, cut at the best end, the nearest to the middle; [] for a single character."""
    if len(units) == 1 and len(units := _parts(text, units[0])) == 1:
        return []
    middle = len(units) / 2
    at = max(range(1, len(units)), key=lambda n: (units[n].level, -abs(n - middle)))
    return [units[:at], units[at:]]


# What an end costs at most where it is drawn, in passages, by what begins there. It is drawn as the
# square of an even number: the many cheap ones are near each other, the few dear ones are avoided.
_PRICE = {Level.HEADING: 0.0, Level.PARAGRAPH: 25.0, Level.LINE: 50.0}
_SENTENCE = 100.0
_INSIDE = {Level.CLAUSE: 100.0, Level.WORD: 200.0, Level.CHARACTER: 400.0}  # more, in a sentence
_AFTER_HEADING = 1000.0  # more, between a heading and what it stands over
_WHOLE = 150.0  # more, in a paragraph that a passage holds
_LOOSE = 0.2  # of a passage that is empty
_NEAR = 64  # characters on each side that draw a price


def prices(text: str, units: Sequence[Unit], tokens: Sequence[int], size: int) -> list[float]:
    """What it costs to begin a passage with each unit, in passages. tokens: of each unit."""
    found = [0.0]
    inside = _in_whole_paragraphs(units, tokens, size)
    for before, unit in pairwise(units):
        beside = text[max(before.start, before.end - _NEAR) : before.end] + "\n"
        beside += text[unit.start : min(unit.end, unit.start + _NEAR)]
        drawn = xxh3_64_intdigest(beside.encode("utf-8", "surrogatepass")) / 2**64
        price = _PRICE.get(unit.level, _SENTENCE) * drawn * drawn + _INSIDE.get(unit.level, 0.0)
        found.append(price + _AFTER_HEADING * before.heading + _WHOLE * inside[len(found)])
    return found


def _in_whole_paragraphs(units: Sequence[Unit], tokens: Sequence[int], size: int) -> list[bool]:
    """Of each unit, does it stand behind the first of a paragraph of at most `size` tokens?"""
    begins = [at for at, unit in enumerate(units) if not at or unit.level >= Level.PARAGRAPH]
    inside = [False] * len(units)
    for first, end in pairwise([*begins, len(units)]):
        if sum(tokens[first:end]) <= size:
            inside[first + 1 : end] = [True] * (end - first - 1)
    return inside


def anchors(units: Sequence[Unit], price: Sequence[float], reach: int) -> list[int]:
    """Where passages begin whatever stands around, as numbers of units: at headings, and at prices
    that are the least of `reach` characters on both sides.
    """
    count, found = len(units), []
    # nearest cheaper end on each side, by a stack; the first of equals wins
    left, right, stack = [-1] * count, [count] * count, list[int]()
    for number in range(1, count):
        while stack and price[stack[-1]] > price[number]:
            right[stack.pop()] = number
        left[number] = stack[-1] if stack else -1
        stack.append(number)
    for number in range(1, count):
        unit, before, after = units[number], left[number], right[number]
        if unit.level is Level.HEADING:
            far = not units[number - 1].heading
        else:
            far = (before < 0 or unit.start - units[before].start > reach) and (
                after == count or units[after].start - unit.start > reach
            )
        if far:
            found.append(number)
    return found


def fill(
    units: Sequence[Unit], tokens: Sequence[int], price: Sequence[float], size: int, most: int
) -> Iterator[tuple[int, int]]:
    """Units [first, end) of each passage, of at most `size` tokens; one unit, or a heading and what
    follows it, of at most `most`.
    """
    count = len(units)
    best, begins = [0.0] * (count + 1), [0] * (count + 1)
    for end in range(1, count + 1):
        total, least, chosen = 0, float("inf"), end - 1
        for first in range(end - 1, -1, -1):
            total += tokens[first]
            if total > size and first < end - 1:
                above = all(unit.heading for unit in units[first : end - 1])
                if total > most or not above:
                    break
            empty = max(0.0, 1 - total / size)
            cost = best[first] + 1 + price[first] * (first > 0) + _LOOSE * empty * empty
            if cost < least:
                least, chosen = cost, first
        best[end], begins[end] = least, chosen
    ends = [count]
    while ends[-1]:
        ends.append(begins[ends[-1]])
    ends.reverse()
    yield from pairwise(ends)


_WINDOW = 1 << 17  # characters that are looked at together
_REACH = 4096  # characters on each side of an anchor without a better one


class Passages:
    """The passages of a text.

    size: tokens that a passage is filled up to; most: that none exceeds. places: of the text.
    """

    def __init__(
        self, tokenizer: TokenText, text: str, places: Sequence[Place] = (), *, size: int, most: int
    ) -> None:
        self._text, self._size, self._most = text, size, most
        self._ended = 0  # characters up to the end of the last passage
        self._level = Level.PARAGRAPH  # what the text begins that was not cut yet
        self._measure = Measure(tokenizer, most)
        self._headings = [place.start for place in places if place.level != PAGE and place.name]

    def __iter__(self) -> Iterator[Passage]:
        begins = 0
        while len(self._text) - begins > _WINDOW:
            window = self._text[begins : begins + _WINDOW]
            begins += yield from self._cut(begins, window, last=False)
        yield from self._cut(begins, self._text[begins:], last=True)

    def _cut(self, begins: int, text: str, last: bool) -> Generator[Passage, None, int]:
        """The passages of a window, before which there are so many characters, up to its last
        anchor; returns the characters before that.
        """
        white = len(text) - len(text.lstrip())
        if white == len(text) or (white and not last):
            return white
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
                if len(units) == 1 and units[0].end == len(text):  # one fills all
                    units = _parts(text, units[0])
                counts = self._measure.count(text, units)
                price = prices(text, units, counts, self._size)
                half = range(max(1, len(units) // 2), len(units))
                ends.append(min(half, key=price.__getitem__, default=1))
        groups = list(self._groups(text, units, counts, [0, *ends]))
        for some, ids in self._measure.encoded(text, groups):
            if ids:  # else there is nothing that the model could read
                start, end = begins + some[0].start, begins + some[-1].end
                gap, self._ended = self._text[self._ended : start], end
                yield Passage(np.array(ids, dtype=np.int64), 0, gap, start, end - start)
        if ends[-1] == len(units):
            self._level = Level.PARAGRAPH
            return len(text)
        self._level = units[ends[-1]].level
        return units[ends[-1]].start

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


# Ingest

_AT_ONCE = 16  # passages that are stored together
_LOOKED_UP = 64  # passages that are looked up together
_TITLE = 100  # characters; a longer first line is no title


def read_passages(
    reader: PassageModel, text: Text, keep: Keep, writer: DocumentWriter
) -> Iterator[tuple[int, int]]:
    """Read a text into a document passage by passage, from where its writer is; the characters
    before and after some. keep: keys and values of its passages, or their text alone, of which a
    question computes those that it needs.
    """
    first = writer.characters
    passages = passages_of(reader, [text.content], text.places)
    coming, ahead = tee(_looked_up(writer, (one for one in passages if one.end > first)))
    missing = (one.ids.tolist() for one, known in ahead if _missing(known, keep))
    layers = reader.selector.layer if keep == "text" else None
    computed = encode(reader, missing, layers=layers)
    # passages are found by what they stand under, too: the document's name, its first line if that
    # is short, and their headings; and by what stands around them
    line, _, _ = text.content.lstrip()[: _TITLE + 1].partition("\n")
    title = f"{text.name}\n{line}" if len(line) <= _TITLE else text.name
    places = Places(text.places)
    while pairs := list(islice(coming, _AT_ONCE)):
        some = [one for one, _ in pairs]
        new = [at for at, (_, known) in enumerate(pairs) if _missing(known, keep)]
        found = list(islice(computed, len(new)))
        texts = [reader.tokenizer.decode(one.ids.tolist()) for one in some]
        named = ["\n".join((t, title, *places.headings(p.start))) for t, p in zip(texts, some)]
        near = [around(text.content, one.start, one.end) for one in some]
        writer.add_passages(
            some,
            [one.stored for one in found] if keep == "kv" else [],
            given=new if keep == "kv" else [],
            landmarks=_landmarks(reader, pairs, new, found),
            words=reader.selector.words(zip(named, near)),
        )
        yield some[0].start, some[-1].end


def _looked_up(
    writer: DocumentWriter, passages: Iterable[Passage]
) -> Iterator[tuple[Passage, Known | None]]:
    """Passages, and what is stored of each already."""
    coming = iter(passages)
    while some := list(islice(coming, _LOOKED_UP)):
        yield from zip(some, writer.known(some))


def _missing(known: Known | None, keep: Keep) -> bool:
    """Has a passage to be computed?"""
    return known is None or (keep == "kv" and not known.stored)


def _landmarks(
    reader: PassageModel,
    pairs: Sequence[tuple[Passage, Known | None]],
    new: Sequence[int],
    computed: Sequence[Encoded],
) -> Tensor | None:
    """Token landmarks of passages, of which the new ones were computed and the others are known;
    None where the reader's selector keeps none.
    """
    parts: list[Tensor | None] = [
        None if known is None or known.landmarks is None else torch.from_numpy(known.landmarks)
        for _, known in pairs
    ]
    for at, one in zip(new, computed):
        parts[at] = reader.selector.landmarks(one.captured)
    kept = [part for part in parts if part is not None]
    return torch.cat(kept) if kept else None


def passages_of(
    reader: PassageModel, parts: Iterable[str], places: Sequence[Place] = ()
) -> Passages:
    """The text that these parts are together as the reader's passages: see Passages."""
    size, most = reader.passage_tokens, reader.shape.block_size
    return Passages(reader.tokenizer, "".join(parts), places, size=size, most=most)
