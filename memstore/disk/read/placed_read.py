"""Reading records from their places in the data file, into place: a full block in codec raw is
received by one call of the system where its header and its heads belong, and its checksums are
taken there while its bytes are near.

Read, and not mapped: a page of a mapped file is asked for when it is touched first, one at a time
and in every process anew, and a disk's failure is an error here, not the end of the process. What
the page cache holds is read at once (RWF_NOWAIT). For the rest, or what is left of a batch once a
window of records was not there, the disk is asked a window ahead of what is read, in the file's
order.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from operator import itemgetter

from xxhash import xxh3_64_digest

from memstore.disk.format.record import digest_of
from memstore.disk.lmdb.database import Database, Transaction
from memstore.disk.lmdb.pages import Extent, ask
from memstore.disk.read.batch import Batch, Wanted, joined_digests
from memstore.disk.read.work_sharing import Threads
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptBlock, CorruptMemory

NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # of Linux; not every file system knows it


def read_into(
    file: int, buffers: Sequence[memoryview | bytearray], offset: int, size: int, flags: int
) -> None:
    """Fill buffers, of `size` bytes together, from byte `offset` of a file. Raises OSError, also
    where the file ends before.

    flags: 0, or NOWAIT: BlockingIOError is raised instead, also where the page cache does not hold
    all of it and where nothing can be read so.
    """
    try:
        count = os.preadv(file, buffers, offset, flags)
    except OSError as error:
        if flags:
            raise BlockingIOError from error
        raise
    if count == size:
        return
    if flags:
        raise BlockingIOError
    left = [memoryview(buffer) for buffer in buffers]
    while count:
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if not left:
            return
        left[0] = left[0][count:]
        count = os.preadv(file, left, offset)
    raise OSError("the file ends before it")


_SHARE = 8  # records that one thread reads from the disk at least
_WINDOW, _WINDOW_BYTES = 16, 2 << 20  # records, and bytes, that are asked for ahead of what is read
# Of records that the page cache holds: bytes that a thread takes of those that several share, the
# same of those that are decoded, and of the records that are shared (docs/appendix/storage.md).
_TOGETHER, _DECODED_TOGETHER = 1 << 20, 128 << 10
_SHARED = 512 << 10

Placed = tuple[Extent, Wanted]


class PlacedReader:
    """Reads records of one database from where they lie in its file."""

    def __init__(self, database: Database, table: BlockTable, threads: Threads) -> None:
        self._database, self._table, self._threads = database, table, threads
        self._form, self._heads = table.form, table.geometry.num_kv_heads
        self._images = threading.local()  # where each reading thread puts a record

    def read(self, txn: Transaction, batch: Batch, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Read records into their slots; return those that are not found whole at their places, or
        whose places cannot be told. Raises CorruptBlock, CorruptMemory for what cannot be read.
        """
        places = self._places(txn, wanted)
        left = [record for record, place in zip(wanted, places) if place is None]
        placed = [(place, record) for record, place in zip(wanted, places) if place is not None]
        cold = self._read_cached(txn.file, placed, batch, left)
        if cold:
            self._read_cold(txn.file, cold, batch, left)
        left.sort(key=itemgetter(0))
        return left

    def _places(self, txn: Transaction, wanted: Sequence[Wanted]) -> list[Extent | None]:
        try:
            return txn.extents_of("blocks", [record[0] for record in wanted])
        except OSError as error:
            raise CorruptMemory(
                f"keys of {self._database.path} cannot be read ({error}); check the disk, then run "
                "verify"
            ) from error

    # What the page cache holds

    def _read_cached(
        self, file: int, placed: Sequence[Placed], batch: Batch, failed: list[Wanted]
    ) -> list[Placed]:
        """Read records until a window of them is not in the page cache; return what is not read
        then. failed: takes those that are not whole.
        """
        flags = NOWAIT
        if flags is None:
            return list(placed)
        each, threads = self._shares(len(placed))
        taken = 0
        cold: list[Placed] = []

        def parts() -> Iterator[Sequence[Placed]]:
            nonlocal taken
            while taken < len(placed) and len(cold) < _WINDOW:
                part = placed[taken : taken + each]
                taken += len(part)
                yield part

        def work(part: Sequence[Placed]) -> None:
            cold.extend(self._read_part(file, part, batch, flags, failed))

        self._threads.share(parts(), work, threads)
        return [*cold, *placed[taken:]]

    def _shares(self, count: int) -> tuple[int, int]:
        """How many records of a batch a thread takes at once, and how many threads read it."""
        size = self._table.geometry.record_bytes
        raw = self._table.codec == "raw"  # imported documents may have another
        each = max(1, (_TOGETHER if raw else _DECODED_TOGETHER) // size)
        threads = min(self._threads.count, -(-count // each))
        return (count, 1) if size < _SHARED or threads < 2 else (each, threads)

    # What it does not hold

    def _read_cold(
        self, file: int, placed: Sequence[Placed], batch: Batch, failed: list[Wanted]
    ) -> None:
        """Read records that the disk may have to give, on several threads where there are many.

        Threads that share the work need no transaction of their own: the caller's keeps every place
        as it is.
        """
        placed = sorted(placed, key=itemgetter(0))
        threads = max(1, min(self._threads.count, len(placed) // _SHARE))
        share = -(-len(placed) // threads)
        self._threads.share(
            (placed[start : start + share] for start in range(0, len(placed), share)),
            lambda part: self._read_share(file, part, batch, threads, failed),
            threads,
        )

    def _read_share(
        self, file: int, placed: Sequence[Placed], batch: Batch, threads: int, failed: list[Wanted]
    ) -> None:
        """What one of `threads` does: asks for a window of records ahead, and reads and decodes one
        after the other.
        """
        pieces = [self._pieces(place, record, batch) for place, record in placed]
        size = placed[0][0].size or 1
        window = max(1, min(_WINDOW, _WINDOW_BYTES // size) // threads)
        for ahead in pieces[:window]:
            ask(file, ahead)
        for index, one in enumerate(placed):
            if index + window < len(pieces):
                ask(file, pieces[index + window])
            self._read_part(file, [one], batch, 0, failed)

    # Both

    def _read_part(
        self, file: int, part: Sequence[Placed], batch: Batch, flags: int, failed: list[Wanted]
    ) -> list[Placed]:
        """Read some records. With NOWAIT for flags those that the page cache does not hold are
        returned, and it ends at a window of them. Raises CorruptBlock for what the disk does not
        give.
        """
        cold: list[Placed] = []
        for number, (place, record) in enumerate(part):
            try:
                if not self._read_one(file, place, record, batch, flags):
                    failed.append(record)
            except BlockingIOError:
                cold.append((place, record))
                if len(cold) == _WINDOW:
                    return [*cold, *part[number + 1 :]]
            except CorruptBlock:
                failed.append(record)
            except OSError as error:
                raise self._unreadable(record, error) from error
        return cold

    def _unreadable(self, record: Wanted, error: OSError) -> CorruptBlock:
        return CorruptBlock(
            f"{record[1]} cannot be read from {self._database.path} ({error}); check the disk, "
            "then run verify"
        )

    def _read_one(self, file: int, place: Extent, record: Wanted, batch: Batch, flags: int) -> bool:
        """Read what is wanted of a record into its slots; return whether it is what was asked for.
        Raises CorruptBlock, where it is not, and OSError.
        """
        if batch.in_pages or place.size != self._form.raw_record_bytes:
            self._decode(file, place, record, batch, flags)
            return True
        _, key, write, _ = record
        heads, header = batch.heads_of(record), self._header()
        if heads is None:
            return self._read_heads(file, place, record, batch, flags)
        read_into(file, [header, *heads], place.offset, place.size, flags)
        return header == self._form.raw_header(key, write, joined_digests(heads))

    def _read_heads(
        self, file: int, place: Extent, record: Wanted, batch: Batch, flags: int
    ) -> bool:
        """The same for some heads of what may be a full block in codec raw."""
        _, key, write, places = record
        header, size = self._header(), batch.unit_bytes
        read_into(file, [header], place.offset, len(header), flags)
        digests = self._form.raw_digests(header, key, write)
        if digests is None:
            return False
        start = place.offset + len(header)
        for index in places:
            head, slot = batch.units[index][3], batch.slots[index]
            read_into(file, [slot], start + head * size, size, flags)
            if xxh3_64_digest(slot) != digest_of(digests, head):
                return False
        return True

    def _decode(self, file: int, place: Extent, record: Wanted, batch: Batch, flags: int) -> None:
        """Read what is wanted of a record in another codec, or of fewer tokens, and decode it."""
        _, key, write, places = record
        image = self._image(place.size)
        first, *others = self._pieces(place, record, batch)
        read_into(file, [image[: first.size]], place.offset, first.size, flags)
        if others:
            header = self._table.header(image, key, write)
            for head in {batch.units[index].head for index in places}:
                start, size = header.start + header.offsets[head], header.sizes[head]
                read_into(file, [image[start : start + size]], place.offset + start, size, flags)
        batch.fill(record, image)

    def _pieces(self, place: Extent, record: Wanted, batch: Batch) -> list[Extent]:
        """What to read of a record: all of it, or its header and, as far as can be told before, the
        wanted heads.
        """
        heads, places = self._heads, record[3]
        if 2 * len(places) >= heads:
            return [place]
        # In codec raw heads are of equal size; otherwise nearly so.
        start = min(self._form.header_bytes, place.size)
        size = (place.size - start) // heads
        return [Extent(place.offset, start)] + [
            Extent(place.offset + start + batch.units[index].head * size, size) for index in places
        ]

    def _header(self) -> bytearray:
        """Where this thread reads the header of a record to."""
        header: bytearray | None = getattr(self._images, "header", None)
        if header is None:
            header = self._images.header = bytearray(self._form.header_bytes)
        return header

    def _image(self, size: int) -> memoryview:
        """Where this thread reads a record to."""
        image: memoryview | None = getattr(self._images, "image", None)
        if image is None or len(image) < size:
            image = self._images.image = memoryview(bytearray(size))
        return image[:size]
