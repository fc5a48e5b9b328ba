"""Read batches of units from records in the data file into slots of a slab.

A full block in codec raw is read by one system call into its slots; any other record is read into a
buffer and decoded. Large batches use several threads. The file is read, not mapped: a mapped page
is fetched at its first access, one at a time, and a disk error there would end the process. Records
in the page cache are read first; then the system is asked for all the others at once.
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

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # Linux only; some file systems do not support it
_SHARE_BYTES, _MOST_THREADS = 2 << 20, 4  # least bytes of a thread; most threads of a batch
_LARGE = 512 << 10  # bytes of a record; with smaller ones threads wait for the GIL

# A record's key in the table, the same by its parts, its write id, and the positions in a batch of
# the units that are read from it, in the order of their heads.
Wanted = tuple[bytes, RecordKey, WriteId, Sequence[int]]


class Batch:
    """The units of one call, their slots, and their lengths once they are read."""

    def __init__(
        self,
        units: Sequence[BlockKey],
        bits: np.ndarray,
        numbers: Sequence[Sequence[int]],
        table: BlockTable,
    ) -> None:
        """bits: raw bits of the slab to write to, contiguous [S, 2, rows, head_dim]; numbers: the
        slots of each unit, which together have room for block_size tokens.
        """
        self.units, self.numbers, self._bits = units, numbers, bits
        self.lengths = [table.geometry.block_size] * len(units)
        self._table = table
        self._bytes = bits.reshape(-1).view(np.uint8).data
        self._slot_bytes, self._slot_size = bits[0].nbytes, bits.shape[2]
        self._heads = list(range(table.geometry.num_kv_heads))
        self.documents = {unit.document for unit in units}

    def by_record(self, writes: Mapping[int, WriteId]) -> list[Wanted]:
        """The records that hold the units, in file order.

        writes: document -> write id of its records.
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
        """The slots of a record's heads, in order, K and V adjacent as in the record; None unless
        each head is wanted once and has its own slot.
        """
        places, size = record[3], self._slot_bytes
        if [self.units[place].head for place in places] != self._heads:
            return None
        if self._slot_size < self._table.geometry.block_size:
            return None
        starts = [self.numbers[place][0] * size for place in places]
        return [self._bytes[start : start + size] for start in starts]

    def fill(self, record: Wanted, data: memoryview) -> None:
        """Check and decode the wanted heads of a record into their slots; `data` needs only the
        header and these heads. Raises CorruptBlock.
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
        """Bytes of the slots of these units."""
        size = self._slot_size
        return self._slot_bytes * sum(-(-self.lengths[place] // size) for place in places)


Placed = tuple[Extent, Wanted]


def _shares(placed: Sequence[Placed]) -> list[Sequence[Placed]]:
    """Split records into runs of at least _SHARE_BYTES, one for each thread."""
    size = sum(place.size for place, _ in placed)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = min(_MOST_THREADS, cores or 1, size // _SHARE_BYTES)
    if size < _LARGE * len(placed):
        threads = 1
    each = -(-len(placed) // max(1, threads))
    return [placed[at : at + each] for at in range(0, len(placed), each)]


class PlacedReader:
    """Reads records of the database in `path` by their places in its file. Safe for several
    threads.
    """

    def __init__(self, path: Path, table: BlockTable) -> None:
        self._path, self._table = path, table
        self._thread = threading.local()  # holds the thread's buffer for a record
        # reads and checksums release the GIL
        self._pool = ThreadPoolExecutor(_MOST_THREADS - 1, "memstore-read")

    def read(self, txn: Transaction, batch: Batch, wanted: Sequence[Wanted]) -> None:
        """Read at least one record into its slots. Raises MissingBlock, CorruptBlock (damaged or
        unreadable), CorruptMemory (unreadable keys).
        """
        placed = []
        for place, record in zip(txn.extents_of("blocks", [one[0] for one in wanted]), wanted):
            if place is None:
                raise MissingBlock(f"{record[1]}: no such record in {self._path}; run verify")
            placed.append((place, record))
        shares = _shares(placed)
        left, ended = deque(shares), SimpleQueue[BaseException | None]()

        def work() -> None:
            with suppress(IndexError):  # no share is left
                while True:
                    share = left.popleft()
                    try:
                        self._read_share(txn.file, share, batch)
                        ended.put(None)
                    except BaseException as error:
                        ended.put(error)

        # If the system refuses threads, or the pool is closed, fewer threads read. A submitted task
        # may then begin after this call has ended, and finds no share left.
        with suppress(RuntimeError):
            for _ in shares[1:]:
                self._pool.submit(work)
        work()
        for error in [ended.get() for _ in shares]:
            if error is not None:
                raise error

    def _read_share(self, file: int, placed: Sequence[Placed], batch: Batch) -> None:
        """Read records in turn. Raises CorruptBlock."""
        cold = [one for one in placed if not self._read_one(file, one, batch, _NOWAIT)]
        ask(file, [place for place, _ in cold])
        for one in cold:
            self._read_one(file, one, batch)

    def _read_one(self, file: int, placed: Placed, batch: Batch, flags: int = 0) -> bool:
        """Read the wanted heads of a record into their slots; False if `flags` say not to wait and
        the page cache lacks some of it. Raises CorruptBlock.
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
            image = self._image(size)  # for a damaged record, `fill` finds what is wrong
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
        """This thread's buffer for a record."""
        image: memoryview | None = getattr(self._thread, "image", None)
        if image is None or len(image) < size:
            image = self._thread.image = memoryview(bytearray(size))
        return image[:size]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
