"""Reading records that the page cache does not hold: the disk is asked for all of a batch at once,
in the file's order; then they are read (not mapped: a disk's failure is an error then, not the end
of the process) by several threads.
"""

import os
import threading
from collections.abc import Sequence
from operator import itemgetter

from xxhash import xxh3_64_digest

from memstore.disk.format.record import WriteId, damaged_head
from memstore.disk.lmdb.database import Database, Transaction
from memstore.disk.lmdb.extents import CAN_ASK, Extent, ask
from memstore.disk.read.batch import Batch, Wanted
from memstore.disk.read.work_sharing import Threads
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptBlock, CorruptMemory

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not Linux: the disk is never asked in advance there
    CAN_WATCH = False
else:
    CAN_WATCH = CAN_ASK  # and what it did can be told

_SHARE = 8  # records that one thread reads and checks at least
_WINDOW, _WINDOW_BYTES = 16, 2 << 20  # records, and bytes, that are asked for ahead of what is read


def disk_reads() -> int:
    """A number that grows when this thread makes the disk read: by a page fault, or by asking in
    advance.
    """
    if not CAN_WATCH:
        return 0
    usage = getrusage(RUSAGE_THREAD)
    return usage.ru_majflt + usage.ru_inblock


class ColdReader:
    """Reads records of one database whose places are known, on several threads where there are
    many.
    """

    def __init__(self, database: Database, table: BlockTable, threads: Threads) -> None:
        self._database, self._table, self._threads = database, table, threads
        self._heads = table.geometry.num_kv_heads
        self._images = threading.local()  # where each reading thread puts a record

    def read(
        self, txn: Transaction, batch: Batch, wanted: Sequence[Wanted]
    ) -> tuple[Sequence[Wanted], bool]:
        """Ask the disk for everything at once before any of it is read; return the records that are
        left, to be read from the mapped file, and whether the disk had to read at all.
        """
        before = disk_reads()
        placed: list[tuple[Extent, Wanted]] = []
        left: list[Wanted] = []
        for record, place in zip(wanted, self._places(txn, wanted)):
            if place is None:
                left.append(record)
            else:
                placed.append((place, record))
        placed.sort(key=itemgetter(0))
        for start in range(0, len(placed), _SHARE):
            for place, record in placed[start : start + _SHARE]:
                ask(txn.file, self._pieces(place, record, batch))
            if disk_reads() != before:
                return left + self._read_placed(txn.file, placed, batch), True
        return wanted, False  # the page cache has it all

    def _places(self, txn: Transaction, wanted: Sequence[Wanted]) -> list[Extent | None]:
        try:
            return txn.extents_of("blocks", [record[0] for record in wanted])
        except OSError as error:
            raise CorruptMemory(
                f"keys of {self._database.path} cannot be read ({error}); check the disk, then run "
                "verify"
            ) from error

    def _read_placed(
        self, file: int, placed: Sequence[tuple[Extent, Wanted]], batch: Batch
    ) -> list[Wanted]:
        """Read records from their places in the file; return those that were not found whole there.

        Threads that share the work need no transaction of their own: the caller's keeps every place
        as it is.
        """
        threads = max(1, min(self._threads.count, len(placed) // _SHARE))
        share = -(-len(placed) // threads)
        failed: list[Wanted] = []
        self._threads.share(
            (placed[start : start + share] for start in range(0, len(placed), share)),
            lambda part: failed.extend(self._read_share(file, part, batch, threads)),
            threads,
        )
        return failed

    def _read_share(
        self, file: int, placed: Sequence[tuple[Extent, Wanted]], batch: Batch, threads: int
    ) -> list[Wanted]:
        """What one of `threads` does: asks for a window of records ahead, and reads and decodes one
        after the other.
        """
        failed = []
        pieces = [self._pieces(place, record, batch) for place, record in placed]
        window = (
            max(1, min(_WINDOW, _WINDOW_BYTES // (placed[0][0].size or 1)) // threads)
            if placed
            else 0
        )
        for ahead in pieces[:window]:
            ask(file, ahead)
        for index, (place, record) in enumerate(placed):
            if index + window < len(pieces):
                ask(file, pieces[index + window])
            try:
                self._read_one(file, place, record, pieces[index], batch)
            except CorruptBlock:
                failed.append(record)
            except OSError as error:
                _, key, _, _ = record
                raise CorruptBlock(
                    f"{key} cannot be read from {self._database.path} ({error}); check the disk, "
                    "then run verify"
                ) from error
        return failed

    def _read_one(
        self, file: int, place: Extent, record: Wanted, pieces: Sequence[Extent], batch: Batch
    ) -> None:
        """Read what is wanted of a record and decode it. Raises CorruptBlock, where it is not
        there, and OSError.
        """
        _, key, write, places = record
        image = self._image(place.size)
        if place.size == self._table.form.raw_record_bytes:
            self._read_raw(file, place, record, write, batch, image)
            return
        _read(file, [image[: pieces[0].size]], place.offset)
        if len(pieces) > 1:
            header = self._table.header(image, key, write)
            for head in {batch.units[index].head for index in places}:
                start = header.start + header.offsets[head]
                _read(file, [image[start : start + header.sizes[head]]], place.offset + start)
        batch.fill(record, image)

    def _read_raw(
        self,
        file: int,
        place: Extent,
        record: Wanted,
        write: WriteId,
        batch: Batch,
        image: memoryview,
    ) -> None:
        """The same for a full block in codec raw, as far as its size tells: values are read into
        the slots at once.
        """
        _, key, _, places = record
        size = batch.unit_bytes
        start = place.size - self._heads * size
        units = []  # head, and its slot
        for index in places:
            at = batch.numbers[index] * size
            units.append((batch.units[index].head, batch.slots.bytes[at : at + size]))
        if [head for head, _ in units] == list(range(self._heads)):
            _read(file, [image[:start], *(slot for _, slot in units)], place.offset)
        else:
            _read(file, [image[:start]], place.offset)
            for head, slot in units:
                _read(file, [slot], place.offset + start + head * size)
        digests = self._table.form.raw_digests(image, key, write)
        if digests is None:  # it is something else after all
            raise CorruptBlock(f"{key} is not at its place")
        for head, slot in units:
            if xxh3_64_digest(slot) != digests[head]:
                raise damaged_head(key, head, "its checksum does not match")

    def _pieces(self, place: Extent, record: Wanted, batch: Batch) -> list[Extent]:
        """What to read of a record: all of it, or its header and, as far as can be told before, the
        wanted heads.
        """
        heads, places = self._heads, record[3]
        if 2 * len(places) >= heads:
            return [place]
        # In codec raw heads are of equal size; otherwise nearly so.
        start = min(self._table.form.header_bytes, place.size)
        size = (place.size - start) // heads
        return [Extent(place.offset, start)] + [
            Extent(place.offset + start + batch.units[index].head * size, size) for index in places
        ]

    def _image(self, size: int) -> memoryview:
        """Where this thread reads a record to."""
        image: memoryview | None = getattr(self._images, "image", None)
        if image is None or len(image) < size:
            image = self._images.image = memoryview(bytearray(size))
        return image[:size]


def _read(file: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill buffers, one after the other, from a file. Raises OSError, also where the file ends
    before.
    """
    left = [buffer for buffer in buffers if buffer]
    while left:
        count = os.preadv(file, left, offset)
        if not count:
            raise OSError("the file ends before it")
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
