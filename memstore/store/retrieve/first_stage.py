"""The first stage of a search over very many token landmarks: lists beside the memory say which
passages are worth an exact score (memstore.index.token_lists).

Documents that came, or changed, since the lists were made are scored exactly, all of them.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from memstore.disk.files import sweep
from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.run_table import RunTable
from memstore.errors import InvalidInput
from memstore.index import passage_files
from memstore.index.faiss_head import has_faiss
from memstore.index.index_file import Unusable, refusals
from memstore.index.passage_files import Covered
from memstore.index.scope import Scope
from memstore.index.token_lists import CODE
from memstore.store.retrieve.list_making import make_lists, sort_words
from memstore.store.retrieve.listed_passages import ListedPassages, state_of
from memstore.store.retrieve.selector_index import SelectorIndex
from memstore.store.retrieve.shortlist import Shortlist

PAYING = 1 << 21  # tokens of a scope from where on two stages take less than one
PROPOSED = 2000  # passages of the lists that are scored exactly
_NEW = 1 / 4  # of the tokens in lists: so many more are worth making them anew

_log = logging.getLogger("memstore")


class FirstStage:
    """The lists of one memory's selector, in the directory `index` beside it. Safe for several
    threads.
    """

    def __init__(self, table: RunTable, catalog: Catalog) -> None:
        assert table.spec is not None
        self._table, self._spec, self._catalog = table, table.spec, catalog
        self._directory: Path = catalog.database.path / "index"
        self._lock = threading.RLock()
        self._listed: ListedPassages | None = None
        self._stamp: tuple[int, int] | None = None  # of the files that it was read from

    @property
    def possible(self) -> bool:
        """Can lists be made of what the selector keeps?"""
        return (self._spec.heads, self._spec.dtype) == (1, "int8") and self._spec.width % (
            2 * CODE
        ) == 0

    def shortlist(
        self,
        q: np.ndarray,
        weights: np.ndarray,
        scope: Scope,
        selected: SelectorIndex,
        rows: Mapping[int, Document],
    ) -> Shortlist | None:
        """See MemoryStore.shortlist; rows: the memory's ready documents."""
        listed = self._open(rows, selected)
        if listed is None:
            return None
        proposed = listed.propose(q, weights, scope, PROPOSED, PAYING)
        return None if proposed is None else Shortlist(selected, listed, proposed, scope)

    def follow(self, document: int, row: Document | None) -> None:
        """A document has another row by now, or none."""
        with self._lock:
            if self._listed is not None:
                self._listed.follow(document, row)

    def close(self) -> None:
        """Hold nothing; the files are read again when they are asked for."""
        with self._lock:
            self._listed = self._stamp = None

    @property
    def bytes(self) -> int:
        """Main memory that the lists take."""
        with self._lock:
            return 0 if self._listed is None else self._listed.lists.bytes

    def _open(self, rows: Mapping[int, Document], selected: SelectorIndex) -> ListedPassages | None:
        """The lists, taken from their files when these are new here, and words with them."""
        with self._lock:
            stamp = _stamp(self._directory)
            if stamp == self._stamp or not self.possible or not has_faiss():
                return self._listed
            self._stamp, self._listed = stamp, None
            try:
                read = passage_files.read(self._directory, self._spec.digest)
                self._listed = ListedPassages(read, rows, self._table, self._catalog)
                self._listed.give_words(selected)
            except FileNotFoundError:
                pass
            except (Unusable, InvalidInput, OSError) as problem:
                _log.warning(
                    "%s: %s; searching exactly until `memstore index` is run",
                    self._directory,
                    problem,
                )
            return self._listed

    def due(self, rows: Mapping[int, Document]) -> bool:
        """Is it time to make the lists, or to make them anew?"""
        if self._catalog.database.read_only or not self.possible or not has_faiss():
            return False
        tokens = sum(row.tokens for row in [*rows.values()])
        if tokens < PAYING:
            return False
        try:
            covered = passage_files.covered(self._directory, self._spec.digest)
        except (Unusable, InvalidInput, OSError):
            covered = []
        held = sum(
            rows[one.document].tokens
            for one in covered
            if state_of(rows.get(one.document)) == one.state
        )
        return tokens - held >= max(PAYING, _NEW * held)

    def build(
        self, rows: Mapping[int, Document], progress: Callable[[int, int], None] | None
    ) -> dict[str, Any]:
        """Make lists of these documents, all that are ready, and write them; return what was made,
        nothing where that cannot be, or would not pay. rows: as they are at any time.

        Raises CorruptMemory, InvalidInput (FAISS is missing), StorageFull, ReadOnlyMemory.
        """
        documents = sorted((row for row in [*rows.values()] if row.blocks), key=lambda row: row.id)
        if not self.possible or sum(row.tokens for row in documents) < PAYING:
            return {}
        lists, documents = make_lists(self._catalog, self._table, documents, progress)
        words = sort_words(self._catalog, self._table, documents)
        covered = [Covered(row.id, row.blocks, state_of(row)) for row in documents]
        if not self._directory.is_symlink():
            sweep(self._directory)
        with refusals(self._directory):
            passage_files.write(self._directory, lists, words, covered, self._spec.digest)
        return {
            "passages": lists.passages,
            "landmarks": int(lists.ends[-1]),
            "lists": int(lists.index.nlist),
            "bytes": sum((self._directory / name).stat().st_size for name in passage_files.NAMES),
        }


def _stamp(directory: Path) -> tuple[int, int] | None:
    """Tells the files that are there from others; None for none."""
    try:
        status = os.stat(directory / passage_files.NAMES[0])
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
