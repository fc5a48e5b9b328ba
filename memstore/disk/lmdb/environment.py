"""Transactions in the LMDB environment of a memory's directory in this process, and its file made
anew.

One environment is shared by all Database objects of a process that name
the same directory, and it is unusable in a forked child, which cannot open that directory either (a
spawned process can, and one forked before the directory was opened). Every commit reaches the disk
before it returns.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb

from memstore.disk.files import (
    DATA,
    named_os_errors,
    not_alone,
    replacement,
    sync_directory,
    try_alone,
)
from memstore.disk.lmdb import commit_record as commit
from memstore.disk.lmdb.commit_record import Commit
from memstore.disk.lmdb.lmdb_errors import named_lmdb_errors
from memstore.disk.lmdb.new_file import fill
from memstore.disk.lmdb.open_environment import OpenEnvironment
from memstore.disk.lmdb.transaction import TABLES, Transaction
from memstore.errors import InvalidInput, MemoryExists, MemoryLocked

T = TypeVar("T")


class Version(NamedTuple):
    """Which state of a memory is the last that was committed."""

    file: int  # how often this process has made the file anew
    transaction: int  # numbers count from 1 in each


class Environment(OpenEnvironment):
    """The LMDB environment of one directory in one process, with the tables' handles."""

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
                transaction.tables = {
                    name: self._inner.open_db(name.encode(), txn=transaction.inner, create=True)
                    for name in TABLES
                }
                first(transaction)
                return transaction.tables

            self.tables = self.write(work, beyond_limit=False)
        except BaseException:
            self.close()
            raise
        finally:
            self.lock.release()

    # Transactions

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        current: Transaction | None = getattr(self._thread, "transaction", None)
        if current is not None:
            yield current
            return
        with named_lmdb_errors(self.path):
            inner = self._begin(write=False)
            try:
                self._thread.transaction = self._transaction(inner, writable=False)
                yield self._thread.transaction
            finally:
                self._thread.transaction = None
                self._end(inner)

    def write(self, work: Callable[[Transaction], T], *, beyond_limit: bool) -> T:
        with self._write_mutex, named_lmdb_errors(self.path):
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
            transaction = self._transaction(self._begin(write=True), writable=True)
            self._thread.transaction = transaction
            try:
                result = work(transaction)
                self.record(transaction)
                transaction.inner.commit()
                return result
            except lmdb.MapFullError:
                pass  # grown below: that has to wait until this thread has passed the gate
            finally:
                self._thread.transaction = None
                self._end(transaction.inner)
            self._grow(transaction.bytes_put, beyond_limit=beyond_limit)

    def _transaction(self, inner: Any, *, writable: bool) -> Transaction:
        assert self.data_file is not None
        return Transaction(
            inner,
            self.tables,
            self.path,
            self.data_file,
            self.page_size,
            self.key_pages,
            writable=writable,
        )

    def record(self, transaction: Transaction) -> None:
        """Have a transaction record that it will be committed now."""
        made = Commit(transaction.inner.id(), time.time())
        transaction.put(commit.TABLE, commit.KEY, made.pack())

    def version(self) -> Version:
        self._gate.enter()
        try:
            return Version(self.rewritten, self._inner.info()["last_txnid"])
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

    # The file anew

    def rewrite(self, change: Callable[[Transaction], T], before_switch: Callable[[], None]) -> T:
        """Put a new file in the place of this one, that holds what `change` leaves and no other
        byte. Nothing is changed where that fails.
        """
        with self._write_mutex, named_lmdb_errors(self.path), named_os_errors(self.path):
            with self.read():
                pass  # reopened if need be
            while True:
                try:
                    with self._gate.alone():
                        result = self._rewrite(change, before_switch)
                    break
                except lmdb.MapFullError:  # of the old file: a change takes room there too
                    self._grow(0, beyond_limit=True)
        self.set_limit(self.limit)
        return result

    def _rewrite(self, change: Callable[[Transaction], T], before_switch: Callable[[], None]) -> T:
        assert self.data_file is not None
        if not try_alone(self.data_file):
            raise MemoryLocked(
                f"{self.path} is open in another process; rewriting its file needs it alone"
            )
        inner = self._inner.begin(write=True, buffers=True)
        switched = False
        try:
            transaction = self._transaction(inner, writable=True)
            result = change(transaction)
            entries = (
                (table, key, value)
                for table in TABLES
                for key, value in transaction.scan(table)
                if (table, key) != (commit.TABLE, commit.KEY)
            )
            record = transaction.view(commit.TABLE, commit.KEY)
            known = None if record is None else Commit.unpack(record)
            with replacement(self.path / DATA) as file:
                fill(Path(file.name), entries, time.time() if known is None else known.time)
                self._sweep()
                before_switch()
            switched = True
            self.rewritten += 1
            sync_directory(self.path)
            return result
        finally:
            inner.abort()
            if switched:
                self._reopen()
            else:
                not_alone(self.data_file)
