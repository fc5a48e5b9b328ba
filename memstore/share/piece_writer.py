"""Writing documents as pieces, to segments of a publication or to an exported file. A passage is
written once, whatever documents refer to it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Protocol, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.disk.tables.passage_table import Digest
from memstore.errors import CorruptBlock, CorruptMemory
from memstore.share.document_parts import Head, IndexRun, Part, PartOrder, Record, Tokens
from memstore.share.pieces import Kind, Piece, RecordIndex, Value, encode_values

T = TypeVar("T")

_VALUES_BYTES = 8 << 20  # of the values of a piece, about


class Target(Protocol):
    """Where the bytes of pieces go; those of one kind may be stored apart from others."""

    def size(self, kind: Kind) -> int:
        """Bytes of the object so far that pieces of this kind are appended to."""

    def room(self, kind: Kind) -> int:
        """Bytes that pieces of this kind should have at most before they are appended."""

    def append(self, kind: Kind, chunks: Sequence[bytes]) -> tuple[str, int]:
        """Append bytes; return the object that has them and their offset."""


class PieceWriter:
    """Writes documents, one after the other. Used by one thread."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._passages: dict[Digest, tuple[Piece, int]] = {}  # the run of each, and its row there

    def learn(self, run: Piece, digests: Sequence[Digest]) -> None:
        """Add the passages of a run of records that is written, in order of rows."""
        for row, digest in enumerate(digests):
            self._passages.setdefault(digest, (run, row))

    def knows(self, digest: Digest) -> bool:
        """Is a passage written?"""
        return digest in self._passages

    def write(self, head: Head, parts: Iterable[Part], *, records: bool = True) -> list[Piece]:
        """Write a document; return its pieces. Known passages need no records among the parts.

        records: False for a document of passages as text alone, whose parts have no records.
        Raises CorruptMemory (a part is damaged or missing), and what the parts and the target
        raise.
        """
        order, pieces = PartOrder(head), list[Piece]()
        try:
            for (kind, part), some in groupby(order.checked(parts), key=_kind):
                if kind != "records":
                    pieces += self._write_values(kind, part, map(_value, some))
                elif head.document.of_passages:
                    self._write_passages(head, order, some)
                else:
                    pieces += self._write_blocks(head, some)
        except CorruptBlock:
            raise
        except ValueError as error:
            raise CorruptMemory(
                f"a part of document {head.document.name!r} is missing ({error}); run verify"
            ) from error
        return [*pieces, *(self._references(order.digests) if records else ())]

    def _write_values(self, kind: Kind, part: int, values: Iterator[Value]) -> Iterator[Piece]:
        for some in _batches(values, lambda value: len(value.value), lambda: _VALUES_BYTES):
            data = encode_values(some)
            segment, offset = self._target.append(kind, [data])
            digest = xxh3_64_intdigest(data)
            yield Piece(kind, part, some[0].first, len(some), 0, segment, offset, len(data), digest)

    def _write_blocks(self, head: Head, records: Iterator[Part]) -> Iterator[Piece]:
        """Write the blocks of a document's one write."""
        first = 0
        for rows in self._rows(_by_block(records)):
            data = [records for _, records in rows]
            yield self._write_run(head, [head.document.write], first, data)
            first += len(rows)

    def _write_passages(self, head: Head, order: PartOrder, records: Iterator[Part]) -> None:
        """Write those passages that are not written yet."""
        new = set[Digest]()

        def is_new(block: int) -> bool:
            digest = order.digests[block]
            found = digest not in new and not self.knows(digest)
            new.add(digest)
            return found

        for rows in self._rows(row for row in _by_block(records) if is_new(row[0])):
            digests = [order.digests[block] for block, _ in rows]
            self.learn(self._write_run(head, digests, 0, [data for _, data in rows]), digests)

    def _rows(
        self, rows: Iterable[tuple[int, list[bytes]]]
    ) -> Iterator[list[tuple[int, list[bytes]]]]:
        """Rows of records in batches that fill a segment."""
        return _batches(
            rows, lambda row: sum(map(len, row[1])), lambda: self._target.room("records")
        )

    def _write_run(
        self, head: Head, writes: Sequence[bytes], first: int, rows: Sequence[Sequence[bytes]]
    ) -> Piece:
        """Write records with their index. writes, first: as RecordIndex has them; rows: the records
        of each block or passage, in order of layers.
        """
        layers = head.document.memory_layers(head.signature)
        sizes = np.array([list(map(len, row)) for row in rows], dtype=np.uint32)
        index = RecordIndex(writes, first, layers, self._target.size("records"), sizes)
        data = index.encode()
        segment, start = self._target.append("records", [*chain.from_iterable(rows), data])
        assert start == index.start
        digest = xxh3_64_intdigest(data)
        return Piece("records", 0, first, len(rows), 0, segment, index.end, len(data), digest)

    def _references(self, digests: Sequence[Digest]) -> list[Piece]:
        """The pieces of a document of these passages: consecutive blocks that are consecutive rows
        of a run are one.
        """
        pieces = list[Piece]()
        for block, digest in enumerate(digests):
            if digest not in self._passages:
                continue
            run, row = self._passages[digest]
            new = run._replace(first=block, take=1, row=row)
            last = pieces[-1] if pieces else None
            if last is not None and new == last._replace(
                first=last.first + last.take, take=1, row=last.row + last.take
            ):
                pieces[-1] = last._replace(take=last.take + 1)
            else:
                pieces.append(new)
        return pieces


def _kind(part: Part) -> tuple[Kind, int]:
    """The kind and part of the piece that holds a part of a document."""
    if isinstance(part, Tokens):
        return "tokens", 0
    return ("landmarks", part.part) if isinstance(part, IndexRun) else ("records", 0)


def _value(part: Part) -> Value:
    assert not isinstance(part, Record)
    return Value(part.first if isinstance(part, Tokens) else part.first_block, part.value)


def _by_block(records: Iterator[Part]) -> Iterator[tuple[int, list[bytes]]]:
    """Block and records, in order of layers, of each block that has records."""
    for block, some in groupby(records, key=lambda record: record[0]):
        yield int(block), [record.data for record in some if isinstance(record, Record)]


def _batches(
    items: Iterable[T], size_of: Callable[[T], int], room: Callable[[], int]
) -> Iterator[list[T]]:
    """Batches of items, each of which has at least `room()` bytes when it ends."""
    batch, size = list[T](), 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= room():
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
