"""Writing documents as pieces, to segments of a publication or to an exported file. A passage is
written once, whatever documents refer to it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.disk.tables.passage_table import Digest
from memstore.errors import CorruptBlock, CorruptMemory
from memstore.share.document_parts import Head, IndexRun, Part, PartOrder, Record, Tokens
from memstore.share.pieces import Kind, Piece, RecordIndex, Value, encode_values

T = TypeVar("T")

_VALUES_BYTES, _RUN_BYTES = 8 << 20, 16 << 20  # of the values of a piece, of a run of records


Append = Callable[[Kind, Sequence[bytes]], tuple[str, int]]
"""Appends bytes to the object for pieces of a kind; returns the object and their offset."""


class PieceWriter:
    """Writes documents, one after the other. Used by one thread."""

    def __init__(self, append: Append) -> None:
        self._append = append
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
        for some in _batches(values, lambda value: len(value.value), _VALUES_BYTES):
            data = encode_values(some)
            segment, offset = self._append(kind, [data])
            digest = xxh3_64_intdigest(data)
            yield Piece(kind, part, some[0].first, len(some), 0, segment, offset, len(data), digest)

    def _write_blocks(self, head: Head, records: Iterator[Part]) -> Iterator[Piece]:
        """Write the blocks of a document's one write."""
        first = 0
        for rows in _batches(_by_block(records), _row_bytes, _RUN_BYTES):
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

        some = (row for row in _by_block(records) if is_new(row[0]))
        for rows in _batches(some, _row_bytes, _RUN_BYTES):
            digests = [order.digests[block] for block, _ in rows]
            self.learn(self._write_run(head, digests, 0, [data for _, data in rows]), digests)

    def _write_run(
        self, head: Head, writes: Sequence[bytes], first: int, rows: Sequence[Sequence[bytes]]
    ) -> Piece:
        """Write records with their index. writes, first: as RecordIndex has them; rows: the records
        of each block or passage, in order of layers.
        """
        layers = head.document.memory_layers(head.signature)
        sizes = np.array([list(map(len, row)) for row in rows], dtype=np.uint32)
        index = RecordIndex(writes, first, layers, sizes)
        data = index.encode()
        segment, start = self._append("records", [*chain.from_iterable(rows), data])
        at, digest = start + index.bytes, xxh3_64_intdigest(data)
        return Piece("records", 0, first, len(rows), 0, segment, at, len(data), digest)

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


def _row_bytes(row: tuple[int, list[bytes]]) -> int:
    return sum(map(len, row[1]))


def _batches(items: Iterable[T], size_of: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Batches of items, each of at least so many bytes but for the last."""
    batch, size = list[T](), 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= least:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
