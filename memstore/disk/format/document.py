"""The row of a document: its state, sizes and ingest settings; and the pages and headings of its
text, which are stored as one JSON text and parsed on demand.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from memstore.block import CODEC_NUMBERS
from memstore.decode import Block, Count, Line, Positive, Share, check_plain, from_json, typed
from memstore.disk.format.signature import Signature

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
        """The place of the characters `first` to `end`, as text: "page 12", "pages 12-13", "Part
        One > The Mill", "The Mill to The Ferry"; None if unknown.
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


# The row

# "replacing": partly ingested, and replaces the ready document of its name when it is ready
State = Literal["ingesting", "ready", "replacing"]
LABELS = "labels"  # key of the user's labels in a row's metadata
SOURCE = "source"
"""Key in a document's metadata of the file that it was read from."""
NOTES = "notes"  # key of notes on parts of the file that could not be read
WRITE_BYTES = 16
WriteId = bytes
"""16 bytes that identify a record's content: the digest of a passage, else random."""

_LATEST = 253_402_214_400  # the end of the year 9999, in seconds


@dataclass(frozen=True)
class IngestSettings:
    """How a document is ingested; a resumed ingest must use the same settings."""

    chunk_blocks: Positive = 1
    top_k: Block = 0
    cmt_cutoff: Share = 0.0
    # most tokens of a passage, for a document of passages, which has no chunks (tables/texts.py);
    # None: a document of blocks of equal size
    passage_tokens: Positive | None = None


@dataclass(frozen=True)
class Document:
    """One document's row. `tokens`, `blocks` and `bytes` count committed data.

    A "replacing" document has the name of the document that it replaces.
    """

    id: Annotated[int, Meta(ge=0, lt=1 << 62)]  # 1, 2, ...; never reused
    name: Line
    state: State
    tokens: Count = 0  # content tokens; for passages all stored tokens, leads included
    blocks: Block = 0
    bytes: Count = 0  # record bytes
    source_hash: Line = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    created: Annotated[float, Meta(ge=0, le=_LATEST)] = 0.0  # seconds since 1970
    settings: IngestSettings = IngestSettings()
    # random; distinguishes this document's records and text from those of any other
    write: Annotated[WriteId, Meta(max_length=WRITE_BYTES)] = b""
    codec: Line = ""  # for passages: the codec of the records that it refers to

    @property
    def is_listed(self) -> bool:
        """Whether it is the current document of its name, not a replacement in progress."""
        return self.state in ("ready", "ingesting")

    @cached_property
    def of_passages(self) -> bool:
        """Whether its blocks are passages, not blocks of equal size."""
        return self.settings.passage_tokens is not None

    @cached_property
    def places(self) -> Places:
        """The pages and headings of its characters."""
        return Places(unpack_places(self.metadata))

    @property
    def labels(self) -> dict[str, Any]:
        """The user's labels, by name."""
        return dict(self.metadata.get(LABELS) or {})

    @property
    def notes(self) -> list[str]:
        """Notes on unread parts of its file, as "3 pages; page 2 is a picture without text"."""
        notes = self.metadata.get(NOTES)
        return [str(note) for note in notes] if isinstance(notes, list) else []

    def __repr__(self) -> str:
        size = f"{self.tokens} tokens, {self.blocks} blocks"
        return f"<Document {self.name!r}: {self.state}, {size}>"

    def stored_as(self, other: "Document") -> bool:
        """Whether both rows are stored alike; for Python, a label True equals a label 1."""
        one, another = (msgspec.json.encode(row, order="sorted") for row in (self, other))
        return one == another

    def portable(self) -> "Document":
        """A copy without the path of its file, for other users."""
        metadata = {name: value for name, value in self.metadata.items() if name != SOURCE}
        return replace(self, metadata=metadata)

    def told(self) -> dict[str, Any]:
        """Plain values for output, with the number of places instead of the places."""
        metadata = self.metadata
        if "places" in metadata:
            metadata = metadata | {"places": len(unpack_places(metadata))}
        return asdict(replace(self, metadata=metadata))

    def memory_layers(self, signature: Signature) -> list[int]:
        """The layers whose landmarks are searched; [0] for passages."""
        return sorted(signature.memory_layers)

    def other_layers(self, signature: Signature) -> list[int]:
        """The layers that only a resumed ingest needs; none for passages."""
        if self.of_passages:
            return []
        return sorted({*range(signature.num_layers)} - {*signature.memory_layers})

    def first_blocks(self, signature: Signature) -> dict[int, int]:
        """The first stored block of each layer: until the document is ready, layers without memory
        store their latest blocks.
        """
        first = dict.fromkeys(self.memory_layers(signature), 0)
        if self.state != "ready":
            kept = max(0, self.blocks - self.settings.top_k)
            first |= dict.fromkeys(self.other_layers(signature), kept)
        return dict(sorted(first.items()))

    @classmethod
    def decode(cls, row: dict[str, Any]) -> "Document":
        """The document of a row, whose fields `asdict` wrote. Raises ValueError for invalid
        values.
        """
        if not row.keys() <= _FIELDS:
            raise ValueError(f"a document with an unknown field {min(row.keys() - _FIELDS)!r}")
        document = typed(row, cls)
        check_plain(document.metadata, "metadata")
        if document.blocks and len(document.write) != WRITE_BYTES:
            raise ValueError("its blocks have no write id")
        if document.of_passages != bool(document.codec) or document.codec not in (
            "",
            *CODEC_NUMBERS,
        ):
            raise ValueError(f"its passages are not stored in codec {document.codec!r}")
        if "\0" in document.name or (document.id and not document.name):
            raise ValueError("a document without a name, or with a NUL in it")
        return document


_FIELDS = frozenset(field.name for field in fields(Document))  # computed once for all rows
