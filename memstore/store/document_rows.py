"""The rows of a memory's documents as they were last seen, by number and by name."""

import threading
from collections.abc import Mapping
from itertools import islice
from operator import attrgetter

from memstore.disk.format.document import Document

_BY_ID = attrgetter("id")


def is_listed(row: Document) -> bool:
    """Is this a document of its name, and not one that shall become it?"""
    return row.state in ("ready", "ingesting")


class Rows:
    """Rows of every state. Safe for several threads: each call is answered from one state of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[int, Document] = {}
        self._hidden: dict[int, Document] = {}  # those of them that are not listed
        self._listed: list[Document] | None = None  # until rows change
        self._named: dict[str, tuple[int, ...]] = {}  # of a name the numbers

    def listed(self) -> list[Document]:
        """Those that are ready or being read for the first time, oldest first."""
        with self._lock:
            if self._listed is None:
                rows = (row for number, row in self._all.items() if number not in self._hidden)
                self._listed = sorted(rows, key=_BY_ID)
            return list(self._listed)

    def hidden(self) -> list[Document]:
        """The others."""
        with self._lock:
            return list(self._hidden.values())

    def named(self, name: str) -> list[Document]:
        """All of a name, of whatever state, oldest first."""
        with self._lock:
            return [self._all[number] for number in sorted(self._named.get(name, ()))]

    def latest(self, most: int) -> list[Document]:
        """Those that changed last, at most so many, whatever their state."""
        with self._lock:
            return list(islice(reversed(self._all.values()), most))

    def by_number(self) -> dict[int, Document]:
        """All of them; a copy."""
        with self._lock:
            return dict(self._all)

    def change(self, changed: Mapping[int, Document | None]) -> None:
        """Take rows as they are now; None for one that is gone."""
        with self._lock:
            self._listed = None
            for number, row in changed.items():
                old = self._all.pop(number, None)
                self._hidden.pop(number, None)
                if old is not None:
                    of_name = tuple(n for n in self._named.pop(old.name) if n != number)
                    if of_name:
                        self._named[old.name] = of_name
                if row is not None:
                    self._all[number] = row
                    self._named[row.name] = (*self._named.get(row.name, ()), number)
                    if not is_listed(row):
                        self._hidden[number] = row
