"""The server's database: one SQLite file, written by one server at a time."""

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memstore.errors import CorruptMemory, InvalidInput, MemoryLocked, StorageFull

NAME = "serve.sqlite"
FORMAT = 1
"""Of the tables; a file of another one is refused."""


class Database:
    """A connection that every thread may use; rows are sqlite3.Row.

    A killed server leaves every transaction whole or not there (write-ahead log).
    """

    def __init__(self, directory: Path | None, *, of: str | None = None) -> None:
        """directory: where it lies; None for one that is gone with the process. of: the place of
        the memory, where it lies elsewhere. Raises MemoryLocked for a file that another server has,
        CorruptMemory for one that is none, InvalidInput for one that is another memory's or cannot
        be used.
        """
        self.path = None if directory is None else directory / NAME
        self._lock = threading.RLock()
        self._depth = 0
        if self.path is not None:  # its owner's alone, like the memory
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        self._connection = sqlite3.connect(
            self.path or ":memory:", check_same_thread=False, isolation_level=None, timeout=0.5
        )
        self._connection.row_factory = sqlite3.Row
        try:
            self._lock_file()
            self._check_format()
            if of is not None:
                self._check_memory(of)
        except BaseException:
            self._connection.close()
            raise

    def _lock_file(self) -> None:
        """Take the lock, for as long as it is open."""
        try:
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "foreign_keys=ON"):
                self._connection.execute(f"PRAGMA {pragma}")
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise MemoryLocked(
                    f"another server has {self.path}; stop it, or give another --state"
                ) from None
            raise InvalidInput(
                f"{self.path} cannot be used ({error}); give another --state"
            ) from None
        except sqlite3.DatabaseError:
            raise CorruptMemory(
                f"{self.path} is no database; move it away, and conversations begin anew"
            ) from None

    def _check_format(self) -> None:
        version: int = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and self.row("SELECT 1 FROM sqlite_master") is None:
            self._connection.execute(f"PRAGMA user_version = {FORMAT}")
        elif version != FORMAT:
            raise InvalidInput(
                f"{self.path} is of another version of memstore; move it away, and conversations "
                "begin anew"
            )

    def _check_memory(self, place: str) -> None:
        """Documents that are not in the memory it is opened with would count as forgotten."""
        self.create("CREATE TABLE IF NOT EXISTS memory (place TEXT NOT NULL)")
        row = self.row("SELECT place FROM memory")
        if row is None:
            self.execute("INSERT INTO memory VALUES (?)", (place,))
        elif row["place"] != place:
            raise InvalidInput(
                f"{self.path} belongs to the memory {row['place']}; give another --state"
            )

    def create(self, schema: str) -> None:
        """Make the tables of a schema (CREATE ... IF NOT EXISTS) that are not there yet."""
        with self._lock:
            self._connection.executescript(schema)

    @contextmanager
    def transaction(self) -> Iterator["Database"]:
        """What is executed within is committed together, or not at all. Raises StorageFull."""
        with self._lock:
            outermost = self._depth == 0
            if outermost:
                self._connection.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield self
            except BaseException:
                self._depth -= 1
                if outermost:
                    self._connection.execute("ROLLBACK")
                raise
            self._depth -= 1
            if outermost:
                self._committed()

    def _committed(self) -> None:
        try:
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._connection.execute("ROLLBACK")
            raise StorageFull(f"{self.path}: {error}; make room and try again") from None

    def execute(self, sql: str, values: Sequence[Any] | dict[str, Any] = ()) -> int:
        """Execute one statement; how many rows it changed. Raises StorageFull."""
        with self._lock:
            try:
                return self._connection.execute(sql, values).rowcount
            except sqlite3.OperationalError as error:
                if "full" not in str(error) and "disk" not in str(error):
                    raise
                raise StorageFull(f"{self.path}: {error}; make room and try again") from None

    def rows(self, sql: str, values: Sequence[Any] | dict[str, Any] = ()) -> list[sqlite3.Row]:
        """The rows of a query."""
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def row(self, sql: str, values: Sequence[Any] | dict[str, Any] = ()) -> sqlite3.Row | None:
        """The first row of a query."""
        with self._lock:
            row: sqlite3.Row | None = self._connection.execute(sql, values).fetchone()
            return row

    def close(self) -> None:
        """Close the file, with all of it in one place."""
        with self._lock:
            self._connection.close()
