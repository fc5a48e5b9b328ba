"""Is everything that a memory promises still there: a walk over all of it, and repair by dropping
what is damaged. A published memory is read whole where it is, and is not repaired.

A damaged tree page can end the process that reads it, so a child walks, document by document, and
its death is itself reported as damage of the document it was reading. The children of one
verification are forked from one server (memstore.store.verify.walk) that has opened nothing.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from memstore.child import python_command
from memstore.disk.files import DATA, occupy_standard_streams
from memstore.disk.format.index_spec import IndexSpec
from memstore.errors import (
    RESTORE,
    CorruptMemory,
    InvalidInput,
    MemoryNotFound,
    MemstoreError,
    ObjectNotFound,
    StoreUnavailable,
)
from memstore.paths import expanded
from memstore.share.manifest import LISTS, Entry, ListsRef
from memstore.share.object_store import without_credentials
from memstore.share.open_object_store import open_object_store
from memstore.share.publication_options import DEADLINE, is_url
from memstore.share.published import Published
from memstore.share.segments import FOLDER
from memstore.store.transfer.document_parts import Head, check_parts
from memstore.store.transfer.published_document import parts


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it was written."""

    document: int | None  # id; None = the memory itself
    name: str  # of the document, as far as it can be read
    what: str


@dataclass(frozen=True)
class Report:
    """What a verification found. `documents`, `records` and `bytes` count what was read and is
    whole.
    """

    documents: int = 0
    records: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # names of the documents that repair removed

    @property
    def clean(self) -> bool:
        """Is everything as it was written?"""
        return not self.problems


def verify_memory(path: Path | str, *, repair: bool = False) -> Report:
    """Check every byte of a memory that a reader could use; with `repair`, drop damaged documents
    whole, and keys and values of damaged passages (which are computed anew when they are needed),
    and check again.

    The report of a repair says what was wrong before and what was dropped. Documents are dropped
    where they lie, and other processes may read meanwhile. A memory of which pages of keys, the
    beginning of the file or its own rows are damaged is not repaired.

    path: its directory; or the URL of a published memory, which is read whole, and is not repaired.

    Raises MemoryNotFound, MemoryLocked, StorageFull; MemstoreError (no child can be started);
    CorruptMemory if a repair was asked for and there can be none; of a URL also StoreUnavailable,
    InvalidInput (repair).
    """
    if is_url(path):
        if repair:
            raise InvalidInput(
                f"{without_credentials(str(path))} is published and is not repaired: publish the "
                "damaged documents again with --check, from a memory that has them whole"
            )
        return verify_published(str(path))
    path = expanded(path)
    if not (path / DATA).is_file():
        raise MemoryNotFound.of(path)
    with _Children() as children:
        before = _walk_in_children(children, path)
        if before.clean or not repair:
            return before.report()
        if before.beyond_repair is not None:
            raise _not_repaired(path, before.beyond_repair)
        _drop(children, path, before.damaged_numbers)
        after = _walk_in_children(children, path)
    if not after.clean:
        raise _not_repaired(path, after.told[0].what)
    gone = [name for number, name in sorted(before.damaged().items()) if number not in after.whole]
    return replace(after.report(), problems=before.told, dropped=gone)


def _not_repaired(path: Path, what: str) -> CorruptMemory:
    return CorruptMemory(f"{path} cannot be repaired ({what.partition(';')[0]}): {RESTORE}")


@dataclass
class _Forward:
    """What a walk has met."""

    records: int = 0
    bytes: int = 0
    whole: set[int] = field(default_factory=set)  # documents
    problems: list[Problem] = field(default_factory=list)
    passages: dict[int, Problem] = field(default_factory=dict)  # whose records are damaged
    counts: list[Problem] = field(default_factory=list)  # of passages, that are not right

    @property
    def clean(self) -> bool:
        return not (self.problems or self.passages or self.counts)

    @property
    def told(self) -> list[Problem]:
        return [*self.problems, *self.passages.values(), *self.counts]

    @property
    def beyond_repair(self) -> str | None:
        """What is wrong with the memory itself, which dropping documents does not put right."""
        own = (problem.what for problem in self.problems if problem.document is None)
        return next(own, None)

    def damaged(self) -> dict[int, str]:
        """The damaged documents, and their names as far as they can be read."""
        return {
            problem.document: problem.name
            for problem in self.problems
            if problem.document is not None
        }

    @property
    def damaged_numbers(self) -> set[int]:
        """Of documents and passages."""
        return {*self.damaged(), *self.passages}

    def report(self) -> Report:
        return Report(len(self.whole), self.records, self.bytes, self.told)


def _drop(children: "_Children", path: Path, numbers: Iterable[int]) -> None:
    """Drop documents, and records of passages, where they lie. Raises CorruptMemory if damaged
    pages keep from that.
    """
    try:
        ended = [event["event"] for event in children.run("drop", path, sorted(numbers))]
    except CorruptMemory as error:
        raise _not_repaired(path, str(error)) from error
    if "end" not in ended:
        raise _not_repaired(path, "dropping what is damaged ended the process")


def _walk_in_children(children: "_Children", path: Path) -> _Forward:
    """Walk, again from the next document whenever a child dies."""
    walk = _Forward()
    skip: list[int] = []
    while True:
        reading: dict[str, Any] | None = None
        ended = False
        for event in children.run("walk", path, skip):
            if event["event"] == "reading":
                reading = event
            elif event["event"] == "problem":
                walk.problems.append(Problem(event["document"], event["name"], event["what"]))
            elif event["event"] == "passage":
                walk.passages[event["number"]] = Problem(None, event["name"], event["what"])
            elif event["event"] == "count":
                walk.counts.append(Problem(None, "", event["what"]))
            elif event["event"] == "whole":
                walk.whole.add(event["document"])
                walk.records += event["records"]
                walk.bytes += event["bytes"]
            elif event["event"] == "end":
                ended = True
            if event["event"] in ("whole", "done"):
                skip.append(event["document"])
                reading = None
        if ended:
            return walk
        if reading is None:
            walk.problems.append(Problem(None, "", "reading the memory's tables ended the process"))
            return walk
        number, name = reading["document"], reading["name"]
        walk.problems.append(Problem(number, name, "reading it ended the process"))
        skip.append(number)


class _Children:
    """Children that do one thing each and say what they do in events; a context manager."""

    def __enter__(self) -> Self:
        occupy_standard_streams()
        self._server = subprocess.Popen(
            python_command("memstore.store.verify.walk"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,  # with what it forks: what interrupts this process is not for them
        )
        assert self._server.stdout is not None
        if not self._server.stdout.readline():  # that is no damage of the memory
            self._server.communicate()
            raise MemstoreError(
                "the process that verifies did not start; see what `python -I -c 'import lmdb'` "
                "says, and install memstore with what it needs"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:  # nobody waits for what they do, and a repair may end anywhere
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()

    def run(self, what: str, path: Path, documents: list[int]) -> Iterator[dict[str, Any]]:
        """Walk or drop in a new child, and give its events until it ends in whatever way. Raises
        what the child met, but what is damaged where it walks.

        documents: those to pass over (walk) or to drop.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([what, str(path), documents]) + "\n")
        self._server.stdin.flush()
        for line in self._server.stdout:
            with suppress(ValueError):  # the last line of a child that was killed while writing it
                event = json.loads(line)
                if event["event"] == "gone":
                    break
                if event["event"] == "error":
                    kinds = {kind.__name__: kind for kind in MemstoreError.__subclasses__()}
                    raise kinds.get(event["kind"], CorruptMemory)(event["what"])
                yield event


def verify_published(url: str) -> Report:
    """Check every byte of a published memory that a reader could use.

    Raises MemoryNotFound, StoreUnavailable (where it is, nobody knows whether it is whole),
    CorruptMemory (its manifest).
    """
    published = Published.open(open_object_store(url))
    manifest = published.manifest
    documents = found = size = 0
    problems: list[Problem] = []
    sizes = {found.name: found.size for found in published.objects.names(FOLDER)}
    for page in manifest.pages:
        try:
            entries = published.read(page)
        except CorruptMemory as error:
            problems.append(Problem(None, "", str(error)))
            continue
        for entry in entries:
            try:
                _check_sizes(entry, sizes)
                head = Head(manifest.signature, entry.row, manifest.selector)
                counted = check_parts(head, parts(published, entry))
                documents, found, size = documents + 1, found + counted[0], size + counted[1]
            except MemstoreError as error:
                problems.append(_problem(entry, error))
    if manifest.selector is not None and manifest.lists is not None:
        problems += _check_lists(published, manifest.selector, manifest.lists)
    return Report(documents, found, size, problems)


def _check_sizes(entry: Entry, sizes: dict[str, int]) -> None:
    """Are its segments there, and long enough? Raises CorruptMemory."""
    for piece in entry.pieces:
        size = sizes.get(piece.segment)
        if size is None:
            raise CorruptMemory(
                f"{piece.segment} is missing; publish the document again with --check"
            )
        if size < piece.offset + piece.length:
            raise CorruptMemory(f"{piece.segment} is truncated to {size} bytes")


def _check_lists(published: Published, selector: IndexSpec, lists: ListsRef) -> Iterator[Problem]:
    """Are the lists of a selector as they were published? Raises StoreUnavailable."""
    from memstore.index.index_file import Unusable  # these import torch
    from memstore.index.passage_files import ListsHead
    from memstore.share.published_tables import PublishedDatabase
    from memstore.share.remote import Remote
    from memstore.store.retrieve.published_lists import PublishedLists

    url = published.objects.url
    again = f"run `memstore index --store {url}`"
    sizes = {found.name: found.size for found in published.objects.names(LISTS)}
    for name, size in [(lists.head, lists.size), *lists.parts]:
        if sizes.get(name, -1) != size:
            yield Problem(None, "", f"{url}: {name} is missing or truncated; {again}")
            return
    with closing(Remote(published.objects, deadline=DEADLINE)) as remote:
        try:
            place = PublishedLists(PublishedDatabase(remote, None))
            parts = ListsHead(place.head(), selector.digest).parts(place)
            for number in range(len(parts)):
                parts.read([number])
        except (CorruptMemory, ObjectNotFound, Unusable) as error:
            yield Problem(None, "", f"{error}; {again}")


def _problem(entry: Entry, error: MemstoreError) -> Problem:
    """What is damaged; that the store is away is not. Raises StoreUnavailable."""
    if isinstance(error, StoreUnavailable) and not isinstance(error, ObjectNotFound):
        raise error
    return Problem(None, entry.row.name, str(error))
