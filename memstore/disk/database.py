"""The LMDB environment of a memory: opening and its checks, transactions, map growth, the writer
lock.

No other file knows LMDB. One environment is shared by all Database objects of a process that name
the same directory, and it is unusable in a forked child, which cannot open that directory either (a
spawned process can, and one forked before the directory was opened). Every commit reaches the disk
before it returns.
"""

import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import lmdb
from xxhash import xxh3_64_intdigest

from memstore.disk.pages import (
    NETWORK,
    Place,
    ask,
    check_length,
    file_system_of,
    place_of,
    places_of,
    share,
    whole_pages,
)
from memstore.errors import (
    CorruptMemory,
    InvalidInput,
    MemoryClosed,
    MemoryExists,
    MemoryLocked,
    MemoryNotFound,
    MemstoreError,
    ReadOnlyMemory,
    StorageFull,
)

T = TypeVar("T")

TABLES = ("meta", "documents", "tokens", "landmarks", "blocks")
INITIAL_MAP = 1 << 28  # bytes of address space; the file grows only with what is written
_MAX_READERS = 512
_AHEAD_BYTES = 8 << 20  # that a walk over values asks for in advance
_DATA, _LOCK, _WRITER = "data.mdb", "lock.mdb", "writer.lock"
_COMPACTED = "data.mdb.compact"
_OWN_NAMES = {_DATA, _LOCK, _WRITER, _COMPACTED, "index"}


_COMMIT = struct.Struct("<Qd")


class Commit(NamedTuple):
    """A commit that was made."""

    transaction: int  # its number
    time: float  # seconds since 1970


class Transaction:
    """A consistent view of all tables and, inside Database.write, one batch of changes to them.

    A memoryview from here lies in the mapped file: it is dead once its transaction ends and, in a
    writing one, after the next change. Copy what is to be kept. A dead view may silently show
    another record's bytes.
    """

    def __init__(self, inner: Any, environment: "_Environment", *, writable: bool) -> None:
        self._inner = inner
        self._tables: dict[str, Any] = environment.tables
        self._path = environment.path
        self._page_size = environment.page_size
        assert environment.data_file is not None
        # descriptor, to read a Place from while the transaction lasts
        self.file: int = environment.data_file
        self._last: dict[str, bytes] = {}  # a table's greatest key, at least
        self.writable = writable
        self.bytes_put = 0

    def view(self, table: str, key: bytes) -> memoryview | None:
        """A value where it lies, or None. Its pages are read from disk if need be, without the
        interpreter's lock.
        """
        value: memoryview | None = self._inner.get(key, db=self._tables[table])
        return value

    def views(self, table: str, keys: Sequence[bytes]) -> list[memoryview]:
        """The values of those keys that there are, in their order: `view` for many, in less time
        for each.
        """
        with self._inner.cursor(db=self._tables[table]) as cursor:
            return [value for _, value in cursor.getmulti(keys)]

    def places_of(self, table: str, keys: Sequence[bytes]) -> list[Place | None]:
        """Where values lie in the data file, told without reading them; None where that cannot be
        told.

        That is: where there is none, where it is so small that it lies among the keys, and in a
        writing transaction, whose pages are not in the file yet. Raises OSError.
        """
        description = None if self.writable else self._inner.get(table.encode())
        return (
            [None] * len(keys)
            if description is None
            else places_of(self.file, self._page_size, description, keys)
        )

    def places(
        self, table: str, start: bytes, end: bytes | None
    ) -> Iterator[tuple[bytes, Place | None]]:
        """Keys and places of values from key `start` to before `end`, in order, told without
        reading the values.
        """
        with self._inner.cursor(db=self._tables[table]) as cursor:
            there = cursor.set_range(start) if start else cursor.first()
            while there and (end is None or bytes(cursor.key()) < end):
                yield (
                    bytes(cursor.key()),
                    None if self.writable else place_of(cursor.key(), self._page_size),
                )
                there = cursor.next()

    def ahead(self, table: str, start: bytes, end: bytes | None) -> Iterator[None]:
        """For a walk over values: asks the disk for the megabytes that follow, first and at every
        step one value on.

        A walk that touches page after page of a cold file waits for each of them.
        """
        sizes: deque[int] = deque()
        total = 0
        for _, place in self.places(table, start, end):
            if place is not None:
                ask(self.file, [place])
            sizes.append(0 if place is None else place.size)
            total += sizes[-1]
            while total >= _AHEAD_BYTES:
                yield
                total -= sizes.popleft()

    def get(self, table: str, key: bytes) -> bytes | None:
        """A copy of a value, or None."""
        value = self.view(table, key)
        return None if value is None else bytes(value)

    def put(self, table: str, key: bytes, value: bytes | memoryview) -> None:
        """Write a value, new or in place of another."""
        database = self._tables[table]
        if table not in self._last:
            cursor = self._inner.cursor(db=database)
            self._last[table] = bytes(cursor.key()) if cursor.last() else b""
            cursor.close()
        append = key > self._last[table]  # fills pages whole instead of splitting them in half
        self._inner.put(key, value, db=database, append=append)
        if append:
            self._last[table] = key
        self.bytes_put += len(key) + len(value)

    def delete(self, table: str, key: bytes) -> int:
        """Delete a value; return its bytes, 0 where there was none."""
        value = self.view(table, key)
        if value is None:
            return 0
        size = len(value)
        self._inner.delete(key, db=self._tables[table])
        return size

    def delete_range(self, table: str, start: bytes, end: bytes | None) -> tuple[int, int]:
        """Delete the values from key `start` to before `end`; return how many, and their bytes."""
        count = size = 0
        with self._inner.cursor(db=self._tables[table]) as cursor:
            there = cursor.set_range(start) if start else cursor.first()
            while there and (end is None or bytes(cursor.key()) < end):
                size += len(cursor.value())
                count += 1
                cursor.delete()  # moves to the next
                there = bool(cursor.key())
        return count, size

    def scan(
        self, table: str, start: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Keys and views of values from key `start` to before `end`, in order. Change nothing while
        it runs.
        """
        with self._inner.cursor(db=self._tables[table]) as cursor:
            if not (cursor.set_range(start) if start else cursor.first()):
                return
            before = start
            for key, value in cursor.iternext():
                key = bytes(key)
                if key < before:  # a damaged tree may go round in circles
                    raise CorruptMemory(
                        f"{self._path}: the {table} keys are out of order; run verify"
                    )
                if end is not None and key >= end:
                    return
                yield key, value
                before = key + b"\0"

    def key_at_or_before(self, table: str, key: bytes) -> bytes | None:
        """The greatest key that is not after `key`, or None."""
        with self._inner.cursor(db=self._tables[table]) as cursor:
            if cursor.set_range(key):
                if bytes(cursor.key()) == key:
                    return key
                return bytes(cursor.key()) if cursor.prev() else None
            return bytes(cursor.key()) if cursor.last() else None

    # Checked values: a checksum over table, key and value stands before the value, so that neither
    # an altered value nor one that turns up under another key is ever used.

    def put_checked(self, table: str, key: bytes, value: bytes) -> None:
        """Write a value with a checksum before it."""
        self.put(table, key, _digest(table, key, value) + value)

    def get_checked(self, table: str, key: bytes) -> bytes | None:
        """A copy of a value that put_checked wrote, or None. Raises CorruptMemory."""
        view = self.view(table, key)
        return None if view is None else self._checked(table, key, view)

    def scan_checked(
        self, table: str, start: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and copies of values that put_checked wrote, as scan gives them. Raises
        CorruptMemory.
        """
        for key, view in self.scan(table, start, end):
            yield key, self._checked(table, key, view)

    def _checked(self, table: str, key: bytes, view: memoryview) -> bytes:
        value = bytes(view[8:])
        if _digest(table, key, value) != view[:8]:
            raise CorruptMemory(
                f"{self._path}: the {table} entry {key.hex()} is damaged; run verify"
            )
        return value


class Database:
    """The tables of one memory directory. Usable from several threads; a context manager."""

    def __init__(self, environment: "_Environment", *, read_only: bool) -> None:
        """Use Database.create or Database.open."""
        self._environment = environment
        self._asked_read_only = read_only
        self._closed = False
        # run at the beginning of every write transaction of this object
        self.before_write: Callable[[Transaction], None] = lambda transaction: None

    @classmethod
    def create(
        cls,
        path: Path | str,
        first: Callable[[Transaction], None],
        *,
        map_size: int = INITIAL_MAP,
        limit: int | None = None,
    ) -> Self:
        """Make the tables and what `first` writes, in one transaction, in a directory that is
        absent or empty.

        map_size: bytes of address space to begin with, grown as needed; limit: bytes the data file
        may reach.

        Raises MemoryExists, InvalidInput (other files there; a network file system),
        ReadOnlyMemory, StorageFull, MemoryLocked.
        """
        path = Path(path)
        with _named_os_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            others = sorted({entry.name for entry in path.iterdir()} - _OWN_NAMES)
        if others:
            raise InvalidInput(
                f"{path} is not empty ({others[0]}); name a new directory for the memory"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise ReadOnlyMemory(
                f"{path} cannot be written; choose another directory or change its permissions"
            )
        map_size = map_size if limit is None else min(map_size, whole_pages(limit))
        return cls(
            _acquire(path, lambda environment: environment.create(first, map_size, limit)),
            read_only=False,
        )

    @classmethod
    def open(cls, path: Path | str, *, read_only: bool = False) -> Self:
        """Open the memory in `path`, for reading; write takes the writer lock when it is called.

        The file's length is checked before anything of it is used. A memory in a directory or on a
        file system that cannot be written opens as if read_only were asked for.

        Raises MemoryNotFound, CorruptMemory (truncated or unreadable), InvalidInput (a network file
        system), ReadOnlyMemory (no permission to read), MemoryLocked (being compacted).
        """
        path = Path(path)
        if not (path / _DATA).is_file():
            raise MemoryNotFound(f"{path} holds no memory; `memstore ingest` makes one")
        return cls(_acquire(path, _Environment.open), read_only=read_only)

    @property
    def path(self) -> Path:
        """The memory's directory."""
        return self._environment.path

    @property
    def read_only(self) -> bool:
        """Whether writing is refused: asked for at opening, or the directory cannot be written."""
        return self._asked_read_only or not self._environment.writable

    @property
    def limit(self) -> int | None:
        """Bytes that the data file may reach; None for no bound. Set once for every Database of
        this directory.
        """
        return self._environment.limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._check()
        self._environment.set_limit(limit)

    @property
    def file_bytes(self) -> int:
        """Bytes of the data file; it never shrinks but by compact."""
        return os.stat(self.path / _DATA).st_size

    @property
    def last_transaction(self) -> int:
        """Number of the last commit, whichever process made it; cheap enough to be asked at every
        step.
        """
        self._check()
        return self._environment.last_transaction()

    def last_commit(self) -> Commit | None:
        """What the last commit said of itself; None where all were made in format 1. Raises
        CorruptMemory.
        """
        with self.read() as transaction:
            value = transaction.get_checked("meta", b"commit")
        return None if value is None else Commit(*_COMMIT.unpack(value))

    @property
    def in_transaction(self) -> bool:
        """Whether the calling thread is inside a transaction of this directory."""
        return self._environment.in_transaction()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A read transaction: a snapshot. Keep it for one batch: while it is open, the file's pages
        are not reused.

        Inside another transaction of the same thread it is that transaction. Never waits for a
        writer. Raises MemoryClosed, CorruptMemory, MemoryLocked (too many readers).
        """
        self._check()
        with self._environment.read() as transaction:
            yield transaction

    def write(
        self, work: Callable[[Transaction], T], *, wait: bool = False, beyond_limit: bool = False
    ) -> T:
        """Run `work` in a write transaction, commit, and return what it returned: all of it is
        stored, or nothing.

        `work` is run again from the start when the map had to grow, so it must not change anything
        but the transaction (compute its counts inside, and return them). An exception from it
        undoes the batch and passes on.

        The writer lock is taken for the call if `writer` does not hold it; wait: for another
        process, instead of raising MemoryLocked. beyond_limit: allow a little more than `limit`,
        for deletions, which need room too. Raises MemoryClosed, ReadOnlyMemory, MemoryLocked,
        StorageFull (the memory is as it was), CorruptMemory.
        """

        def all_of_it(transaction: Transaction) -> T:
            self.before_write(transaction)
            return work(transaction)

        with self.writer(wait=wait):
            return self._environment.write(all_of_it, beyond_limit=beyond_limit)

    @contextmanager
    def writer(self, *, wait: bool = False) -> Iterator[None]:
        """Hold the writer lock: no other process writes meanwhile. May be nested, and shared by
        threads.

        Raises MemoryLocked with the holder's process id, or waits for it; ReadOnlyMemory;
        MemoryClosed.
        """
        self._check()
        if self.read_only:
            raise ReadOnlyMemory(
                f"{self.path} is open for reading only, or cannot be written; nothing was changed"
            )
        self._environment.acquire_writer(wait=wait)
        try:
            yield
        finally:
            if self._environment.pid == os.getpid():
                self._environment.lock.release()

    def compact(self) -> tuple[int, int]:
        """Rewrite the data file without its free pages; return its bytes before and after.

        Needs the memory to itself and room for the copy; killed at any point, the old file or the
        new one is there. Raises MemoryLocked (another process has it open), StorageFull,
        ReadOnlyMemory, MemoryClosed.
        """
        with self.writer():
            before = self.file_bytes
            self._environment.compact()
            return before, self.file_bytes

    def close(self) -> None:
        """Close; the last Database of a directory closes the environment. More than once is the
        same as once.
        """
        if not self._closed:
            self._closed = True
            if self._environment.pid == os.getpid():
                _release(self._environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self) -> None:
        if self._environment.pid != os.getpid():
            raise MemoryClosed(
                f"{self.path} was opened by process {self._environment.pid}, not by this fork of it"
            )
        if self._closed:
            raise MemoryClosed(f"{self.path} is closed; open it again")


# One environment a directory and process


class _Gate:
    """Transactions pass together; a change of the map passes alone."""

    def __init__(self) -> None:
        # of C: an interrupt between taking it and what it guards cannot keep it
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._lock:
            self._changed.wait_for(lambda: not self._shut)
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._lock:
            self._changed.wait_for(lambda: not self._shut)
            self._shut = True
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._shut = False
                self._changed.notify_all()


class _WriterLock:
    """The lock that one process at a time holds to write; counted, so that it nests."""

    def __init__(self, path: Path) -> None:
        self._path = path / _WRITER
        self._mutex = threading.Lock()
        self._count = 0
        self.file: int | None = None
        self.on_release: Callable[[], None] = lambda: None

    def acquire(self, *, wait: bool) -> None:
        with self._mutex:
            if not self._count:
                with _named_os_errors(self._path.parent):
                    file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                    # For the message that others get; the lock itself ends with its holder,
                    # whatever stands here.
                    os.ftruncate(file, 0)
                    with suppress(OSError):
                        os.pwrite(file, b"%d\n" % os.getpid(), 0)
                except BlockingIOError:
                    holder = os.pread(file, 32, 0).decode("ascii", "replace").strip() or "unknown"
                    os.close(file)
                    raise MemoryLocked(
                        f"{self._path.parent} is being written by process {holder}; try again when "
                        "it is done, or wait"
                    ) from None
                except BaseException:
                    os.close(file)
                    raise
                self.file = file
            self._count += 1

    def release(self) -> None:
        with self._mutex:
            self._count -= 1
            if not self._count and self.file is not None:
                try:
                    self.on_release()
                finally:
                    os.ftruncate(self.file, 0)
                    # Unlock before closing: a forked child may still share the file.
                    fcntl.flock(self.file, fcntl.LOCK_UN)
                    os.close(self.file)
                    self.file = None


class _Environment:
    """The LMDB environment of one directory in one process, with the tables' handles.

    LMDB's environment is opened for reading only until this process first writes: asking then
    cannot wait for, or hinder, a process that writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid = os.getpid()
        self.users = 0
        self.limit: int | None = None
        self.lock = _WriterLock(path)
        self.lock.on_release = self._sync
        self._gate = _Gate()
        self._write_mutex = threading.Lock()
        self._thread = threading.local()
        self.data_file: int | None = None
        self.page_size = mmap.PAGESIZE
        self._inner: Any = None
        self.tables: dict[str, Any] = {}
        self.writable = False  # whether the directory allows it
        self._read_write = False  # whether LMDB's environment is open for it
        kind = file_system_of(path)
        if kind in NETWORK:
            raise InvalidInput(
                f"{path} is on a network file system ({kind}); keep the memory on a local disk"
            )

    # Opening and closing

    def open(self) -> None:
        """Open for reading. Raises what Database.open raises."""
        try:
            self._open(read_write=False)
            if not self.tables:
                raise MemoryNotFound(
                    f"{self.path} holds no whole memory (making it was interrupted); create it "
                    "again"
                )
        except BaseException:
            self.close()
            raise

    def create(
        self, first: Callable[[Transaction], None], map_size: int, limit: int | None
    ) -> None:
        """Make the tables with their first content. Raises what Database.create raises."""
        self.lock.acquire(wait=False)
        try:
            self._open(read_write=True, new_map_size=map_size)
            if self.tables:
                raise MemoryExists(
                    f"{self.path} already holds a memory; open it, or name another directory"
                )
            if self._inner.stat()["entries"]:
                raise InvalidInput(
                    f"{self.path} holds another program's database; name another directory"
                )
            self.limit = limit

            def work(transaction: Transaction) -> dict[str, Any]:
                transaction._tables = {
                    name: self._inner.open_db(name.encode(), txn=transaction._inner, create=True)
                    for name in TABLES
                }
                first(transaction)
                return transaction._tables

            self.tables = self.write(work, beyond_limit=False)
        except BaseException:
            self.close()
            raise
        finally:
            self.lock.release()

    def _open(self, *, read_write: bool, new_map_size: int | None = None) -> None:
        data, lock = self.path / _DATA, self.path / _LOCK
        new = new_map_size is not None and (not data.exists() or not data.stat().st_size)
        self.writable = all(
            os.access(name, os.W_OK) for name in (self.path, data, lock) if name.exists()
        )
        with _named_os_errors(self.path):
            self.data_file = share(data, create=new)
            map_size = (
                new_map_size
                if new_map_size is not None and new
                else check_length(data, self.data_file)
            )
        with self._named_errors():
            self._inner = lmdb.open(
                str(self.path),
                map_size=map_size,
                max_dbs=len(TABLES),
                max_readers=_MAX_READERS,
                create=new,
                readonly=not read_write,
                # Without permission to write the lock file (LMDB's readers register in it) a reader
                # goes without: the pages it reads may be reused under it by a writer, which the
                # checksums then refuse.
                lock=self.writable or os.access(lock, os.W_OK),
                readahead=False,
                sync=True,
                metasync=False,
                meminit=False,
            )
            self._read_write = read_write
            self.page_size = self._inner.stat()["psize"]
            self._inner.reader_check()
            try:
                # In an environment open for writing this begins a writing transaction, so the
                # writer lock is held by then, and nobody waits.
                self.tables = {
                    name: self._inner.open_db(name.encode(), create=False) for name in TABLES
                }
            except lmdb.NotFoundError:
                self.tables = {}

    def in_transaction(self) -> bool:
        return getattr(self._thread, "transaction", None) is not None

    def acquire_writer(self, *, wait: bool) -> None:
        """Take the writer lock and be open for writing."""
        if self.in_transaction():
            raise RuntimeError(
                "writing inside a transaction of the same thread: end that one first"
            )
        self.lock.acquire(wait=wait)
        try:
            if not self._read_write:
                with self._gate.alone():
                    if not self._read_write:
                        self.close()
                        self._open(read_write=True)
                self.set_limit(self.limit)
        except BaseException:
            self.lock.release()
            raise

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None
            self._read_write = False
        if self.data_file is not None:
            os.close(self.data_file)
            self.data_file = None

    def _reopen(self) -> None:
        """After a failure that leaves LMDB's environment unusable, though not the file. Called
        alone.
        """
        self.close()
        self._open(read_write=self.lock.file is not None)

    def _sync(self) -> None:
        # Commits leave the last meta page to the next one's sync; the last writer of all does not.
        if self._inner is not None and self._read_write:
            with self._named_errors():
                self._inner.sync(True)

    # Transactions

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        current: Transaction | None = getattr(self._thread, "transaction", None)
        if current is not None:
            yield current
            return
        with self._named_errors():
            inner = self._begin(write=False)
            try:
                self._thread.transaction = Transaction(inner, self, writable=False)
                yield self._thread.transaction
            finally:
                self._thread.transaction = None
                self._end(inner)

    def write(self, work: Callable[[Transaction], T], *, beyond_limit: bool) -> T:
        with self._write_mutex, self._named_errors():
            result = self._write(work, beyond_limit=beyond_limit)
            if beyond_limit:
                # What a batch frees can be used from the second batch after it on: make this one
                # the first.
                self._write(lambda transaction: None, beyond_limit=True)
        if beyond_limit:
            self.set_limit(self.limit)
        return result

    def _write(self, work: Callable[[Transaction], T], *, beyond_limit: bool) -> T:
        while True:
            transaction = Transaction(self._begin(write=True), self, writable=True)
            self._thread.transaction = transaction
            try:
                result = work(transaction)
                commit = _COMMIT.pack(transaction._inner.id(), time.time())
                transaction.put_checked("meta", b"commit", commit)
                transaction._inner.commit()
                return result
            except lmdb.MapFullError:
                pass  # grown below: that has to wait until this thread has passed the gate
            finally:
                self._thread.transaction = None
                self._end(transaction._inner)
            self._grow(transaction.bytes_put, beyond_limit=beyond_limit)

    def last_transaction(self) -> int:
        """Number of the last commit by any process."""
        self._gate.enter()
        try:
            number: int = self._inner.info()["last_txnid"]
            return number
        finally:
            self._gate.leave()

    def _end(self, inner: Any) -> None:
        # a forked child that leaves the block would end its parent's transaction
        if self.pid == os.getpid():
            inner.abort()  # of a committed one: nothing
            self._gate.leave()

    def _begin(self, *, write: bool) -> Any:
        """Pass the gate and begin; on any error the gate is left."""
        reopened = False
        while True:
            self._gate.enter()
            try:
                return self._inner.begin(write=write, buffers=True)
            except lmdb.MapResizedError:
                self._gate.leave()
                with self._gate.alone():
                    self._inner.set_mapsize(0)  # another process grew the map: take its size
            # unusable after a failed write, or reopening it had failed
            except (lmdb.PanicError, AttributeError):
                self._gate.leave()
                if reopened:
                    raise
                reopened = True
                with self._gate.alone():
                    self._reopen()
            except lmdb.ReadersFullError:
                self._gate.leave()
                if not self._inner.reader_check():  # none of them was dead
                    raise
            except BaseException:
                self._gate.leave()
                raise

    # The map

    def _grow(self, needed: int, *, beyond_limit: bool) -> None:
        with self._gate.alone():
            size = self._inner.info()["map_size"]
            wanted = max(2 * size, size + 2 * needed)
            if self.limit is not None:
                if beyond_limit:
                    wanted = size + max(1 << 20, size // 8)
                else:
                    wanted = min(wanted, whole_pages(self.limit))
                if wanted <= size:
                    raise StorageFull(
                        f"{self.path} has used up its quota of {self.limit / 1e6:,.1f} MB; "
                        "raise the quota, or forget documents"
                    )
            self._set_map(whole_pages(wanted))

    def _set_map(self, size: int) -> None:
        try:
            self._inner.set_mapsize(size)
        except (lmdb.Error, OverflowError) as error:
            self._reopen()
            raise StorageFull(
                f"{self.path} could not be mapped to {size / 1e6:,.1f} MB ({error}); raise the "
                "limit (ulimit -v)"
            ) from error

    def set_limit(self, limit: int | None) -> None:
        self.limit = limit
        if limit is not None and self._read_write:
            with self._gate.alone():
                info = self._inner.info()
                used = (info["last_pgno"] + 1) * self._inner.stat()["psize"]
                allowed = max(whole_pages(limit), used)
                if info["map_size"] > allowed:
                    self._set_map(allowed)

    def compact(self) -> None:
        copy = self.path / _COMPACTED
        assert self.data_file is not None
        with (
            self._write_mutex,
            self._gate.alone(),
            self._named_errors(),
            _named_os_errors(self.path),
        ):
            try:
                fcntl.flock(self.data_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(self.data_file, fcntl.LOCK_SH)
                raise MemoryLocked(
                    f"{self.path} is open in another process; compacting needs it alone"
                ) from None
            try:
                file = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
                try:
                    self._inner.copyfd(file, compact=True)
                    os.fsync(file)
                finally:
                    os.close(file)
                self._inner.close()
                self._inner = None
                os.replace(copy, self.path / _DATA)
                directory = os.open(self.path, os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
            finally:
                with suppress(FileNotFoundError):
                    copy.unlink()
                self._reopen()

    # Errors

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise self._named(error) from error

    def _named(self, error: lmdb.Error) -> MemstoreError:
        text = str(error)
        if isinstance(error, lmdb.DiskError) or any(
            os.strerror(code) in text
            for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        ):
            # LMDB reports a short write, which is how a disk fills up, as an input/output error.
            return StorageFull(
                f"{self.path} could not be written ({text}): the disk is full, or a size limit is "
                "reached; "
                "make room and try again, what was committed is intact"
            )
        if isinstance(error, lmdb.ReadonlyError) or any(
            os.strerror(code) in text for code in (errno.EACCES, errno.EPERM, errno.EROFS)
        ):
            return ReadOnlyMemory(f"{self.path} cannot be used ({text}); check its permissions")
        if isinstance(error, lmdb.ReadersFullError):
            return MemoryLocked(
                f"{self.path} has {_MAX_READERS} readers already; try again when some are done"
            )
        return CorruptMemory(
            f"{self.path} cannot be read ({text}); run verify, or restore it from a copy"
        )


_registry_lock = threading.Lock()
_registry: dict[tuple[int, int], _Environment] = {}  # by device and inode of the directory
# A forked child's: kept, and not to be opened anew, for closing them would end the parent's
# reading.
_inherited: dict[tuple[int, int], _Environment] = {}


def _acquire(path: Path, begin: Callable[[_Environment], None]) -> _Environment:
    """The process's environment for a directory; `begin` opens or creates it where there is none
    yet.
    """
    with _registry_lock:
        with _named_os_errors(path):
            status = os.stat(path)
        key = (status.st_dev, status.st_ino)
        environment = _registry.get(key)
        if key in _inherited:
            raise MemoryClosed(
                f"{path} was open when this process was forked; open it in one that is spawned "
                "instead"
            )
        if environment is None:
            environment = _Environment(path)
            begin(environment)
            _registry[key] = environment
        elif begin is not _Environment.open:
            raise MemoryExists(f"{path} already holds a memory; open it, or name another directory")
        environment.users += 1
        return environment


def _release(environment: _Environment) -> None:
    with _registry_lock:
        environment.users -= 1
        if not environment.users:
            for key in [key for key, other in _registry.items() if other is environment]:
                del _registry[key]
            environment.close()


def _forget_parent() -> None:
    """In a forked child: let go of the parent's locks, which the child would otherwise keep alive
    after it.
    """
    global _registry_lock
    _registry_lock = threading.Lock()
    _inherited.update(_registry)
    for environment in _registry.values():
        for file in (environment.data_file, environment.lock.file):
            if file is not None:
                os.close(file)
        environment.data_file = environment.lock.file = None
    _registry.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _digest(table: str, key: bytes, value: bytes) -> bytes:
    return xxh3_64_intdigest(value, xxh3_64_intdigest(key, len(table))).to_bytes(8, "little")


@contextmanager
def _named_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidInput(f"{path} is not a directory; name a directory for the memory") from error
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ReadOnlyMemory(
                f"{path} cannot be used ({error.strerror}); check its permissions"
            ) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFull(
                f"{path} could not be written ({error.strerror}); make room and try again"
            ) from error
        raise
