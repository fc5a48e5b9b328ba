"""Pages and headings of a document, stored in its row as one JSON text that is parsed on demand."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from memstore.decode import Count, from_json

PAGE = 0  # the level of pages; headings have 1 (the highest), 2, ...
LEVELS = 10  # a deeper heading counts as one of the last level
NAME = 120  # stored characters of a name, at most
MOST = 20_000  # stored places of a document, at most
_KEY = "places"
_BLANKS = re.compile(r"[\s\x00-\x1f]+")


class Place(NamedTuple):
    """A page (level 0) or heading that begins at character `start`.

    An empty name ends the page, or the headings from that level down, without beginning another.
    """

    start: Count
    level: Annotated[int, Meta(ge=0, lt=LEVELS)]
    name: Annotated[str, Meta(max_length=NAME, pattern=r"\A[^\x00-\x1f]*\Z")]


class Places:
    """The page and headings of any character of a document."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        """places: in order of `start`."""
        self._pages: list[tuple[int, str]] = [(-1, "")]  # (first character, name)
        self._headings: list[tuple[int, tuple[str, ...]]] = [(-1, ())]
        path: tuple[Place, ...] = ()
        for place in places:
            if place.level == PAGE:
                self._pages.append((place.start, place.name))
            else:
                path = (*(above for above in path if above.level < place.level), place)
                names = tuple(part.name for part in path if part.name)
                self._headings.append((place.start, names))

    def page(self, character: int) -> str:
        """The page of a character; "" for none."""
        return self._pages[bisect_right(self._pages, character, key=itemgetter(0)) - 1][1]

    def headings(self, character: int) -> tuple[str, ...]:
        """The headings above a character, the highest first."""
        return self._headings[bisect_right(self._headings, character, key=itemgetter(0)) - 1][1]

    def at(self, first: int, end: int) -> str | None:
        """The place of the characters `first` to `end`, in words: "page 12", "pages 12-13",
        "Part One > The Mill", "The Mill to The Ferry"; None if unknown.
        """
        last = max(first, end - 1)
        pages = dict.fromkeys(filter(None, (self.page(first), self.page(last))))
        page = f"page{'s' if len(pages) > 1 else ''} {'-'.join(pages)}" if pages else ""
        path, other = self.headings(first), self.headings(last)
        same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(path, other))])
        ends = [" > ".join(part) for part in (path[same:], other[same:]) if part]
        heading = " > ".join((*path[:same], " to ".join(ends)) if ends else path[:same])
        return ", ".join(filter(None, (page, heading))) or None


def plain_name(text: str) -> str:
    """A heading as one line of at most NAME characters."""
    line = _BLANKS.sub(" ", text).strip()
    return line if len(line) <= NAME else line[: NAME - 3].rstrip() + "..."


def pack_places(places: Iterable[Place]) -> dict[str, Any]:
    """The metadata entry that stores places; empty without places. After MOST places the text has
    no page and no heading.
    """
    kept = list(places)
    if len(kept) > MOST:
        end = kept[MOST - 2].start
        kept = [*kept[: MOST - 2], Place(end, PAGE, ""), Place(end, 1, "")]
    return {_KEY: msgspec.json.encode(kept).decode()} if kept else {}


def unpack_places(metadata: dict[str, Any]) -> list[Place]:
    """The places stored in a row's metadata; none if they are damaged."""
    text = metadata.get(_KEY, "[]")
    try:
        places = from_json(text if isinstance(text, str) else "", list[Place])
    except ValueError:
        return []
    return sorted(places[:MOST], key=lambda place: place.start)
