"""Cut a text into passages of whole sentences. A cut is best before a heading, then between
paragraphs, lines, sentences, clauses and words, in any script.

Whether a text may be cut at a place depends only on the text next to it. Sentence ends are found by
rules of our own: Unicode's (UAX #29) end a sentence at every line end and know no abbreviations,
and the language of a text is not known here.

A passage holds as many sentences as fit. Its ends depend only on nearby text, so that an edit
changes only passages near it; greedy filling would shift all later ends. Each possible end has a
price, drawn by a hash of the words on both sides, and the cheapest sequence of ends is chosen: two
sequences meet again at the next end that is cheap for both. An end that is the cheapest of a long
stretch is in every sequence (an anchor), so that a passage depends only on the text between two
anchors.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.disk.format.document import PAGE, Place
from memstore.disk.tables.texts import Passage
from memstore.model.tokenizer import TokenText


class Level(IntEnum):
    """What a unit begins; a higher level is a better place to cut."""

    CHARACTER = 0
    WORD = 1
    CLAUSE = 2
    SENTENCE = 3
    LINE = 4
    PARAGRAPH = 5
    HEADING = 6


class Unit(NamedTuple):
    """A part of a text that should not be cut, stripped."""

    start: int
    end: int
    level: Level  # of its beginning
    heading: bool = False  # it stands with what follows it


_CLOSING = "\"'\u2019\u201d\u00bb\u203a)\\]}*_\u300d\u300f\uff09\u3011\u300b"
_NEEDS_SPACE = ".!?\u2026\u203d\u037e\u0589\u061f\u06d4"
# ends of scripts that put no space behind them, or always end a sentence
_FULL_STOPS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u1362\u1367\u104b\u17d4\u17d5\u0f0e\u0700\u1803"
_BREAK = "(?>\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029])"
_BLANK = "[^\\S\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]"
_CANDIDATE = re.compile(  # each run is looked at once, however long it is
    rf"(?P<lines>(?:(?<!{_BLANK}){_BLANK}++)?{_BREAK}\s*+)"
    rf"|(?<![{_NEEDS_SPACE}])[{_NEEDS_SPACE}]++[{_CLOSING}]*+(?P<space>{_BLANK}++)(?=\S)"
    rf"|[{_FULL_STOPS}]++[{_FULL_STOPS}{_NEEDS_SPACE}{_CLOSING}]*+(?P<none>\s*+)(?=\S)"
)
_PARAGRAPH = re.compile(rf"{_BREAK}[^\S\n\r]*{_BREAK}|[\x0c\u2029]")
_ENDED = re.compile(rf"[{_NEEDS_SPACE}{_FULL_STOPS}:][{_CLOSING}]*$")
_LAST_WORD = re.compile(r"[^\s(\[\"'\u201c\u2018\u2014-]*$")
_SHORTENED = """
    mr mrs ms dr prof st sr jr rev hon gen col capt lt sgt maj gov sen rep messrs mme mlle mgr esq
    vs cf viz e.g i.e eg ie ca approx fig figs vol vols no nos pp p ch sec art op ed eds trans al
    inc ltd co corp dept univ mt ft ave blvd jan feb mar apr jun jul aug sep sept oct nov dec
    hr fr nr bzw ggf z.b d.h u.a z.t evtl vgl str abs bd sog inkl zzgl sra srta ud uds pág núm av
    mm mlles ste г гг ул т.е им стр рис табл см напр тыс млн млрд
"""
_ABBREVIATIONS = frozenset(_SHORTENED.split())
_SMALL = re.compile(r"[\"'\u201c\u2018(\[*_]*[^\W\d_]")
_LIST_ITEM = re.compile(
    r"(?:[-*+\u2022\u2023\u25aa\u25cf\u2013]|\(?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{1,5})[.)])[ \t]"
)
_STRUCTURED = re.compile(  # how a line of a list, a table, a log, code or a quotation begins
    r"[-*+\u2022\u2023\u25aa\u25cf]\s|\(?(?:\d{1,3}|[a-zA-Z]|[ivx]{1,5})[.)]\s|[|#>{}\[<@$/\\;]"
    r"|\d+[-:/.]\d|[\"']?\w+[\"']?\s?[:=]|[A-Z]{4,}\b[ :]|```|~~~|---|===|\.\.\."
)
_CODE = re.compile(r"[{}=<>\\|\t]|\(\)|::|->|\w\(|[\"']\s*:|;$|^\s*(?:\"|')?[\w.-]+(?:\"|')?,\S")
_MARKDOWN = re.compile(r"#{1,6}[ \t]+\S")
_CHAPTER = re.compile(
    r"(?:chapter|part|book|section|act|scene|appendix|letter|canto|volume|kapitel|teil|chapitre|"
    r"cap[ií]tulo|глава|часть)\s+(?:\d+|[ivxlcdm]+|[a-z]|the\s+\w+|one|two|three|four|five|six|"
    r"seven|eight|nine|ten|\w+teen|twen\w+|thir\w+|first|second|last)\b[^\n]{0,60}$"
    r"|第[0-9〇一二三四五六七八九十百千]+[章节回部卷][^\n]{0,30}$",
    re.IGNORECASE,
)
_UNDERLINE = re.compile(r"(?:={3,}|-{3,}|~{3,})[ \t]*$", re.MULTILINE)
_CLAUSE = re.compile(
    r"(?<![,;:\u2013\u060c\u061b])[,;:\u2013\u060c\u061b]++[\"'\u2019\u201d)]*+\s++"
    r"|(?<!\s)\s++(?=[\u2013\u2014(])|(?<!\u2014)\u2014++\s*+(?=\w)"
    r"|[\uff0c\u3001\uff1b\uff1a]++"
)
_WORD = re.compile(r"\s++|(?<=[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff])(?=\w)")
# what belongs to the character before it, or takes the next one to itself
_JOINED = re.compile(
    "[\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0903\u093a-\u094f"
    "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u1ab0-\u1aff\u1dc0-\u1dff\u200c\u200d"
    "\u20d0-\u20ff\ufe00-\ufe0f\ufe20-\ufe2f\U0001f3fb-\U0001f3ff\U000e0100-\U000e01ef]"
)


def heading_of(line: str, following: str = "") -> str:
    """The words of the heading that a line is; "" if it is none. following: the line after it."""
    if _MARKDOWN.match(line):
        return line.lstrip("#").strip().rstrip("#").strip()
    if len(line) <= 100 and (_CHAPTER.match(line) or (following and _UNDERLINE.match(following))):
        return line.strip()
    return ""


def split(
    text: str, starts: frozenset[int] = frozenset(), level: Level = Level.PARAGRAPH
) -> Iterator[Unit]:
    """The units of a text, in order, each a sentence. starts: where known headings begin; level:
    what the text begins.
    """
    at = len(text) - len(text.lstrip())
    line = at - (level < Level.LINE)  # where the line began
    underlined = -1  # the end of a line that underlines a heading
    for match in _CANDIDATE.finditer(text, at):
        after = match.end()
        if after >= len(text):
            break
        if match["lines"] is None:
            before = match.start("none" if match["space"] is None else "space")
            if match["none"] is not None or _ends(text, match.start(), before, after, line):
                yield Unit(at, before, level)
                at, level = after, Level.SENTENCE
            continue
        before = match.start()
        here = _line_level(text, line, before, match["lines"], after)
        follows = text[after : after + 120].split("\n", 1)[0].rstrip()
        heading = before == underlined
        begins = not heading and line == at and before - at <= 300
        if begins and (at in starts or heading_of(text[at:before], follows)):
            if _UNDERLINE.match(follows) and not _MARKDOWN.match(text, at, before):
                underlined, line = after + len(follows), after
                continue
            heading = True
        if heading or here:
            yield Unit(at, before, Level.HEADING if heading else level, heading)
            at, level = after, here or Level.LINE
        line = after
    end = len(text.rstrip())
    if end > at:
        yield Unit(at, end, level)


def _ends(text: str, stop: int, before: int, after: int, line: int) -> bool:
    """Whether the stops at `stop` end a sentence; the next word begins at `after`."""
    small = _SMALL.match(text, after)
    if small and small[0][-1].islower():
        return False
    if "\t" in text[max(line, stop - 200) : stop] or text[line] == "|":
        return False  # a row of a table
    if text[stop] != "." or before - stop > 1:
        return text[stop] != "\u2026" or not small or small[0][-1].isupper()
    found = _LAST_WORD.search(text, max(line, stop - 24), stop)
    word = found[0] if found else ""
    if word.lower() in _ABBREVIATIONS:
        return False
    if stop - line <= 5 and _LIST_ITEM.match(text, line, stop + 2):
        return False
    return not (len(word) == 1 and word.isupper() and word != "I") and not (
        len(word) >= 3
        and word[-2] == "."
        and word[-1].isupper()
        and text[after].isupper()
        and len(word) <= 3
    )


def _line_level(text: str, line: int, before: int, gap: str, after: int) -> Level | None:
    """What begins after the end of a line; None if the line was wrapped inside a sentence."""
    if _PARAGRAPH.search(gap, 0, 1000):
        return Level.PARAGRAPH
    ahead = text[after : after + 160].split("\n", 1)[0]
    if _STRUCTURED.match(ahead):
        return Level.LINE
    whole = text[max(line, before - 200) : before]
    if _ENDED.search(whole):
        return Level.LINE
    if _CODE.search(whole) or _CODE.search(ahead) or gap[-1] == "\t" or gap.endswith("    "):
        return Level.LINE
    if whole.count(" ") < 2:
        return Level.LINE
    if ahead[:1].islower() or len(whole) >= 40:
        return None
    return Level.LINE


def divide(text: str, unit: Unit, level: Level) -> Iterator[Unit]:
    """The parts of a unit: clauses at CLAUSE, words at WORD, two halves at CHARACTER."""
    at, kind = unit.start, unit.level
    if level is Level.CHARACTER:
        middle = _whole_character(text, unit.start, unit.end)
        if middle == unit.start:
            yield unit
            return
        yield Unit(at, middle, kind)
        yield Unit(middle, unit.end, Level.CHARACTER)
        return
    for match in (_CLAUSE if level is Level.CLAUSE else _WORD).finditer(text, at, unit.end):
        before = match.start() + len(match[0].rstrip())
        if at < before and match.end() < unit.end:
            yield Unit(at, before, kind)
            at, kind = match.end(), level
    yield Unit(at, unit.end, kind)


def _whole_character(text: str, start: int, end: int) -> int:
    """About the middle of a word, but not before a mark that combines with the character before."""
    middle = (start + end) // 2
    for at in range(middle, max(start, middle - 16), -1):
        if not _JOINED.match(text, at) and text[at - 1] != "\u200d":
            return at
    return middle


# Passages

_LONG = 64  # characters for each token that may be there: such a part is not counted


class Group(NamedTuple):
    """Units of one passage, and the maximum number of its tokens."""

    units: Sequence[Unit]
    limit: int


class Measure:
    """Counts tokens with a tokenizer; most: maximum tokens of a passage."""

    def __init__(self, tokenizer: TokenText, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._gaps = {"": 0, " ": 0}  # tokens of what stands between two units

    def count(self, text: str, units: Sequence[Unit]) -> list[int]:
        """Approximate tokens of each unit and the gap before it. A unit that is far too long is not
        tokenised; its count is its characters, more than `most`.
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
        """Divide the units of more than `most` tokens, into clauses, then words, then halves;
        return the units and their counts.
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
        """The units and ids of groups. A group of too many tokens is divided: a text can have more
        tokens than its parts have in all.
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
    """A unit divided into clauses, words or halves, whichever first gives several parts; the unit
    itself if it is a single character.
    """
    for level in (Level.CLAUSE, Level.WORD, Level.CHARACTER):
        if len(parts := list(divide(text, unit, level))) > 1:
            return parts
    return [unit]


def _halves(text: str, units: Sequence[Unit]) -> list[Sequence[Unit]]:
    """Two groups, divided at the best end, the nearest to the middle; [] for a single character."""
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
    """The cost of beginning a passage with each unit, in passages. tokens: of each unit."""
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
    """For each unit, whether it follows the first one of a paragraph of at most `size` tokens."""
    begins = [at for at, unit in enumerate(units) if not at or unit.level >= Level.PARAGRAPH]
    inside = [False] * len(units)
    for first, end in pairwise([*begins, len(units)]):
        if sum(tokens[first:end]) <= size:
            inside[first + 1 : end] = [True] * (end - first - 1)
    return inside


def anchors(units: Sequence[Unit], price: Sequence[float], reach: int) -> list[int]:
    """Numbers of the units that always begin a passage: headings, and units whose price is the
    least within `reach` characters on both sides.
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
    """Units [first, end) of each passage. A passage has at most `size` tokens; a single unit, or a
    heading with what follows it, at most `most`.
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

    size: tokens up to which a passage is filled; most: maximum tokens. places: of the text.
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
        """The passages of a window up to its last anchor; returns the number of characters before
        that. begins: characters of the text before the window.
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
        """The units of each passage; counts: tokens of each unit; ends: fixed boundaries."""
        for first, end in pairwise(ends):
            some, lengths = self._measure.shortened(text, units[first:end], counts[first:end])
            price = prices(text, some, lengths, self._size)
            for begin, close in fill(some, lengths, price, self._size, self._most):
                fits = sum(lengths[begin:close]) <= self._size
                yield Group(some[begin:close], self._size if fits else self._most)
