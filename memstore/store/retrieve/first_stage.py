"""The first stage of a search over very many token landmarks: lists stored with the memory propose
the passages that are worth an exact score (memstore.index.token_lists).

All passages of documents that came, or changed, since the lists were made are scored exactly.
"""

import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from memstore.disk.format.document import Document
from memstore.disk.format.runs import RUN_BLOCKS, BlockWords, Run
from memstore.errors import CorruptMemory, DocumentNotFound, InvalidInput, ObjectNotFound
from memstore.index import token_lists
from memstore.index.block_rows import Remembered, Scope
from memstore.index.index_file import Unusable, content_of, has_faiss, write_file
from memstore.index.late_interaction import TokenIndex
from memstore.index.token_lists import CODE, FILE, Covered, PassageLists, covered_by
from memstore.index.word_index import WordIndex, WordsBeside
from memstore.store.retrieve.loading import by_tokens
from memstore.store.retrieve.selector_index import SelectorIndex

PAYING = 1 << 21  # tokens of a scope from where on two stages take less than one
PROPOSED = 1000, 5000  # passages of the lists that are scored exactly, at least and at most

_NEW = 1 / 4  # of the tokens in lists: lists are rebuilt when so many more have come
_AT_ONCE = 1 << 18  # tokens of documents that are read together

# Errors that mean no more than that there are no lists; not that a store is unavailable.
_UNUSABLE = Unusable, InvalidInput, OSError, CorruptMemory, ObjectNotFound

_log = logging.getLogger("memstore")


class ListsDirectory:
    """The directory `index` of a memory, which lists are stored in. Methods raise FileNotFoundError
    (there are none), Unusable, OSError.
    """

    def __init__(self, path: Path) -> None:
        self.name, self._file = str(path), path / FILE

    @property
    def stamp(self) -> Hashable:
        """Changes with the lists; None where there are none."""
        with suppress(OSError):
            status = os.stat(self._file)
            return status.st_ino, status.st_mtime_ns
        return None

    def content(self, *, header: bool = False) -> np.ndarray:
        """The stored file, uint8; header: its header is enough."""
        return content_of(self._file)

    def covered(self, digest: str) -> list[Covered]:
        """The documents of lists of this selector that can be read; else none."""
        try:
            return covered_by(self.content(header=True), digest)
        except _UNUSABLE:
            return []

    def write(self, lists: PassageLists) -> int:
        """Replace the lists; return their bytes. Raises StorageFull, ReadOnlyMemory."""
        return write_file(self._file, lists.encode())


class FirstStage:
    """The lists of one memory's selector. Safe for several threads."""

    def __init__(self, selected: SelectorIndex, place: ListsDirectory) -> None:
        """place: where they are stored."""
        self._spec, self._selected, self._place = selected.spec, selected, place
        self._possible = self._spec.width > 0 and self._spec.width % (2 * CODE) == 0
        self._opening = threading.Lock()
        self._listed: ListedPassages | None = None
        self._stamp: Hashable = None  # of what it was read from

    def open(self) -> "ListedPassages | None":
        """The lists, if any, read again where others are stored by now, with their words. Raises
        StoreUnavailable.
        """
        with self._opening:
            stamp = self._place.stamp
            if stamp == self._stamp or not self._possible or not has_faiss():
                return self._listed
            self._listed = None
            try:
                content, spec = self._place.content(), self._spec
                lists = token_lists.decode(content, spec.digest, spec.width)
                self._listed = ListedPassages(lists, self._selected)
            except FileNotFoundError:
                pass
            except _UNUSABLE as problem:
                _log.warning(
                    "%s: %s; every passage is scored until `memstore index` has run",
                    self._place.name,
                    problem,
                )
            self._stamp = stamp
            return self._listed

    def close(self) -> None:
        """Drop the lists; the next search reads the file again."""
        self._listed = self._stamp = None

    @property
    def bytes(self) -> int:
        """Main memory that the lists take."""
        listed = self._listed
        return 0 if listed is None else listed.lists.bytes

    def _there(self) -> dict[str, Document]:
        return {row.name: row for row in [*self._selected.rows.values()]}

    def due(self) -> bool:
        """Are lists to be made, or rebuilt?"""
        there = self._there()
        tokens = sum(row.tokens for row in there.values())
        if tokens < PAYING or not self._possible or not has_faiss():
            return False
        held = tokens_covered(self._place.covered(self._spec.digest), there)
        return tokens - held >= max(PAYING, _NEW * held)

    def tells_of_gone(self) -> bool:
        """Are there lists that cannot be read, or of documents that are gone or have changed?"""
        there, covered = self._there(), self._place.covered(self._spec.digest)
        gone = any(state_of(there.get(one.name)) != one.state for one in covered)
        return self._place.stamp is not None and (gone or not covered)

    # Building

    def build(self, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
        """Make lists of all documents but those that change concurrently, and store them; return
        what was made, nothing where that is impossible, or would not pay. progress: called with
        (tokens done, tokens).

        Raises CorruptMemory, InvalidInput (FAISS is missing), StorageFull, ReadOnlyMemory,
        StoreUnavailable.
        """
        documents = [row for _, row in sorted(self._selected.rows.items()) if row.blocks]
        tokens = sum(row.tokens for row in documents)
        if not self._possible or tokens < PAYING:
            return {}
        report = progress or (lambda done, tokens: None)
        count = token_lists.lists_of(tokens)
        step = max(1, tokens // (token_lists.TRAINED * count))
        some = [run.landmarks[::step].copy() for _, run, _ in self._read(documents, False)]
        if sum(map(len, some)) < count:
            return {}

        def read() -> Iterator[tuple[Covered, Run, BlockWords | None]]:
            done = 0
            report(done, tokens)
            for row, run, words in self._read(documents, self._spec.words):
                yield Covered(row.name, row.blocks, state_of(row)), run, words
                done += row.tokens
                report(done, tokens)

        blocks = sum(row.blocks for row in documents)
        made = token_lists.build(np.concatenate(some), tokens, blocks, read(), self._spec.digest)
        if not made.covered:
            return {}
        return {
            "passages": len(made.lengths),
            "landmarks": int(made.lengths.sum()),
            "lists": made.index.nlist,
            "bytes": self._place.write(made),
        }

    def _read(
        self, documents: list[Document], with_words: bool
    ) -> Iterator[tuple[Document, Run, BlockWords | None]]:
        """Token landmarks of unchanged documents, and their words."""
        catalog, table = self._selected.catalog, self._selected.table
        for rows in by_tokens(documents, _AT_ONCE):
            found: list[tuple[Document, Run, BlockWords | None]] = []
            with catalog.database.read() as txn:
                catalog.bring(txn, [row.id for row in rows], "landmarks")
                for row in rows:
                    if state_of(catalog.row(txn, row.id)) == state_of(row):
                        run = table.tokens(txn, row.id)
                        words = table.words(txn, row.id) if with_words else None
                        sizes = run.sizes if words is None else words.sizes
                        if not len(run.sizes) == len(sizes) == row.blocks:
                            raise CorruptMemory(
                                f"token landmarks or words of {row.name!r} are missing; run verify"
                            )
                        found.append((row, run, words))
            yield from found


class _Scope(NamedTuple):
    """A scope as lists cover it."""

    inside: np.ndarray | None  # bool [passages of the lists]; None: all
    order: np.ndarray  # int64 [documents of the lists]: where each is in the scope
    rest: list[tuple[int, tuple[int, int, int]]]  # runs that lists do not cover, and where
    tokens: int  # that lists cover


class ListedPassages:
    """Lists, and the documents of their passages that are unchanged. Safe for several threads."""

    def __init__(self, lists: PassageLists, selected: SelectorIndex) -> None:
        """selected: takes the words of unchanged documents from the lists."""
        self.lists, self.selected = lists, selected
        self._blocks = np.array([one.blocks for one in lists.covered], np.int64)
        self._starts = np.cumsum(self._blocks) - self._blocks
        self._before = np.cumsum(lists.lengths) - lists.lengths  # tokens before each passage
        self._places = {(one.name, one.state): at for at, one in enumerate(lists.covered)}
        self._at: dict[int, int] = {}  # the same by number, which no other document gets
        self._scopes, self._lock = Remembered(), threading.Lock()
        if lists.words is not None:
            numbers = {self._place(row): row.id for row in [*selected.rows.values()]}
            known = [(numbers.get(at), size) for at, size in enumerate(self._blocks.tolist())]
            words = WordIndex.of(known, *lists.words)
            selected.take_words(words, {n for n, _ in known if n is not None})

    def _place(self, row: Document | None) -> int | None:
        """Where a document is in the lists; None if it is not, or has changed."""
        return None if row is None else self._places.get((row.name, state_of(row)))

    def find(self, documents: np.ndarray) -> np.ndarray:
        """Where documents [n] of a scope are in the lists, int64 [n]; -1: nowhere."""
        return np.array([self._at.get(number, -1) for number in documents.tolist()], np.int64)

    def _look(self, scope: Scope) -> _Scope:
        order, rest = np.full(len(self._blocks), -1), []
        for number, run in enumerate(scope):
            place = self._place(self.selected.rows.get(run[0]))
            if place is not None and run[1:] == (0, self._blocks[place]):
                order[place], self._at[run[0]] = number, place
            else:
                rest.append((number, run))
        inside = np.repeat(order >= 0, self._blocks)
        tokens = int(self.lists.lengths[inside].sum())
        return _Scope(None if inside.all() else inside, order, rest, tokens)

    def shortlist(
        self, q: Tensor, weights: Tensor, scope: Scope, beside: WordsBeside | None
    ) -> "Shortlist | None":
        """See Retrieval.shortlist. None where the passages are too few, and all of them are worth
        an exact score. Raises what a search of words raises.
        """
        with self._lock:
            within: _Scope = self._scopes.get(scope, lambda: self._look(scope))
        if within.tokens < PAYING:
            return None
        added = of_words = None
        if beside is not None:
            rare = self.selected.rare(beside.words, scope)
            mean, deviation = of_words = rare.spread
            at = self.find(rare.documents)
            adds = beside.weight * (rare.scores - mean) / max(deviation, 1e-6)
            added = (self._starts[at] + rare.blocks)[at >= 0], adds[at >= 0]
        best = self.lists.propose(q.numpy(), weights.numpy(), PROPOSED, within.inside, added)
        if best is None:
            return None
        proposed, spread = best
        at = np.searchsorted(self._starts, proposed, "right") - 1
        places = zip(within.order[at].tolist(), (proposed - self._starts[at]).tolist())
        runs = [(place, (scope[place][0], block, block + 1)) for place, block in places]
        found = [run for _, run in sorted(runs + within.rest)]
        return Shortlist(found, spread, of_words, self, scope)

    def maxima(self, q: Tensor, documents: np.ndarray, blocks: np.ndarray) -> Tensor:
        """As SelectorIndex.token_maxima, of single blocks [n] of documents [n] in the lists, whose
        landmarks alone are read.
        """
        at, each, lists = self.find(documents), RUN_BLOCKS["token"], self.lists
        rows = self._starts[at] + blocks
        first = rows - blocks % each
        of_run = np.minimum(each, self._starts[at] + self._blocks[at] - first)
        before = self._before[rows] - self._before[first]
        columns = documents, blocks, of_run, before, lists.lengths[rows], lists.digests[rows]
        with self.selected.catalog.database.read() as txn:
            landmarks = self.selected.catalog.runs.token_landmarks(txn, *columns)
            if landmarks is None:
                for number in {*documents.tolist()}:
                    if self._place(self.selected.catalog.row(txn, number)) != self._at[number]:
                        raise DocumentNotFound(
                            f"document {number} was forgotten or changed; look at the memory's "
                            "documents again"
                        )
                where = self.selected.catalog.database.path
                raise CorruptMemory(f"{where}: token landmarks are missing or damaged; run verify")
        found = TokenIndex(landmarks.shape[1])
        found.add(1, torch.from_numpy(landmarks), lists.lengths[rows])
        return found.maxima(q, [(1, 0, len(rows))])


@dataclass(frozen=True)
class Shortlist:
    """Some blocks of a scope, and what a selector asks of a memory to score them."""

    scope: Scope  # runs of these blocks, in the order of the whole scope
    # mean and standard deviation of the scores of all blocks of the whole scope, by a sample, and
    # those of word_scores; None: of a question without words
    spread: tuple[float, float]
    word_spread: tuple[float, float] | None
    _listed: ListedPassages
    _whole: Scope

    @property
    def blocks(self) -> int:
        """How many the whole scope has."""
        return sum(end - first for _, first, end in self._whole)

    def token_maxima(self, q: Tensor, scope: Scope) -> Tensor:
        """As SelectorIndex.token_maxima, for blocks of the shortlist."""
        runs = np.array(scope, np.int64).reshape(-1, 3)
        sizes = runs[:, 2] - runs[:, 1]
        listed = self._listed.find(runs[:, 0]) >= 0
        known = np.repeat(listed, sizes)
        out = torch.empty(len(q), len(known))
        if known.any():
            block = np.arange(len(known)) + np.repeat(runs[:, 1] - np.cumsum(sizes) + sizes, sizes)
            of_lists = np.repeat(runs[:, 0], sizes)[known], block[known]
            out[:, torch.from_numpy(known)] = self._listed.maxima(q, *of_lists)
        if not known.all():
            rest = [scope[number] for number in np.flatnonzero(~listed).tolist()]
            out[:, torch.from_numpy(~known)] = self._listed.selected.token_maxima(q, rest)
        return out

    def word_scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        """As SelectorIndex.word_scores, with rarity and lengths counted in the whole scope."""
        return self._listed.selected.word_scores(words, scope, self._whole)


def state_of(row: Document | None) -> bytes:
    """Tells a document's text from any other's that it had or will have."""
    return b"" if row is None else xxhash.xxh3_64_digest(row.write)


def tokens_covered(covered: Iterable[Covered], rows: Mapping[str, Document]) -> int:
    """The tokens of those documents, by name, that are unchanged in lists."""
    return sum(
        rows[one.name].tokens for one in covered if state_of(rows.get(one.name)) == one.state
    )
