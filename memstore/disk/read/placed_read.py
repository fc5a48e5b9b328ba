"""Reading records from where they lie in the data file: a full block in codec raw by one call of
the system into its slots, anything else into an image that is decoded; of megabytes on several
threads.

Read, and not mapped: a page of a mapped file is asked for when it is touched first, one at a time,
and a disk's failure is an error here, not the end of the process. The system is asked for megabytes
of records ahead of the one that is read, but for those that it has: to ask takes it as long as a
fifth of reading them.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from memstore.disk.lmdb.database import Transaction
from memstore.disk.lmdb.pages import Extent, ask
from memstore.disk.read.batch import Batch, Wanted, joined_digests
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptBlock, CorruptMemory

_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # of Linux; not every file system knows it
_AHEAD_BYTES = 8 << 20  # that are asked for ahead of what is read
_SHARE_BYTES, _MOST_THREADS = 2 << 20, 4  # of a thread, at least; of a batch, at most
_LARGE = 512 << 10  # bytes of a record; with smaller ones threads wait for the interpreter

Placed = tuple[Extent, Wanted]


def read_into(file: int, buffers: Sequence[memoryview | bytearray], place: Extent) -> None:
    """Fill buffers, together of the size of a place in a file, from there. Raises OSError, also
    where the file ends before.
    """
    read = os.preadv(file, buffers, place.offset)
    left = [memoryview(buffer) for buffer in buffers] if read < place.size else []
    done = read
    while left:
        if not read:
            raise OSError("the file ends before it")
        while left and read >= len(left[0]):
            read -= len(left.pop(0))
        if left:
            left[0] = left[0][read:]
            read = os.preadv(file, left, place.offset + done)
            done += read


def _is_cached(file: int, place: Extent) -> bool:
    """Does the page cache hold the end of what lies at a place? False where that is not told."""
    if _NOWAIT is not None:
        with suppress(OSError):
            return os.preadv(file, [bytearray(1)], place.offset + place.size - 1, _NOWAIT) == 1
    return False


def _shares(placed: Sequence[Placed]) -> list[Sequence[Placed]]:
    """What each of several threads reads: runs of records of a few megabytes at least."""
    size = sum(place.size for place, _ in placed)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = min(_MOST_THREADS, cores or 1, size // _SHARE_BYTES)
    if size < _LARGE * len(placed):
        threads = 1
    each = -(-len(placed) // max(1, threads))
    return [placed[at : at + each] for at in range(0, len(placed), each)] if each else []


class PlacedReader:
    """Reads records of the database in `path` from where they lie in its file. Safe for several
    threads.
    """

    def __init__(self, path: Path, table: BlockTable) -> None:
        self._path, self._form = path, table.form
        self._thread = threading.local()  # has the image of the record that it reads

    def read(self, txn: Transaction, batch: Batch, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Read records into their slots; return those that have no place of their own in the file.
        Raises CorruptBlock for what is damaged or cannot be read, CorruptMemory for keys that
        cannot be read.
        """
        try:
            places = txn.extents_of("blocks", [record[0] for record in wanted])
        except OSError as error:
            raise CorruptMemory(
                f"keys of {self._path} cannot be read ({error}); check the disk, then run verify"
            ) from error
        end = os.fstat(txn.file).st_size
        left: list[Wanted] = []
        placed: list[Placed] = []
        for place, record in zip(places, wanted):
            if place is None:
                left.append(record)
            elif place.offset + place.size > end:
                raise self._unreadable(record, "the file ends before it")
            else:
                placed.append((place, record))
        first, *others = _shares(placed) or [[]]
        if not others:
            self._read_share(txn.file, first, batch)
            return left
        # the system's reads and checksums leave the interpreter to other threads
        here, there = [first], []
        with ThreadPoolExecutor(len(others), thread_name_prefix="memstore-read") as pool:
            for some in others:
                try:
                    there.append(pool.submit(self._read_share, txn.file, some, batch))
                except RuntimeError:  # the system gives no more threads
                    here.append(some)
            for some in here:
                self._read_share(txn.file, some, batch)
        for reading in there:
            reading.result()
        return left

    def _read_share(self, file: int, placed: Sequence[Placed], batch: Batch) -> None:
        """Read records one after the other, and ask for those that follow. Raises CorruptBlock."""
        coming, ahead = iter(placed), 0
        for place, record in placed:
            asked: list[Extent] = []
            while ahead < _AHEAD_BYTES and (following := next(coming, None)) is not None:
                if not _is_cached(file, following[0]):
                    asked.append(following[0])
                ahead += following[0].size
            ask(file, asked)
            try:
                self._read_one(file, place, record, batch)
            except OSError as error:
                raise self._unreadable(record, error) from error
            ahead -= place.size

    def _read_one(self, file: int, place: Extent, record: Wanted, batch: Batch) -> None:
        """Read what is wanted of a record into its slots. Raises CorruptBlock, OSError."""
        form = self._form
        full = place.size == form.raw_record_bytes and not batch.in_pages
        heads = batch.heads_of(record) if full else None
        if heads is not None:
            header = bytearray(form.header_bytes)
            read_into(file, [header, *heads], place)
            if header == form.raw_header(record[1], record[2], joined_digests(heads)):
                return
        image = self._image(place.size)  # of what is damaged it is told then what is wrong
        read_into(file, [image], place)
        batch.fill(record, image)

    def _image(self, size: int) -> memoryview:
        """Where this thread reads a record to."""
        image: memoryview | None = getattr(self._thread, "image", None)
        if image is None or len(image) < size:
            image = self._thread.image = memoryview(bytearray(size))
        return image[:size]

    def _unreadable(self, record: Wanted, what: object) -> CorruptBlock:
        return CorruptBlock(
            f"{record[1]} cannot be read from {self._path} ({what}); check the disk, then run "
            "verify"
        )
