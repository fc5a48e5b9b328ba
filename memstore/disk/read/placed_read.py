"""Reading records from their places in the data file, into place: a full block in codec raw is
received by one call of the system where its header and its heads belong, and its checksums are
taken there while its bytes are near.

Read, and not mapped: a page of a mapped file is asked for when it is touched first, one at a time
and in every process anew, and a disk's failure is an error here, not the end of the process. What
the page cache holds is read at once (RWF_NOWAIT). For the rest, or what is left of a batch once a
window of records was not there, the disk is asked a window ahead of what is read, in the file's
order.
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
        """Read some records. With NOWAIT for flags those that the page cache does not hold are
        returned, and it ends at a window of them. Raises CorruptBlock for what the disk does not
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
        cold += self._receive_heads(file, raw, batch, flags, failed) if raw else []
        return cold + self._read_each(file, rest, batch, flags, failed) if rest else cold

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
        size, digests_of = self._table.form.raw_record_bytes, batch.digests_of
        records, received, found = [], [], []
        cold: list[Placed] = []
        for number, (one, parts) in enumerate(whole):
            try:
                read_into(file, parts, one[0].offset, size, flags)
            except BlockingIOError:
                cold.append(one)
                if len(cold) == _WINDOW:
                    cold += [after for after, _ in whole[number + 1 :]]
                    break
                continue
            except OSError as error:
                raise self._unreadable(one[1], error) from error
            found.append(digests_of(parts))
            records.append(one[1])
            received.append(parts)
        _, wrong = batch.check_in_place(records, received, found)
        failed.extend([records[number] for number in wrong])
        return cold

    def _receive_heads(
        self, file: int, part: Sequence[Placed], batch: Batch, flags: int, failed: list[Wanted]
    ) -> list[Placed]:
        """The same for some heads of records that may be full blocks in codec raw."""
        header_bytes, size = self._table.form.header_bytes, batch.unit_bytes
        records, headers, found = [], [], []
        cold: list[Placed] = []
        for number, (header, one) in enumerate(zip(self._headers(len(part)), part)):
            (start, _), record = one
            digests = []
            try:
                read_into(file, [header], start, header_bytes, flags)
                for index in record[3]:
                    head, slot = batch.units[index][3], batch.numbers[index] * size
                    values = batch.slots.bytes[slot : slot + size]
                    read_into(file, [values], start + header_bytes + head * size, size, flags)
                    digests.append((head, xxh3_64_digest(values)))
            except BlockingIOError:
                cold.append(one)
                if len(cold) == _WINDOW:
                    cold += part[number + 1 :]
                    break
                continue
            except OSError as error:
                raise self._unreadable(record, error) from error
            found.append(digests)
            records.append(record)
            headers.append(header)
        for record, digests, told in zip(records, found, batch.expected(records, headers)):
            if told is None or any(told[head] != digest for head, digest in digests):
                failed.append(record)
        return cold

    def _read_each(
        self, file: int, rest: Sequence[Placed], batch: Batch, flags: int, failed: list[Wanted]
    ) -> list[Placed]:
        """The same for other records."""
        cold: list[Placed] = []
        for number, one in enumerate(rest):
            try:
                self._read_one(file, *one, batch, flags)
            except BlockingIOError:
                cold.append(one)
                if len(cold) == _WINDOW:
                    return [*cold, *rest[number + 1 :]]
            except CorruptBlock:
                failed.append(one[1])
            except OSError as error:
                raise self._unreadable(one[1], error) from error
        return cold

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
