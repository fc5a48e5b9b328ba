"""The committed documents of an open memory, whichever process wrote them: their rows, the search
data that is loaded for them, the locks for writing one, and which write a document's name admits (a
new document, a resumed one, a replacement, an import), as transitions of a row's state:

    (nothing) --new--> ingesting --finish--> ready
    ready --replace--> ready, and a row "replacing" of the same name --finish--> ready, the old gone
    (nothing) --import--> ingesting, without tokens --> ready
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from memstore.decode import check_plain
from memstore.decode import check_settings as check_fields
from memstore.disk.format.document import WRITE_BYTES, Document, IngestSettings
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction, Version
from memstore.disk.tables.catalog import Catalog, Changes
from memstore.disk.tables.runs import IndexSpec
from memstore.errors import DocumentExists, DocumentNotFound, InvalidInput

if TYPE_CHECKING:
    from memstore.store.retrieve.retrieval import Retrieval
    from memstore.store.writer import DocumentWriter

Mode = Literal["new", "replace"]


@dataclass(frozen=True)
class Admission:
    """The row that a writer writes to, and the rows that it replaces."""

    document: Document  # its row; with id 0 it is not stored yet
    replaces: Document | None = None  # deleted when the document is ready
    instead_of: Document | None = None  # deleted when the document is begun


class Committed:
    """The documents of an open memory as `follow` last saw them. Safe for several threads.

    listed: the last result of `list_rows`, until a row changes. version: the version of the
    memory that `follow` saw last.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._rows: dict[int, Document] = {}  # in every state
        self._named: dict[str, set[int]] = {}  # name -> numbers
        self.listed: tuple[Document, ...] | None = None
        self._lock = threading.Lock()  # guards the rows
        self.writers: dict[int, DocumentWriter] = {}  # of this store, by document
        self.version = Version(0, -1)
        self._changes: Changes | None = None  # changes of rows that `follow` has seen
        self._retrieval: Retrieval | None = None
        self._following = threading.RLock()

    def list_rows(self) -> tuple[Document, ...]:
        """Rows that are ready or being ingested for the first time, oldest first."""
        with self._lock:
            rows = (row for row in self._rows.values() if row.is_listed)
            self.listed = tuple(sorted(rows, key=lambda row: row.id))
            return self.listed

    def named(self, name: str) -> list[Document]:
        """All rows of a name in every state, oldest first."""
        with self._lock:
            return [self._rows[number] for number in sorted(self._named.get(name, ()))]

    def attach(self, retrieval: "Retrieval") -> None:
        """Have `follow` update a retrieval, too. Raises CorruptMemory, with nothing attached."""
        with self._following:
            self.follow(retrieval)
            self._retrieval = retrieval

    def ended(self, writer: "DocumentWriter") -> None:
        """Take over what a closed writer of this store committed."""
        number = writer.document.id
        with self._following:
            with self.catalog.database.read() as txn:
                row = self.catalog.row(txn, number)
            self.writers.pop(number, None)
            if self._retrieval is not None:
                self._retrieval.written(number, row)
            self.follow()

    def begin(
        self, retrieval: "Retrieval", wanted: Document, mode: Mode, commit_bytes: int | None
    ) -> "DocumentWriter | None":
        """The writer of a document; None if the memory has the same content already.

        The writer holds the writer lock and the lock of the document's name until it is closed.
        Raises what MemoryStore.write_document raises.
        """
        from memstore.store.writer import DocumentWriter  # imports torch

        with ExitStack() as locks:
            locks.enter_context(self.writing(wanted.name))
            admitted = admit(self.named(wanted.name), wanted, mode)
            if admitted is None:
                return None
            held = ExitStack()  # the writer's locks

            def ended(writer: DocumentWriter) -> None:
                with held:
                    self.ended(writer)

            row, replaced = self._stored_row(admitted), admitted.replaces
            writer = DocumentWriter(self.catalog, retrieval, row, replaced, ended, commit_bytes)
            held.push(locks.pop_all())
            self.writers[writer.document.id] = writer
            return writer

    def _stored_row(self, admitted: Admission) -> Document:
        """The row to write to, stored first if it is new. Raises what Database.write raises."""
        if admitted.document.id:
            return admitted.document

        def work(txn: Transaction) -> Document:
            if admitted.instead_of is not None:
                self.catalog.delete_document(txn, admitted.instead_of.id)
            number = self.catalog.new_number(txn)
            write = os.urandom(WRITE_BYTES)
            row = replace(admitted.document, id=number, created=time.time(), write=write)
            self.catalog.put_document(txn, row)
            return row

        return self.catalog.database.write(work)

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Hold the locks for writing under a name: no other process writes, and no other thread
        writes a document of this name. Raises MemoryLocked, ReadOnlyMemory.
        """
        database = self.catalog.database
        with database.name_written(name), database.writer():
            self.follow()
            yield

    def follow(self, new: "Retrieval | None" = None) -> None:
        """See what was committed; new: a retrieval that needs all rows. Raises CorruptMemory."""
        with self._following:
            # the file is read before the rows: one that is too old only costs another call
            version = self.catalog.database.version
            if version.file != self.version.file and self._retrieval is not None:
                self._retrieval.rewritten()
            with self.catalog.database.read() as txn:
                # LMDB tells the number of a commit before new views hold it
                version = version._replace(transaction=txn.sees)
                changes = self.catalog.changes(txn)
                changed = self._changed(txn, changes)
                if self._retrieval is not None:
                    self._retrieval.follow(txn, changed, but=self.writers)
                if new is not None:
                    new.follow(txn, self._rows | changed, but=self.writers)
            self._change(changed)
            self.version, self._changes = version, changes

    def _changed(self, txn: Transaction, changes: Changes) -> dict[int, Document | None]:
        """The rows that changed, in order of id; None for a deleted one."""
        numbers = changes.since(self._changes)
        if numbers is not None:
            return {number: self.catalog.row(txn, number) for number in sorted(numbers)}
        gone = dict.fromkeys(self._rows)
        return gone | {row.id: row for row in self.catalog.documents(txn)}

    def _change(self, changed: Mapping[int, Document | None]) -> None:
        with self._lock:
            for number, row in changed.items():
                old = self._rows.pop(number, None)
                if old is not None:
                    self._named[old.name].discard(number)
                    if not self._named[old.name]:
                        del self._named[old.name]
                if row is not None:
                    self._rows[number] = row
                    self._named.setdefault(row.name, set()).add(number)
            if changed:
                self.listed = None


# Which write a name admits

_NAMED = 5  # documents that an error names


def check_name(name: str) -> None:
    """Raises InvalidInput for an invalid name of a document."""
    if not name or "\0" in name or len(name) > 4096:
        raise InvalidInput("a document's name has 1 to 4096 characters, none of them NUL")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{name!a} is not UTF-8; choose another name") from error


def check_settings(
    settings: IngestSettings, mode: Mode, signature: Signature, selector: IndexSpec | None
) -> None:
    """Raises InvalidInput for an unknown mode and for settings that this memory does not support:
    passages need a selector, chunks a memory without one.
    """
    if mode not in get_args(Mode):
        raise InvalidInput(f"mode {mode!r} is unknown; choose new or replace")
    check_fields(settings)
    if settings.passage_tokens is None:
        if selector is not None:
            raise InvalidInput(
                "a memory with a selector holds documents of passages; give passage_tokens, or "
                "make a memory without a selector"
            )
        return
    if selector is None:
        raise InvalidInput(
            "passages are found by a selector, and this memory has none; make one with a selector"
        )
    if settings.passage_tokens > signature.block_size:
        raise InvalidInput(
            f"passages of up to {settings.passage_tokens} tokens do not fit into blocks of "
            f"{signature.block_size}; lower passage_tokens"
        )
    if (settings.chunk_blocks, settings.top_k) != (1, 0):
        raise InvalidInput("a document of passages has no chunks; leave out chunk_blocks and top_k")


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raises InvalidInput for metadata that a row cannot store."""
    try:
        check_plain(metadata, "metadata")
    except ValueError as error:
        raise InvalidInput(f"{error}; use plain values") from error


def is_there(found: Document, source_hash: str, settings: IngestSettings, mode: Mode) -> bool:
    """Whether this content is stored already; for a replacement, with the same settings."""
    same = found.state == "ready" and found.source_hash == source_hash
    return same and (mode != "replace" or found.settings == settings)


def admit(named: Sequence[Document], wanted: Document, mode: Mode) -> Admission | None:
    """The row for a writer of `wanted` (a row without content); named: the stored rows of its name.
    None if the same content is stored already.

    Raises DocumentExists, InvalidInput (other settings).
    """
    found = next((row for row in named if row.is_listed), None)
    hidden = next((row for row in named if row.state == "replacing"), None)
    if found is not None and is_there(found, wanted.source_hash, wanted.settings, mode):
        return None
    if found is None:
        return Admission(wanted, instead_of=hidden)
    if _continues(found, wanted):
        return Admission(replace(found, metadata=wanted.metadata))
    if mode == "replace":
        if hidden is not None and _continues(hidden, wanted):
            return Admission(replace(hidden, metadata=wanted.metadata), replaces=found)
        return Admission(replace(wanted, state="replacing"), replaces=found, instead_of=hidden)
    if _is_empty(found):
        return Admission(wanted, instead_of=found)
    raise _refusal(found, wanted)


def admit_import(named: Iterable[Document], original: Document) -> Document | None:
    """The listed row of a name if it has the content of `original`, or no content; None if the name
    is free. Raises DocumentExists.
    """
    for row in named:
        if row.is_listed:
            if _is_empty(row) or (row.state == "ready" and row.source_hash == original.source_hash):
                return row
            raise DocumentExists(
                f"document {row.name!r} exists with other content; import it under another name"
            )
    return None


def no_document(name: str, rows: Iterable[Document], where: str) -> DocumentNotFound:
    """The error for an unknown name; it lists some names of the memory, similar ones first."""
    asked = name.casefold()
    listed = [repr(row.name) for row in rows if row.is_listed]
    listed.sort(key=lambda one: asked not in one.casefold() and one[1:-1].casefold() not in asked)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    names = (", ".join(listed[:_NAMED]) or "none") + more
    return DocumentNotFound(f"no document {name!r} in {where}; it holds {names}")


def _is_empty(found: Document) -> bool:
    """Whether a document has no content, because its ingest or import was interrupted."""
    return found.state == "ingesting" and not found.tokens


def _continues(found: Document, wanted: Document) -> bool:
    """Whether this is the same ingest, which was interrupted."""
    same = found.state != "ready" and found.source_hash == wanted.source_hash
    return same and found.settings == wanted.settings and not _is_empty(found)


def _refusal(found: Document, wanted: Document) -> DocumentExists | InvalidInput:
    if found.state == "ready":
        return DocumentExists(
            f"document {found.name!r} exists with other content; choose another name, or use "
            "--replace (replace=True)"
        )
    if found.source_hash != wanted.source_hash:
        return DocumentExists(
            f"document {found.name!r} is partly ingested from other content; continue with that, "
            "replace it, or remove it"
        )
    there, here = asdict(found.settings), asdict(wanted.settings)
    others = ", ".join(f"{k}={v}" for k, v in sorted(there.items()) if here[k] != v)
    return InvalidInput(
        f"document {found.name!r} was begun with {others}; continue with the same, replace it, or "
        "forget it"
    )
