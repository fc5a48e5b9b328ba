"""The first stage of a search over very many token landmarks: inverted lists, stored with the
memory, propose passages for exact scoring (memstore.index.token_lists).

All passages of documents that were added or changed since the lists were built are scored exactly.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import RUN_BLOCKS, BlockWords, IndexSpec, Run
from memstore.errors import CorruptMemory, InvalidInput, ObjectNotFound
from memstore.index import token_lists
from memstore.index.block_rows import Remembered, Scope
from memstore.index.index_file import Unusable, content_of, has_faiss, write_file
from memstore.index.late_interaction import TokenIndex
from memstore.index.token_lists import CODE, FILE, Covered, PassageLists, covered_by
from memstore.index.word_index import RareBlocks, WordIndex, WordsBeside

PAYING = 1 << 21  # tokens of a scope above which two stages are faster than one
PROPOSED = 600, 5000  # passages of the lists that are scored exactly: least, most
_AROUND = 256  # of the document of the question before: passages scored on either side of its best

_NEW = 1 / 4  # lists are rebuilt when new tokens exceed this fraction of the tokens in lists
_AT_ONCE = 1 << 18  # tokens of documents that are read in one transaction

# Errors that are handled as missing lists; an unavailable store is not among them.
_UNUSABLE = Unusable, InvalidInput, OSError, CorruptMemory, ObjectNotFound

_log = logging.getLogger("memstore")


class Selected(Protocol):
    """What a first stage needs of retrieval.SelectorIndex: its tables, rows and exact scores."""

    spec: IndexSpec
    catalog: Catalog
    rows: Mapping[int, Document]

    def token_maxima(self, q: Tensor, scope: Scope) -> Tensor: ...
    def word_scores(
        self, words: Mapping[int, float], scope: Scope, whole: Scope | None = None
    ) -> Tensor: ...
    def rare(self, words: Mapping[int, float], scope: Scope) -> RareBlocks: ...
    def take_words(self, words: WordIndex, documents: set[int]) -> None: ...


class ListsDirectory:
    """Lists in the directory `index` of a memory. Methods raise FileNotFoundError (no lists),
    Unusable, OSError.
    """

    def __init__(self, path: Path) -> None:
        self.name, self._file = str(path), path / FILE

    @property
    def stamp(self) -> Hashable:
        """A value that changes with the lists; None without lists."""
        with suppress(OSError):
            status = os.stat(self._file)
            return status.st_ino, status.st_mtime_ns
        return None

    def content(self, *, header: bool = False) -> np.ndarray:
        """The stored file, uint8; header: at least its header."""
        return content_of(self._file)

    def covered(self, digest: str) -> set[Covered]:
        """The documents that the lists cover; none where the lists are unusable or of another
        selector.
        """
        try:
            return {*covered_by(self.content(header=True), digest)}
        except _UNUSABLE:
            return set()

    def write(self, lists: PassageLists) -> int:
        """Replace the lists; return their bytes. Raises StorageFull, ReadOnlyMemory."""
        return write_file(self._file, lists.encode())


class FirstStage:
    """The lists of one memory's selector. Safe for several threads."""

    def __init__(self, selected: Selected, place: ListsDirectory) -> None:
        """place: where the lists are stored."""
        self._spec, self._selected, self._place = selected.spec, selected, place
        self._possible = self._spec.width > 0 and self._spec.width % (2 * CODE) == 0
        self._opening = threading.Lock()
        self._listed: ListedPassages | None = None
        self._stamp: Hashable = None  # of the lists that were read

    def open(self) -> "ListedPassages | None":
        """The lists with their words, read again if the stored ones changed; None without lists.
        Raises StoreUnavailable.
        """
        with self._opening:
            stamp = self._place.stamp
            if stamp == self._stamp or not has_faiss():
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

    def due(self) -> bool:
        """Should lists be built or rebuilt?"""
        rows = [*self._selected.rows.values()]
        held = tokens_of(self._place.covered(self._spec.digest), rows)
        new = sum(row.tokens for row in rows) - held
        return self._possible and has_faiss() and new >= max(PAYING, _NEW * held)

    def tells_of_gone(self) -> bool:
        """Are there no usable lists, or lists that cover deleted or changed documents?"""
        there = {Covered.of(row) for row in [*self._selected.rows.values()]}
        covered = self._place.covered(self._spec.digest)
        return not covered or not covered <= there

    def build(self, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
        """Build and store lists over all documents but those that change concurrently; return a
        description, empty where lists are impossible or would not save time. progress: called
        with (tokens done, tokens).

        Raises CorruptMemory, InvalidInput (FAISS is missing), StorageFull, ReadOnlyMemory,
        StoreUnavailable.
        """
        rows = [row for _, row in sorted(self._selected.rows.items()) if row.blocks]
        tokens, blocks = sum(row.tokens for row in rows), sum(row.blocks for row in rows)
        if not self._possible or tokens < PAYING:
            return {}
        report = progress or (lambda done, tokens: None)
        made = token_lists.build(partial(self._read, rows), blocks, tokens, self._spec, report)
        if made is None:
            return {}
        return {
            "passages": len(made.lengths),
            "landmarks": int(made.lengths.sum()),
            "lists": made.index.nlist,
            "bytes": self._place.write(made),
        }

    def _read(
        self, documents: Sequence[Document], with_words: bool
    ) -> Iterator[tuple[Covered, Run, BlockWords | None]]:
        """Token landmarks and words of documents that have not changed concurrently."""
        catalog = self._selected.catalog
        whole, part = catalog.runs.whole, catalog.runs.part
        for rows in by_tokens(documents, _AT_ONCE):
            found: list[tuple[Covered, Run, BlockWords | None]] = []
            with catalog.database.read() as txn:
                catalog.bring(txn, [row.id for row in rows], "landmarks")
                for row in rows:
                    if catalog.row(txn, row.id) is None:
                        continue
                    run, words = whole(txn, row, part("token")), None
                    if with_words and self._spec.words:
                        words = whole(txn, row, part("words")).words
                    found.append((Covered.of(row), run, words))
            yield from found


Span = tuple[int, int, int]  # a run of a scope


class _Scope(NamedTuple):
    """How lists cover a scope."""

    inside: np.ndarray  # bool [passages of the lists]
    tokens: int  # tokens of the scope that lists cover
    at: dict[int, int]  # document number -> position in the lists
    order: np.ndarray  # int64 [documents of the lists]: position of each in the scope; -1: absent
    rest: list[tuple[int, Span, int]]  # position, run, -1 of runs that lists do not cover


class ListedPassages:
    """Lists, and which of their documents are unchanged. Safe for several threads."""

    def __init__(self, lists: PassageLists, selected: Selected) -> None:
        """selected: takes the words of unchanged documents from the lists."""
        self.lists, self.selected = lists, selected
        self._blocks = np.array([one.blocks for one in lists.covered], np.int64)
        self._starts = np.cumsum(self._blocks) - self._blocks
        self._before = np.cumsum(lists.lengths) - lists.lengths  # tokens before each passage
        self._places = {one: place for place, one in enumerate(lists.covered)}
        self._scopes, self._lock = Remembered(), threading.Lock()
        if lists.words is not None:
            numbers = {Covered.of(row): row.id for row in [*selected.rows.values()]}
            known = [(numbers.get(one), one.blocks) for one in lists.covered]
            words = WordIndex.of(known, *lists.words)
            selected.take_words(words, {n for n, _ in known if n is not None})

    def _look(self, scope: Scope) -> _Scope:
        at, rest = dict[int, int](), list[tuple[int, Span, int]]()
        order = np.full(len(self._blocks), -1)
        for number, run in enumerate(scope):
            row = self.selected.rows.get(run[0])
            place = None if row is None else self._places.get(Covered.of(row))
            if place is not None and run[1:] == (0, self._blocks[place]):
                order[place], at[run[0]] = number, place
            else:
                rest.append((number, run, -1))
        inside = np.repeat(order >= 0, self._blocks)
        tokens = int(self.lists.lengths[inside].sum())
        return _Scope(inside, tokens, at, order, rest)

    def shortlist(
        self,
        q: Tensor,
        weights: Tensor,
        scope: Scope,
        beside: WordsBeside | None,
        around: tuple[int, int] | None,
    ) -> "Shortlist | None":
        """See Retrieval.shortlist; None where the lists cover too few tokens to save time. Raises
        what a search of words raises.
        """
        with self._lock:
            within: _Scope = self._scopes.get(scope, lambda: self._look(scope))
        if within.tokens < PAYING:
            return None
        added = None
        if beside is not None:
            rare = self.selected.rare(beside.words, scope)
            documents, of = np.unique(rare.documents, return_inverse=True)
            at = np.array([within.at.get(n, -1) for n in documents.tolist()], np.int64)[of]
            adds = beside.weight * rare.scores**2
            added = (self._starts[at] + rare.blocks)[at >= 0], adds[at >= 0]
        best = self.lists.propose(q.numpy(), weights.numpy(), PROPOSED, within.inside, added)
        if best is None:
            return None
        rows, deviation = best
        place = None if around is None else within.at.get(around[0])
        if around is not None and place is not None:
            some = around[1] + np.arange(-_AROUND, _AROUND + 1)
            some = some[(some >= 0) & (some < self._blocks[place])]
            rows = np.union1d(rows, self._starts[place] + some)
        at = np.searchsorted(self._starts, rows, "right") - 1
        places = zip(within.order[at].tolist(), (rows - self._starts[at]).tolist(), rows.tolist())
        runs = [(place, (scope[place][0], block, block + 1), row) for place, block, row in places]
        found = {run: row for _, run, row in sorted(runs + within.rest)}
        blocks = sum(end - first for _, first, end in scope)
        return Shortlist([*found], blocks, deviation, self, found, scope)

    def maxima(
        self, q: Tensor, documents: np.ndarray, blocks: np.ndarray, rows: np.ndarray
    ) -> Tensor:
        """As SelectorIndex.token_maxima, of single blocks [n] of documents [n], which are rows [n]
        of the lists; reads the landmarks of these blocks only.
        """
        lists, first = self.lists, rows - blocks % RUN_BLOCKS["token"]
        at = np.searchsorted(self._starts, rows, "right") - 1
        of_run = np.minimum(RUN_BLOCKS["token"], self._starts[at] + self._blocks[at] - first)
        before = self._before[rows] - self._before[first]
        columns = documents, blocks, of_run, before, lists.lengths[rows], lists.digests[rows]
        catalog = self.selected.catalog
        with catalog.database.read() as txn:
            landmarks = catalog.runs.token_landmarks(txn, *columns)
            if landmarks is None:
                for number in {*documents.tolist()}:
                    catalog.document(txn, number)  # raises DocumentNotFound for one that is gone
                where = catalog.database.path
                raise CorruptMemory(f"{where}: token landmarks are missing or damaged; run verify")
        found = TokenIndex(landmarks.shape[1])
        found.add(1, torch.from_numpy(landmarks), lists.lengths[rows])
        return found.maxima(q, [(1, 0, len(rows))])


@dataclass(frozen=True)
class Shortlist:
    """Blocks of a scope that were proposed for exact scoring, and their scores' inputs."""

    scope: Scope  # runs of these blocks, in the order of the whole scope
    blocks: int  # of the whole scope
    deviation: float  # standard, of the scores of the whole scope, from a sample
    _listed: ListedPassages
    _rows: Mapping[Span, int]  # the row of each run in the lists; -1: not covered
    _whole: Scope

    def token_maxima(self, q: Tensor, scope: Scope) -> Tensor:
        """As SelectorIndex.token_maxima, for runs of the shortlist."""
        rows = np.array([self._rows.get(run, -1) for run in scope], np.int64)
        runs, listed = np.array(scope, np.int64).reshape(-1, 3), rows >= 0
        known = torch.from_numpy(np.repeat(listed, runs[:, 2] - runs[:, 1]))
        out = torch.empty(len(q), len(known))
        if listed.any():
            documents, blocks, _ = runs[listed].T
            out[:, known] = self._listed.maxima(q, documents, blocks, rows[listed])
        rest = [run for run, there in zip(scope, listed.tolist()) if not there]
        out[:, ~known] = self._listed.selected.token_maxima(q, rest)
        return out

    def word_scores(self, words: Mapping[int, float], scope: Scope) -> Tensor:
        """As SelectorIndex.word_scores, with rarity and lengths of the whole scope."""
        return self._listed.selected.word_scores(words, scope, self._whole)


def by_tokens(rows: Sequence[Document], least: int) -> Iterator[list[Document]]:
    """Split documents, in their order, into batches of `least` tokens or more, but the last."""
    some: list[Document] = []
    tokens = 0
    for row in rows:
        some.append(row)
        tokens += row.tokens
        if tokens >= least:
            yield some
            some, tokens = [], 0
    if some:
        yield some


def tokens_of(covered: Collection[Covered], rows: Iterable[Document]) -> int:
    """Tokens of the covered documents that are unchanged."""
    return sum(row.tokens for row in rows if Covered.of(row) in covered)
