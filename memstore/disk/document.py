"""One document of a memory: its row, its state, how it was read, and the writes that made it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from memstore.disk import format1
from memstore.disk.record import WriteId
from memstore.disk.signature import Signature

# "importing": an import that has not ended, removed by the next one; "replacing": read in part, to
# take the place of the ready document of its name
State = Literal["ingesting", "ready", "importing", "replacing"]


class Write(NamedTuple):
    """One of the writes that a document was made by: its first, or an append."""

    first: int  # block
    id: WriteId


def write_of(writes: Sequence[Write], block: int) -> WriteId | None:
    """The id of the write that made a block's records; None for records of format 1."""
    for first, write in reversed(writes):
        if first <= block:
            return write
    return None


@dataclass(frozen=True)
class IngestSettings:
    """How a document is read; a resumed ingest, and an append, must use the same."""

    chunk_blocks: int
    top_k: int
    cmt_cutoff: float = 0.0
    retrieve: bool = False  # attend to retrieved blocks, and not to the latest ones alone
    granularity: str | None = None  # of retrieving, as the next two
    score_range: float | None = None
    recency: float = 0.0


@dataclass(frozen=True)
class Document:
    """One document's row. `tokens`, `blocks` and `bytes` count what is committed.

    A document that is "importing" or "replacing" has the name that it will be found by once it is
    ready.
    """

    id: int  # 1, 2, ...; never reused
    name: str
    state: State
    tokens: int = 0  # content tokens
    blocks: int = 0
    bytes: int = 0  # record bytes
    source_hash: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0  # seconds since 1970
    settings: IngestSettings = IngestSettings(chunk_blocks=1, top_k=0)
    appended_to: int = 0  # tokens that it had before it was last appended to
    layers: tuple[int, ...] | None = None  # that are stored; None for all of the signature
    # in order of blocks; empty for a document of format 1, which has those since then
    writes: tuple[Write, ...] = ()

    def write_of(self, block: int) -> WriteId | None:
        """The id of the write that made a block's records; None for records of format 1."""
        return write_of(self.writes, block)

    def begin_write(self, first: int) -> "Document":
        """The document with a new write, that makes the blocks from `first` on."""
        kept = [write for write in self.writes if write.first < first]
        return replace(self, writes=(*kept, Write(first, os.urandom(16))))

    def layers_of(self, signature: Signature) -> list[int]:
        """The layers that are stored."""
        return list(range(signature.num_layers)) if self.layers is None else sorted(self.layers)


def document_from_row(row: dict[str, Any]) -> Document:
    """The document whose fields a row has, as `asdict` or format 1 wrote them. Raises TypeError,
    KeyError.
    """
    row = format1.upgrade_row(row)
    row["settings"] = IngestSettings(**row["settings"])
    row["writes"] = tuple(Write(*write) for write in row["writes"])
    if row["layers"] is not None:
        row["layers"] = tuple(row["layers"])
    return Document(**row)
