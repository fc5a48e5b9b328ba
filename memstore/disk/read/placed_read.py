"""Reading records from their places in the data file, into place: a full block in codec raw is
received by one call of the system where its header and its heads belong, and its checksums are
taken there while its bytes are near.

Read, and not mapped: a page of a mapped file is asked for when it is touched first, one at a time
and in every process anew, and a disk's failure is an error here, not the end of the process. What
the page cache holds is read at once (RWF_NOWAIT). At the first record that it does not hold, the
disk is asked for what is left of the batch, a window ahead of what is read, in the file's order.
"""

import threading
from collections.abc import Iterator, Sequence
from operator import itemgetter

from xxhash import xxh3_64_digest

from memstore.disk.lmdb.database import Database, Transaction
from memstore.disk.lmdb.extents import Extent, ask
from memstore.disk.read.batch import Batch, Wanted
from memstore.disk.read.ranges import NOWAIT, read_into
from memstore.disk.read.work_sharing import Threads
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptBlock, CorruptMemory

_SHARE = 8  # records that one thread reads from the disk at least
_WINDOW, _WINDOW_BYTES = 16, 2 << 20  # records, and bytes, that are asked for ahead of what is read
# Of records that the page cache holds: bytes that are read before they are checked, of those that
# are decoded, and of the records that several threads share (docs/appendix/storage.md).
_TOGETHER, _DECODED_TOGETHER = 1 << 20, 128 << 10
_SHARED = 512 << 10
_FEW = 64  # records that one thread alone reads before it checks them

Placed = tuple[Extent, Wanted]


class PlacedReader:
    """Reads records of one database from where they lie in its file."""

    def __init__(self, database: Database, table: BlockTable, threads: Threads) -> None:
        self._database, self._table, self._threads = database, table, threads
        self._heads = table.geometry.num_kv_heads
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
        """Read records until one is not in the page cache; return what is not read then. failed:
        takes those that are not whole.
        """
        flags = NOWAIT
        if flags is None:
            return list(placed)
        each, threads = self._shares(len(placed))
        taken = 0
        cold: list[Placed] = []

        def parts() -> Iterator[Sequence[Placed]]:
            nonlocal taken
            while taken < len(placed) and not cold:
                part = placed[taken : taken + each]
                taken += len(part)
                yield part

        def work(part: Sequence[Placed]) -> None:
            cold.extend(self._read_part(file, part, batch, flags, failed))

        self._threads.share(parts(), work, threads)
        return [*cold, *placed[taken:]] if cold else []

    def _shares(self, count: int) -> tuple[int, int]:
        """How many records of a batch are read before they are checked, and by how many threads."""
        size = self._table.geometry.record_bytes
        raw = self._table.codec == "raw"  # imported documents may have another
        each = max(1, (_TOGETHER if raw else _DECODED_TOGETHER) // size)
        threads = min(self._threads.count, -(-count // each))
        return (_FEW, 1) if size < _SHARED or threads < 2 else (each, threads)

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
        """Read some records. With NOWAIT among the flags it ends at the first that the page cache
        does not hold; return what is not read then. Raises CorruptBlock for what the disk does not
        give.
        """
        size = self._table.form.raw_record_bytes
        rest = [one for one in part if one[0].size != size]
        raw = [one for one in part if one[0].size == size] if rest else part
        whole: list[tuple[Placed, list[memoryview]]] = []
        if raw:
            places = batch.places_of([record for _, record in raw], self._headers(len(raw)))
            whole = [(one, parts) for one, parts in zip(raw, places) if parts is not None]
            raw = [one for one, parts in zip(raw, places) if parts is None]
        cold = self._receive(file, whole, batch, flags, failed) if whole else []
        if raw:
            cold += raw if cold else self._receive_heads(file, raw, batch, flags, failed)
        if rest:
            cold += rest if cold else self._read_each(file, rest, batch, flags, failed)
        return cold

    def _receive(
        self,
        file: int,
        whole: Sequence[tuple[Placed, list[memoryview]]],
        batch: Batch,
        flags: int,
        failed: list[Wanted],
    ) -> list[Placed]:
        """The same for records that may be full blocks in codec raw, each with where its bytes
        belong (Batch.places_of).
        """
        size, found, digests_of = self._table.form.raw_record_bytes, [], batch.digests_of
        try:
            for (place, _), parts in whole:
                read_into(file, parts, place.offset, size, flags)
                found.append(digests_of(parts))
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._unreadable(whole[len(found)][0][1], error) from error
        received = whole[: len(found)]
        records = [record for (_, record), _ in received]
        _, wrong = batch.check_in_place(records, [parts for _, parts in received], found)
        failed.extend([records[number] for number in wrong])
        return [one for one, _ in whole[len(found) :]]

    def _receive_heads(
        self, file: int, part: Sequence[Placed], batch: Batch, flags: int, failed: list[Wanted]
    ) -> list[Placed]:
        """The same for some heads of records that may be full blocks in codec raw."""
        header_bytes, size = self._table.form.header_bytes, batch.unit_bytes
        headers, found = self._headers(len(part)), []
        try:
            for header, (place, record) in zip(headers, part):
                digests = []
                read_into(file, [header], place.offset, header_bytes, flags)
                for index in record[3]:
                    head, slot = batch.units[index][3], batch.numbers[index] * size
                    values = batch.slots.bytes[slot : slot + size]
                    at = place.offset + header_bytes + head * size
                    read_into(file, [values], at, size, flags)
                    digests.append((head, xxh3_64_digest(values)))
                found.append(digests)
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._unreadable(part[len(found)][1], error) from error
        received = [record for _, record in part[: len(found)]]
        expected = batch.expected(received, headers[: len(found)])
        for record, digests, told in zip(received, found, expected):
            if told is None or any(told[head] != digest for head, digest in digests):
                failed.append(record)
        return list(part[len(found) :])

    def _read_each(
        self, file: int, rest: Sequence[Placed], batch: Batch, flags: int, failed: list[Wanted]
    ) -> list[Placed]:
        """The same for other records."""
        for number, one in enumerate(rest):
            try:
                self._read_one(file, *one, batch, flags)
            except BlockingIOError:
                return list(rest[number:])
            except CorruptBlock:
                failed.append(one[1])
            except OSError as error:
                raise self._unreadable(one[1], error) from error
        return []

    def _unreadable(self, record: Wanted, error: OSError) -> CorruptBlock:
        return CorruptBlock(
            f"{record[1]} cannot be read from {self._database.path} ({error}); check the disk, "
            "then run verify"
        )

    def _read_one(self, file: int, place: Extent, record: Wanted, batch: Batch, flags: int) -> None:
        """Read what is wanted of a record and decode it. Raises CorruptBlock, where it is not
        there, and OSError.
        """
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
        start = min(self._table.form.header_bytes, place.size)
        size = (place.size - start) // heads
        return [Extent(place.offset, start)] + [
            Extent(place.offset + start + batch.units[index].head * size, size) for index in places
        ]

    def _headers(self, count: int) -> list[memoryview]:
        size = self._table.form.header_bytes
        headers = memoryview(bytearray(count * size))
        return [headers[at : at + size] for at in range(0, count * size, size)]

    def _image(self, size: int) -> memoryview:
        """Where this thread reads a record to."""
        image: memoryview | None = getattr(self._images, "image", None)
        if image is None or len(image) < size:
            image = self._images.image = memoryview(bytearray(size))
        return image[:size]
