"""Check that a memory stores what was written to it, and repair it by dropping damaged data.

First all bytes of the file are read, and its key pages checked, without LMDB: with LMDB's mapped
file, a disk error or a damaged page could end the process.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from memstore.block import RecordKey
from memstore.disk.files import DATA, named_os_errors
from memstore.disk.lmdb.meta_pages import is_sound
from memstore.disk.lmdb.transaction import Transaction, number_key, read_number_key
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.texts import Digest, StoredPassage
from memstore.errors import RESTORE, CorruptMemory, InvalidInput, MemoryNotFound, ObjectNotFound
from memstore.paths import expanded
from memstore.share.contents import read_parts
from memstore.share.document_parts import Head, check_parts, stored_parts
from memstore.share.manifest import read_newest
from memstore.share.object_store import ObjectStore, without_credentials
from memstore.share.open_object_store import open_object_store
from memstore.share.publication_options import is_url

_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class Problem:
    """Damage to a document, a passage or the memory."""

    document: int | None  # id; None: the memory itself
    name: str  # name of the document, as far as readable
    what: str


@dataclass(frozen=True)
class Report:
    """The result of a verification; `documents`, `records` and `bytes` count undamaged data."""

    documents: int = 0
    records: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # names of documents that repair removed

    @property
    def clean(self) -> bool:
        """Is there no damage?"""
        return not self.problems


def verify_memory(path: Path | str, *, repair: bool = False) -> Report:
    """Check every byte of a memory that a reader could use; with `repair`, drop damaged documents
    and the keys and values of damaged passages (questions recompute them), and check again.

    A repair reports the problems found before it and the documents that it dropped; other processes
    may read concurrently. Damage to LMDB's key pages, to its meta pages, or to the rows that
    describe the whole memory cannot be repaired.

    path: a memory's directory, or the URL of a published memory, which is read whole and cannot be
    repaired.

    Raises MemoryNotFound, MemoryLocked, StorageFull; CorruptMemory (the memory cannot be repaired);
    for a URL also StoreUnavailable, InvalidInput (repair).
    """
    if is_url(path):
        return verify_published(str(path), repair=repair)
    path = expanded(path)
    if not (path / DATA).is_file():
        raise MemoryNotFound.of(path)
    try:
        found = _Walk(path)
        before = found.report()
        if before.clean or not repair:
            return before
        _drop(path, [*found.documents, *found.passages])
        after = _Walk(path).report()
    except CorruptMemory as error:
        if not repair:
            return Report(problems=[Problem(None, "", str(error))])
        raise _not_repaired(path, error.reason) from error
    if not after.clean:
        raise _not_repaired(path, CorruptMemory(after.problems[0].what).reason)
    dropped = [found.documents[number].name for number in sorted(found.documents)]
    return Report(after.documents, after.records, after.bytes, before.problems, dropped)


def _not_repaired(path: Path, what: str) -> CorruptMemory:
    return CorruptMemory(f"{path} cannot be repaired ({what}): {RESTORE}")


def _check_pages(path: Path) -> None:
    """Raises CorruptMemory where key pages are damaged, or bytes cannot be read."""
    try:
        with named_os_errors(path):
            with (path / DATA).open("rb", buffering=0) as file:
                while file.read(_READ_BYTES):
                    pass
            if not is_sound(path):
                raise CorruptMemory("pages of keys are damaged")
    except OSError as error:
        raise CorruptMemory(f"the file cannot be read ({error})") from error


class _Walk:
    """Problems of a memory, found by reading every document and every passage.

    documents: problems by id; passages: problems of records by passage number; counts: problems of
    reference counts.
    """

    def __init__(self, path: Path) -> None:
        """Raises CorruptMemory for damage to the memory itself, and what opening raises."""
        self.documents: dict[int, Problem] = {}
        self.passages: dict[int, Problem] = {}
        self.counts: list[Problem] = []
        self._names: dict[int, str] = {}  # document id -> name
        self._whole = self._records = self._bytes = 0
        _check_pages(path)
        with closing(Catalog.open(path, read_only=True)) as self._catalog:
            self._walk()

    def report(self) -> Report:
        """The result: problems of documents, then of passages, then of references."""
        problems = [*self.documents.values(), *self.passages.values(), *self.counts]
        return Report(self._whole, self._records, self._bytes, problems)

    def _walk(self) -> None:
        catalog = self._catalog
        with catalog.database.read() as txn:
            catalog.next_number(txn)
            rows = _owners(txn, "documents")
            lost = (_owners(txn, "tokens") | _owners(txn, "landmarks")) - rows
            unowned = _owners(txn, "blocks") - rows - lost - _owners(txn, "passages")
        for number in sorted(lost):
            what = f"document {number}: landmark keys or tokens without a row"
            self.documents[number] = Problem(number, f"document {number}", what)
        for number in sorted(unowned):
            what = f"records of number {number}, which is no document or passage"
            self.passages[number] = Problem(None, "", what)
        for number in sorted(rows):
            self._read_document(number)
        with catalog.database.read() as txn:
            self._read_passages(txn)
            try:
                wrong = _count_references(txn, catalog)
            except CorruptMemory as error:
                wrong = [str(error)]
        self.counts = [Problem(None, "", what) for what in wrong]

    def _read_document(self, number: int) -> None:
        """Read all data of a document but the records of its passages."""
        catalog, name, records, size = self._catalog, f"document {number}", 0, 0
        try:
            with catalog.database.read() as txn:
                document = catalog.row(txn, number)
                if document is None:
                    return  # another process deleted it
                self._names[number] = name = document.name
                if document.tokens or document.state == "ready":  # else an unfinished import
                    head = Head(catalog.signature, document, catalog.index_spec)
                    records, size = check_parts(head, stored_parts(catalog, document, None))
                if not document.of_passages and size != document.bytes:
                    what = f"{size} bytes of records instead of {document.bytes}"
                    raise CorruptMemory(f"document {name!r}: {what}")
        except CorruptMemory as error:
            self.documents[number] = Problem(number, name, str(error))
        else:
            self._whole += 1
            self._records, self._bytes = self._records + records, self._bytes + size

    def _read_passages(self, txn: Transaction) -> None:
        """Read the records of all passages."""
        table, blocks = self._catalog.passages, self._catalog.blocks
        for number in sorted(_owners(txn, "passages")):
            key, name = RecordKey(number, 0, 0), f"passage {number}"
            try:
                row = table.row(txn, number)
            except CorruptMemory:
                continue  # reported when references are counted
            if row is None:
                continue
            if row.home[0] in self._names:
                name = f"passage {row.home[1]} of document {self._names[row.home[0]]!r}"
            try:
                found = dict(blocks.walk(txn, number))
                if [*found] != ([key] if row.bytes else []):
                    raise CorruptMemory(f"records {[*found]} instead of {int(row.bytes > 0)}")
                for record in found.values():
                    blocks.check(record, key, row.digest)
                    if len(record) != row.bytes:
                        raise CorruptMemory(f"{len(record)} bytes instead of {row.bytes}")
            except CorruptMemory as error:
                what = f"{name}: {error.reason}; it is computed again when it is needed"
                self.passages[number] = Problem(None, name, what)
            else:
                self._records, self._bytes = self._records + len(found), self._bytes + row.bytes


def _owners(txn: Transaction, table: str) -> set[int]:
    """The numbers of all documents or passages with an entry in a table."""
    owners = set()
    start = b""
    while (entry := next(txn.scan(table, start), None)) is not None:
        number = read_number_key(entry[0][:8])
        owners.add(number)
        start = number_key(number + 1)
    return owners


def _drop(path: Path, numbers: Iterable[int]) -> None:
    """Delete documents and records of passages, and recount references to passages. Raises
    CorruptMemory where key pages are damaged: LMDB might then damage other data.
    """
    with closing(Catalog.open(path)) as catalog, catalog.database.writer():
        if not is_sound(path):
            raise CorruptMemory("pages of keys are damaged")

        def drop(txn: Transaction, number: int) -> None:
            if not catalog.passages.drop_record(txn, number):
                catalog.delete_document(txn, number)

        for number in sorted(numbers):
            catalog.database.write(partial(drop, number=number))
        catalog.database.write(partial(_count_references, catalog=catalog, correct=True))


def _count_references(txn: Transaction, catalog: Catalog, *, correct: bool = False) -> list[str]:
    """Problems of the rows of passages. correct: recount references, make missing rows, and delete
    passages without references. Raises CorruptMemory.
    """
    wanted, passages = Counter[Digest](), catalog.passages
    for document in catalog.documents(txn):
        if document.of_passages:
            wanted.update(digest for _, digest in catalog.digests_of(txn, document))
    wrong: list[str] = []
    kept: set[Digest] = set()
    for number in sorted(_owners(txn, "passages")):
        try:
            row = passages.row(txn, number)
        except CorruptMemory as error:
            wrong.append(str(error))
            row = None
        right = 0 if row is None or row.digest in kept else wanted[row.digest]
        if row is not None and row.references != right:
            wrong.append(f"passage {number} counts {row.references} references instead of {right}")
        if row is None or not right:
            if correct:
                catalog.blocks.delete(txn, number)
                txn.delete("passages", number_key(number))
            continue
        kept.add(row.digest)
        if correct:
            passages.correct(txn, row, right)
        elif passages.number(txn, row.digest) != number:
            wrong.append(f"passage {number} is not found by its digest")
    missing = wanted.keys() - kept
    if missing:
        wrong.append(f"{len(missing)} passages that documents refer to have no row")
    if correct:
        for key, _ in list(txn.scan("digests")):
            if bytes(key) not in kept:
                txn.delete("digests", bytes(key))
        for digest in missing:
            passages.correct(txn, StoredPassage(catalog.new_number(txn), digest), wanted[digest])
    return wrong


# Published memories


def verify_published(url: str, *, repair: bool = False) -> Report:
    """Check every byte of a published memory that a reader could use.

    Raises MemoryNotFound, StoreUnavailable, CorruptMemory (its manifest), InvalidInput (repair).
    """
    if repair:
        raise InvalidInput(
            f"{without_credentials(url)} is published; instead of repairing it, publish the "
            "damaged documents again with --check, from an undamaged memory"
        )
    objects = open_object_store(url)
    manifest = read_newest(objects)
    documents = found = size = 0
    problems: list[Problem] = []
    for entry in manifest.entries.values():
        try:
            head = Head(manifest.signature, entry.row, manifest.selector)
            counted = check_parts(head, read_parts(objects, entry))
            documents, found, size = documents + 1, found + counted[0], size + counted[1]
        except (CorruptMemory, ObjectNotFound) as error:
            what = f"{error.reason}; publish it again with --check"
            problems.append(Problem(None, entry.row.name, what))
    if manifest.lists:
        problems += _check_lists(objects)
    return Report(documents, found, size, problems)


def _check_lists(objects: ObjectStore) -> Iterator[Problem]:
    """Problems of the published lists. Raises StoreUnavailable."""
    from memstore.index.index_file import Parts, Unusable, decode_file  # these import torch
    from memstore.index.token_lists import FILE
    from memstore.share.publication import PublishedDatabase
    from memstore.store.retrieve.published_lists import PublishedLists

    again = f"run `memstore index --store {objects.url}`"
    try:
        with closing(PublishedDatabase(objects)) as database:
            decode_file(FILE, PublishedLists(database).content(), Parts)
    except FileNotFoundError:  # a newer manifest has none
        pass
    except (CorruptMemory, ObjectNotFound, Unusable) as error:
        yield Problem(None, "", f"{getattr(error, 'reason', error)}; {again}")
