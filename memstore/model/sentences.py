"""Where a text may be cut, and how well: before headings, between paragraphs, lines, sentences,
clauses and words, in any script. A place to cut is decided by the text next to it alone.

Ends of sentences are found by rules of our own: Unicode's (UAX #29) end a sentence at every line's
end and know no abbreviations, and text arrives here without its language being told.
"""

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple


class Level(IntEnum):
    """What a unit begins; a higher one is a better place to cut."""

    CHARACTER = 0
    WORD = 1
    CLAUSE = 2
    SENTENCE = 3
    LINE = 4
    PARAGRAPH = 5
    HEADING = 6


class Unit(NamedTuple):
    """A part of a text that is best not cut, stripped."""

    start: int
    end: int
    level: Level  # of its beginning
    heading: bool = False  # it stands with what follows it


_CLOSING = "\"'\u2019\u201d\u00bb\u203a)\\]}*_\u300d\u300f\uff09\u3011\u300b"
_NEEDS_SPACE = ".!?\u2026\u203d\u037e\u0589\u061f\u06d4"
# ends of scripts that put no space behind them, or always end a sentence
_FULL_STOPS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u1362\u1367\u104b\u17d4\u17d5\u0f0e\u0700\u1803"
_BREAK = "(?:\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029])"
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
    """The words of a heading that a line is, "" for none; following: the line after it."""
    if _MARKDOWN.match(line):
        return line.lstrip("#").strip().rstrip("#").strip()
    if len(line) <= 100 and (_CHAPTER.match(line) or (following and _UNDERLINE.match(following))):
        return line.strip()
    return ""


def split(
    text: str, starts: frozenset[int] = frozenset(), level: Level = Level.PARAGRAPH
) -> Iterator[Unit]:
    """The units of a text in order, in sentences; starts: where headings are known to begin;
    level: what the text begins.
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
        follows = text[after : after + 120].split("\n", 1)[0]
        heading = before == underlined
        begins = not heading and line == at and before - at <= 300
        if begins and (at in starts or heading_of(text[at:before], follows)):
            if _UNDERLINE.match(follows) and not _MARKDOWN.match(text, at, before):
                underlined, line = after + len(follows.rstrip()), after
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
    """Does a sentence end with the stops at `stop`, where the next word begins at `after`?"""
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
    """What begins after a line's end; None where the line was wrapped inside a sentence."""
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
    """A unit in parts: at CLAUSE in clauses, at WORD in words, at CHARACTER in two halves."""
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
    """About the middle of a word, and not before a mark that belongs to the character before."""
    middle = (start + end) // 2
    for at in range(middle, max(start, middle - 16), -1):
        if not _JOINED.match(text, at) and text[at - 1] != "\u200d":
            return at
    return middle
