"""Reading records into the slots of a slab: a batch of units, and reading from where records lie in
the data file.

A full block in codec raw is read by one call of the system into its slots, anything else into an
image that is decoded; megabytes on several threads. Read, and not mapped: a page of a mapped file
is asked for when it is touched first, one at a time, and a disk's failure is an error here, not the
end of the process. What the page cache holds is read first; the system is asked for all of the rest
at once.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from xxhash import xxh3_64_digest

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.document import WriteId
from memstore.disk.lmdb.pages import Extent, ask
from memstore.disk.lmdb.transaction import Transaction, record_key
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptBlock, MissingBlock

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # of Linux; not every file system knows it
_SHARE_BYTES, _MOST_THREADS = 2 << 20, 4  # of a thread, at least; of a batch, at most
_LARGE = 512 << 10  # bytes of a record; with smaller ones threads wait for the interpreter

# A record's key as bytes in the table and by its parts, the write that made it, and which units of
# a batch are read from it, in the order of their heads.
Wanted = tuple[bytes, RecordKey, WriteId, Sequence[int]]


class Batch:
    """The units of one call, the slots that they go to, and their lengths once they are there."""

    def __init__(
        self,
        units: Sequence[BlockKey],
        bits: np.ndarray,
        numbers: Sequence[Sequence[int]],
        table: BlockTable,
    ) -> None:
        """bits: of the slab, contiguous [S, 2, rows, head_dim], which are written to; numbers: of
        the slots of each unit, which have room for block_size tokens together.
        """
        self.units, self.numbers, self._bits = units, numbers, bits
        self.lengths = [table.geometry.block_size] * len(units)
        self._table = table
        self._bytes = bits.reshape(-1).view(np.uint8).data
        self._slot_bytes, self._slot_size = bits[0].nbytes, bits.shape[2]
        self._heads = list(range(table.geometry.num_kv_heads))
        self.documents = {unit.document for unit in units}

    def by_record(self, writes: Mapping[int, WriteId]) -> list[Wanted]:
        """The records that hold the units, in the order in which they lie in the file.

        writes: by which the records of every document of the units are known.
        """
        units = self.units
        places: dict[tuple[int, int, int], list[int]] = {}
        for place, (document, layer, block, _) in enumerate(units):
            places.setdefault((document, block, layer), []).append(place)
        wanted = []
        for parts, of_record in places.items():
            of_record.sort(key=lambda place: units[place].head)
            key = RecordKey(*parts)
            wanted.append((record_key(key), key, writes[key.document], of_record))
        return sorted(wanted)

    def heads_of(self, record: Wanted) -> list[memoryview] | None:
        """The slots of a record's heads, in their order, in which K and V are neighbours, as in the
        record; None unless each head is wanted once and has a slot of its own.
        """
        places, size = record[3], self._slot_bytes
        if [self.units[place].head for place in places] != self._heads:
            return None
        if self._slot_size < self._table.geometry.block_size:
            return None
        starts = [self.numbers[place][0] * size for place in places]
        return [self._bytes[start : start + size] for start in starts]

    def fill(self, record: Wanted, data: memoryview) -> None:
        """Check and decode the wanted heads of a record into their slots; of another codec only the
        header and these have to be there. Raises CorruptBlock.
        """
        _, key, write, places = record
        header = self._table.header(data, key, write)
        for place in places:
            self.lengths[place] = header.length
            held, size = self.numbers[place], self._slot_size
            held = held[: -(-header.length // size)]
            if len(held) == 1:
                whole = self._bits[held[0]]
            else:
                whole = np.empty((2, len(held) * size, *self._bits.shape[3:]), self._bits.dtype)
            head, kv = self.units[place].head, (whole[0], whole[1])
            self._table.decode_head(data, key, header, head, kv)
            for at, slot in enumerate(held) if len(held) > 1 else ():
                self._bits[slot] = whole[:, at * size : (at + 1) * size]

    def bytes_of(self, places: Iterable[int]) -> int:
        """Bytes of the slots that these units take."""
        size = self._slot_size
        return self._slot_bytes * sum(-(-self.lengths[place] // size) for place in places)


Placed = tuple[Extent, Wanted]


def _shares(placed: Sequence[Placed]) -> list[Sequence[Placed]]:
    """What each of several threads reads: runs of records of a few megabytes at least."""
    size = sum(place.size for place, _ in placed)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = min(_MOST_THREADS, cores or 1, size // _SHARE_BYTES)
    if size < _LARGE * len(placed):
        threads = 1
    each = -(-len(placed) // max(1, threads))
    return [placed[at : at + each] for at in range(0, len(placed), each)]


class PlacedReader:
    """Reads records of the database in `path` from where they lie in its file. Safe for several
    threads.
    """

    def __init__(self, path: Path, table: BlockTable) -> None:
        self._path, self._table = path, table
        self._thread = threading.local()  # has the image of the record that it reads
        # the system's reads and checksums leave the interpreter to other threads
        self._pool = ThreadPoolExecutor(_MOST_THREADS - 1, "memstore-read")

    def read(self, txn: Transaction, batch: Batch, wanted: Sequence[Wanted]) -> None:
        """Read records, at least one, into their slots. Raises MissingBlock, CorruptBlock for what
        is damaged or cannot be read, CorruptMemory for keys that cannot be read.
        """
        placed = []
        for place, record in zip(txn.extents_of("blocks", [one[0] for one in wanted]), wanted):
            if place is None:
                raise MissingBlock(f"{record[1]}: no such record in {self._path}; run verify")
            placed.append((place, record))
        shares = _shares(placed)
        left, ended = deque(shares), SimpleQueue[BaseException | None]()

        def work() -> None:
            with suppress(IndexError):  # nothing is left
                while True:
                    ended.put(self._outcome(txn.file, left.popleft(), batch))

        # Where the system gives no more threads, or the pool is closed, fewer read. What was asked
        # of the pool may still begin then, even when this call has ended, and finds nothing left.
        with suppress(RuntimeError):
            for _ in shares[1:]:
                self._pool.submit(work)
        work()
        for error in [ended.get() for _ in shares]:
            if error is not None:
                raise error

    def _outcome(self, file: int, placed: Sequence[Placed], batch: Batch) -> BaseException | None:
        """Read records; the error where that fails."""
        try:
            self._read_share(file, placed, batch)
        except BaseException as error:
            return error
        return None

    def _read_share(self, file: int, placed: Sequence[Placed], batch: Batch) -> None:
        """Read records one after the other. Raises CorruptBlock."""
        cold = [one for one in placed if not self._read_one(file, one, batch, _NOWAIT)]
        ask(file, [place for place, _ in cold])
        for one in cold:
            self._read_one(file, one, batch)

    def _read_one(self, file: int, placed: Placed, batch: Batch, flags: int = 0) -> bool:
        """Read what is wanted of a record into its slots; False where the page cache lacks some of
        it and `flags` say not to wait. Raises CorruptBlock.
        """
        (at, size), record = placed
        try:
            heads = batch.heads_of(record) if size == self._table.raw_record_bytes else None
            if heads is not None:
                header = bytearray(self._table.header_bytes)
                if os.preadv(file, [header, *heads], at, flags) < size:
                    raise OSError("the file ends before it")
                digests = b"".join(map(xxh3_64_digest, heads))
                if header == self._table.raw_header(record[1], record[2], digests):
                    return True
            image = self._image(size)  # of what is damaged it is told then what is wrong
            if os.preadv(file, [image], at, flags) < size:
                raise OSError("the file ends before it")
        except OSError as error:
            if flags:
                return False
            raise CorruptBlock(
                f"{record[1]} cannot be read from {self._path} ({error}); check the disk, then "
                "run verify"
            ) from error
        batch.fill(record, image)
        return True

    def _image(self, size: int) -> memoryview:
        """Where this thread reads a record to."""
        image: memoryview | None = getattr(self._thread, "image", None)
        if image is None or len(image) < size:
            image = self._thread.image = memoryview(bytearray(size))
        return image[:size]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
