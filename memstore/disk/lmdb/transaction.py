"""Transactions over a memory's tables, and the keys of the tables.

All tables are in LMDB's one unnamed database: a key there is the table's byte, then the key in the
table. Records are the last table, so that an ingest appends. Keys are big-endian, so that their
order is the order of ingest.
"""

import errno
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
from xxhash import xxh3_64_intdigest

from memstore.block import RecordKey
from memstore.disk.files import NO_PERMISSION, NO_SPACE, storage_full
from memstore.disk.lmdb.pages import Extent, Tree
from memstore.errors import CorruptMemory, MemoryLocked, MemstoreError, ReadOnlyMemory, StorageFull

_NAMES = ("meta", "documents", "tokens", "landmarks", "passages", "digests", "blocks")
TABLES = {name: bytes([number]) for number, name in enumerate(_NAMES)}  # the byte of each
COMMIT = TABLES["meta"] + b"commit"  # the key of the commit record
MAX_READERS = 512
_CHECKSUM = 8  # bytes of the checksum before a checked value


class Version(NamedTuple):
    """The last committed state of a memory."""

    file: int  # times that this process has rewritten the file
    transaction: int  # counted from 1 in each file


class Gate:
    """A shared-exclusive lock: transactions share it; a change of the open file has it alone."""

    def __init__(self) -> None:
        # an RLock in C: an interrupt just after acquiring it cannot leave it locked
        self._changed = threading.Condition(threading.RLock())
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._shut)
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextmanager
    def passed(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._shut)
            self._shut = True
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._shut = False
                self._changed.notify_all()


@contextmanager
def named_lmdb_errors(path: Path) -> Iterator[None]:
    """Translate LMDB's errors about the memory in `path` into errors with advice."""
    try:
        yield
    except lmdb.Error as error:
        raise _named(path, error) from error


def _named(path: Path, error: lmdb.Error) -> MemstoreError:
    text = str(error)
    if isinstance(error, lmdb.MapFullError):
        return StorageFull(
            f"{path} has filled the map of this process; run the command again, which maps more "
            "and resumes, or raise the limit of address space (ulimit -v)"
        )
    if isinstance(error, lmdb.DiskError) or any(
        os.strerror(code) in text for code in (*NO_SPACE, errno.EIO)
    ):
        # LMDB reports a short write, the sign of a full disk, as an input/output error
        return storage_full(path, text)
    if isinstance(error, lmdb.MemoryError):
        return StorageFull(
            f"{path} could not be mapped ({text}): this process has too little address space; "
            "raise the limit (ulimit -v)"
        )
    if isinstance(error, lmdb.ReadonlyError) or any(
        os.strerror(code) in text for code in NO_PERMISSION
    ):
        return ReadOnlyMemory(f"{path} cannot be used ({text}); check its permissions")
    if isinstance(error, lmdb.ReadersFullError):
        return MemoryLocked(
            f"{path} has {MAX_READERS} readers already; try again when some are done"
        )
    return CorruptMemory(f"{path} cannot be read ({text}); run verify, or restore it from a copy")


class ValuePart(NamedTuple):
    """A part of a value, with its checksum."""

    key: bytes
    start: int
    length: int
    digest: int  # XXH3-64 of the part


class Transaction:
    """A consistent view of all tables and, inside Database.write, one batch of changes to them.

    A memoryview of a value points into the mapped file. It becomes invalid when its transaction
    ends and, in a write transaction, with the next change, and may then show another record's
    bytes without an error: copy what is kept.
    """

    def __init__(self, inner: Any, path: Path, tree: Tree | None) -> None:
        """Use Database.read or Database.write. path: the memory's directory; tree: its key tree;
        None in a write transaction, whose pages are not in the file yet.
        """
        self.inner, self._path, self._tree = inner, path, tree
        self._last: bytes | None = None  # an upper bound of the keys

    @property
    def sees(self) -> int:
        """Number of the last commit that is part of this view."""
        number: int = self.inner.id()
        return number if self._tree is not None else number - 1

    @property
    def file(self) -> int:
        """The data file, for reading an Extent during the transaction."""
        assert self._tree is not None
        return self._tree.file

    def view(self, table: str, key: bytes) -> memoryview | None:
        """A view of a value, or None. Pages are read from disk if needed, without the GIL."""
        value: memoryview | None = self.inner.get(TABLES[table] + key)
        return value

    def parts(self, table: str, wanted: Sequence[ValuePart]) -> list[memoryview] | None:
        """Checked views of parts of values; None if one is missing or damaged."""
        get, begin, found = self.inner.get, TABLES[table], list[memoryview]()
        for key, start, length, digest in wanted:
            value: memoryview | None = get(begin + key)
            part = (value or memoryview(b""))[_CHECKSUM + start : _CHECKSUM + start + length]
            if xxh3_64_intdigest(part) != digest:
                return None
            found.append(part)
        return found

    def extents_of(self, table: str, keys: Sequence[bytes]) -> list[Extent | None]:
        """The places of values in the data file, without reading them; None for missing ones. Not
        in a write transaction. Raises CorruptMemory.
        """
        assert self._tree is not None
        try:
            return self._tree.find([TABLES[table] + key for key in keys])
        except OSError as error:
            raise CorruptMemory(
                f"keys of {self._path} cannot be read ({error}); check the disk, then run verify"
            ) from error

    def put(self, table: str, key: bytes, value: bytes | memoryview) -> None:
        """Write a value, replacing an existing one."""
        key = TABLES[table] + key
        if self._last is None:
            with self.inner.cursor() as cursor:
                self._last = bytes(cursor.key()) if cursor.last() else b""
        append = key > self._last  # appending fills pages instead of splitting them in half
        self.inner.put(key, value, append=append)
        if append:
            self._last = key

    def delete(self, table: str, key: bytes) -> int:
        """Delete a value; return its bytes, 0 if there was none."""
        value = self.view(table, key)
        if value is None:
            return 0
        size = len(value)
        self.inner.delete(TABLES[table] + key)
        return size

    def delete_range(self, table: str, start: bytes, end: bytes) -> None:
        """Delete the values from key `start` to `end` (exclusive)."""
        start, end = _within(table, start, end)
        with self.inner.cursor() as cursor:
            there = cursor.set_range(start)
            while there and bytes(cursor.key()) < end:
                cursor.delete()  # moves to the next
                there = bool(cursor.key())

    def scan(
        self, table: str, start: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Keys and views of values from key `start` to `end` (exclusive), in order. Change nothing
        while iterating.
        """
        start, end = _within(table, start, end)
        for key, value in self.entries(start):
            if key >= end:
                return
            yield key[1:], value

    def entries(self, start: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """Keys, with their table's byte, and views of values of all tables, in order."""
        with self.inner.cursor() as cursor:
            if not (cursor.set_range(start) if start else cursor.first()):
                return
            for key, value in cursor.iternext():
                key = bytes(key)
                if key < start:  # a damaged tree may be circular
                    raise CorruptMemory(f"{self._path}: its keys are out of order; run verify")
                yield key, value
                start = key + b"\0"

    def key_at_or_before(self, table: str, key: bytes) -> bytes | None:
        """The greatest key at or before `key`, or None."""
        begin = TABLES[table]
        with self.inner.cursor() as cursor:
            if cursor.set_range(begin + key) and bytes(cursor.key()) == begin + key:
                return key
            there = cursor.prev() if cursor.key() else cursor.last()
            found = bytes(cursor.key()) if there else b""
        return found[1:] if found[:1] == begin else None

    # Checked values: a checksum over table, key and value precedes the value, so that neither an
    # altered value nor one under a wrong key is used.

    def put_checked(self, table: str, key: bytes, value: bytes) -> None:
        """Write a value with its checksum."""
        self.put(table, key, digest(table, key, value) + value)

    def get_checked(self, table: str, key: bytes) -> bytes | None:
        """A copy of a value that put_checked wrote, or None. Raises CorruptMemory."""
        view = self.view(table, key)
        return None if view is None else self._checked(table, key, view)

    def scan_checked(
        self, table: str, start: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """As `scan`, with copies of values that put_checked wrote. Raises CorruptMemory."""
        for key, view in self.scan(table, start, end):
            yield key, self._checked(table, key, view)

    def _checked(self, table: str, key: bytes, view: memoryview) -> bytes:
        told = bytes(view)
        value = told[8:]
        if digest(table, key, value) != told[:8]:
            raise CorruptMemory(
                f"{self._path}: the {table} entry {key.hex()} is damaged; run verify"
            )
        return value


def _within(table: str, start: bytes, end: bytes | None) -> tuple[bytes, bytes]:
    """A range of keys of a table, with the table's byte; end None: to the end of the table."""
    begin = TABLES[table]
    return begin + start, bytes([begin[0] + 1]) if end is None else begin + end


def digest(table: str, key: bytes, value: bytes) -> bytes:
    """The checksum of a checked value."""
    return xxh3_64_intdigest(value, xxh3_64_intdigest(key, len(table))).to_bytes(8, "little")


def commit_record(transaction: int) -> bytes:
    """The checksummed value that a commit stores, with its transaction number, so that a lost
    commit is noticed.
    """
    value = transaction.to_bytes(8, "little")
    return digest("meta", COMMIT, value) + value


def read_commit_record(record: bytes) -> int | None:
    """The transaction number of a commit record; None for a damaged record."""
    value = record[_CHECKSUM:]
    right = digest("meta", COMMIT, value) == record[:_CHECKSUM]
    return int.from_bytes(value, "little") if right else None


# Keys

_U64, _BLOCK, _RUN, _TOKENS = (struct.Struct(form) for form in (">Q", ">QIH", ">QHI", ">QQ"))
Range = tuple[bytes, bytes]  # first key, and end key (exclusive)


def number_key(number: int) -> bytes:
    """Key of the row of a document, or of a passage."""
    return _U64.pack(number)


def tokens_key(document: int, first: int) -> bytes:
    """Key of the part of a document's text that begins with token `first`; with block `first` for a
    document of passages.
    """
    return _TOKENS.pack(document, first)


def run_key(document: int, part: int, first_block: int) -> bytes:
    """Key of a run of search data; part: the layer of landmark keys, or the kind of a selector's
    data.
    """
    return _RUN.pack(document, part, first_block)


def read_run_key(key: bytes) -> tuple[int, int, int]:
    """Document, part and first block of a run's key. Raises CorruptMemory for an invalid key."""
    document, part, first_block = _unpack_key(_RUN, key)
    return document, part, first_block


def run_range(document: int, part: int) -> Range:
    """All keys of one document and part."""
    return _RUN.pack(document, part, 0), _RUN.pack(document, part + 1, 0)


def record_key(key: RecordKey) -> bytes:
    """Key of a record."""
    return _BLOCK.pack(*key)


def _unpack_key(form: struct.Struct, key: bytes) -> tuple[Any, ...]:
    """The parts of a key. Raises CorruptMemory, since keys have no checksum."""
    if len(key) != form.size:
        raise CorruptMemory(
            f"a key of {len(key)} bytes instead of {form.size} ({key[:32].hex()}); run verify"
        )
    parts = form.unpack(key)
    if parts[0] >> 62:
        raise CorruptMemory(f"a key has the invalid number {parts[0]}; run verify")
    return parts


def read_number_key(key: bytes) -> int:
    """The number of a row's key. Raises CorruptMemory for an invalid key."""
    number: int = _unpack_key(_U64, key)[0]
    return number


def read_tokens_key(key: bytes) -> tuple[int, int]:
    """Document and first token, or block, of a part's key."""
    document, first = _unpack_key(_TOKENS, key)
    return document, first


def read_record_key(key: bytes) -> RecordKey:
    """The record of a key."""
    return RecordKey(*_unpack_key(_BLOCK, key))


def document_range(document: int) -> Range:
    """All keys of one document, in a table whose keys begin with the document."""
    return _U64.pack(document), _U64.pack(document + 1)


def record_range(document: int, first: int = 0) -> Range:
    """All keys of a document's records from block `first` on."""
    return _BLOCK.pack(document, first, 0), _U64.pack(document + 1)
