"""One document of a memory: its row, its state, and how it was read."""

from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta

from memstore.decode import Block, Count, Line, Positive, Share, check_plain, typed
from memstore.disk.format.citations import Places, unpack_places
from memstore.disk.format.codec import CODECS
from memstore.disk.format.signature import Signature

# "replacing": read in part, to take the place of the ready document of its name
State = Literal["ingesting", "ready", "replacing"]
LABELS = "labels"  # under which a row's metadata holds what its user said of it
SOURCE = "source"
"""Where in a document's metadata stands which file of a folder it was read from."""
NOTES = "notes"  # what of its file could not be read
WRITE_BYTES = 16
WriteId = bytes
"""16 bytes by which a record is known: of a passage the digest of its content, else random."""

_LATEST = 253_402_214_400  # the end of the year 9999, in seconds


@dataclass(frozen=True)
class IngestSettings:
    """How a document is read; a resumed ingest must use the same."""

    chunk_blocks: Positive = 1
    top_k: Block = 0
    cmt_cutoff: Share = 0.0
    # the document is made of passages that are filled up to so many tokens (tables/texts.py)
    # and has no chunks; None: of blocks of equal size
    passage_tokens: Positive | None = None


@dataclass(frozen=True)
class Document:
    """One document's row. `tokens`, `blocks` and `bytes` count what is committed.

    A document that is "replacing" has the name that it will be found by once it is ready.
    """

    id: Annotated[int, Meta(ge=0, lt=1 << 62)]  # 1, 2, ...; never reused
    name: Line
    state: State
    tokens: Count = 0  # content tokens; of passages all that are stored, leads included
    blocks: Block = 0
    bytes: Count = 0  # record bytes
    source_hash: Line = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    created: Annotated[float, Meta(ge=0, le=_LATEST)] = 0.0  # seconds since 1970
    settings: IngestSettings = IngestSettings()
    # random; it tells this document's records, and its text, from those of any other
    write: Annotated[WriteId, Meta(max_length=WRITE_BYTES)] = b""
    codec: Line = ""  # of passages: of the records that it refers to

    @property
    def is_listed(self) -> bool:
        """Is it the document of its name, and not one that shall become it?"""
        return self.state in ("ready", "ingesting")

    @cached_property
    def of_passages(self) -> bool:
        """Is it made of passages, and not of blocks of equal size?"""
        return self.settings.passage_tokens is not None

    @cached_property
    def places(self) -> Places:
        """Where characters of it stand: on which page, under which headings."""
        return Places(unpack_places(self.metadata))

    @property
    def labels(self) -> dict[str, Any]:
        """What its user said of it, by name."""
        return dict(self.metadata.get(LABELS) or {})

    @property
    def notes(self) -> list[str]:
        """What of its file could not be read, as "3 pages; page 2 is a picture without text"."""
        notes = self.metadata.get(NOTES)
        return [str(note) for note in notes] if isinstance(notes, list) else []

    def __repr__(self) -> str:
        size = f"{self.tokens} tokens, {self.blocks} blocks"
        return f"<Document {self.name!r}: {self.state}, {size}>"

    def portable(self) -> "Document":
        """The document as others may see it: without where it was read from."""
        metadata = {name: value for name, value in self.metadata.items() if name != SOURCE}
        return replace(self, metadata=metadata)

    def told(self) -> dict[str, Any]:
        """Plain values for people: of its places their number alone."""
        metadata = self.metadata
        if "places" in metadata:
            metadata = metadata | {"places": len(unpack_places(metadata))}
        return asdict(replace(self, metadata=metadata))

    def memory_layers(self, signature: Signature) -> list[int]:
        """The layers whose landmarks are searched; of passages [0]."""
        return sorted(signature.memory_layers)

    def other_layers(self, signature: Signature) -> list[int]:
        """The layers that only a resumed ingest needs; none of passages."""
        if self.of_passages:
            return []
        return sorted({*range(signature.num_layers)} - {*signature.memory_layers})

    def first_blocks(self, signature: Signature) -> dict[int, int]:
        """The first stored block of each layer. Of layers without memory the latest blocks are
        stored until the document is ready.
        """
        first = dict.fromkeys(self.memory_layers(signature), 0)
        if self.state != "ready":
            kept = max(0, self.blocks - self.settings.top_k)
            first |= dict.fromkeys(self.other_layers(signature), kept)
        return dict(sorted(first.items()))

    @classmethod
    def decode(cls, row: dict[str, Any]) -> "Document":
        """The document whose fields a row has, as `asdict` wrote them. Raises ValueError
        for what no document is like.
        """
        if not row.keys() <= _FIELDS:
            raise ValueError(f"a document has no {min(row.keys() - _FIELDS)!r}")
        document = typed(row, cls)
        check_plain(document.metadata, "metadata")
        if document.blocks and len(document.write) != WRITE_BYTES:
            raise ValueError("no write is told to have made its blocks")
        if document.of_passages != bool(document.codec) or document.codec not in ("", *CODECS):
            raise ValueError(f"its passages are not stored in codec {document.codec!r}")
        if "\0" in document.name or (document.id and not document.name):
            raise ValueError("a document has no name, or a zero character in it")
        return document


_FIELDS = frozenset(field.name for field in fields(Document))  # asked for with every row
