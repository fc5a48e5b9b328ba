"""Transfer documents out of a memory and into it: export, publish, import, pull."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from memstore.block import RecordKey
from memstore.disk.files import INDEX
from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.texts import Keep, decode_part
from memstore.errors import CorruptBlock, CorruptMemory, DocumentNotFound, InvalidInput, WrongModel
from memstore.paths import expanded
from memstore.share.contents import Entry, read_parts
from memstore.share.document_file import DocumentFile, check_target, write_document
from memstore.share.document_parts import Head, IndexRun, Part, Tokens, stored_parts, usable_parts
from memstore.share.manifest import Manifest, read_newest
from memstore.share.object_store import ObjectStore
from memstore.share.open_object_store import open_object_store
from memstore.share.publication_options import is_url
from memstore.share.publish import GRACE, PublishOptions, Report, publish
from memstore.store.committed import admit_import, check_name
from memstore.store.memory_store import MemoryStore

_BATCH_BYTES = 16 << 20  # record bytes of an import's transaction

# Out of a memory


def export_document(store: MemoryStore, name: str, file: Path | str) -> int:
    """Write one ready document to a file for `import_document`; return its bytes. It replaces an
    older export, never another file.

    Raises DocumentNotFound, InvalidInput (the file cannot be written; the document changed),
    StorageFull, CorruptMemory.
    """
    file = expanded(file)
    check_target(file)
    (document,) = store.ready([name])
    if is_url(store.place):
        published = PublishedDocument.at(store.place, name)
        return write_document(published.head, published.parts(), file)
    catalog = store.committed.catalog
    head = Head(catalog.signature.public, document, catalog.index_spec)
    return write_document(head, stored_parts(catalog, document), file)


def publish_memory(
    store: MemoryStore,
    url: str,
    names: Sequence[str] | None = None,
    *,
    keep: Keep = "kv",
    replace: bool = False,
    check: bool = False,
    grace: float = GRACE,
    progress: Callable[[int, int], None] = lambda done, documents: None,
) -> Report:
    """Publish the named documents, or every ready one, at a URL (docs/publishing.md), and the lists
    if all of their documents are published. Objects that exist there are not sent again.

    keep: "text" to leave out keys and values of passages, which readers compute when needed.
    replace: replace published documents of these names that have other content. check: read what
    is published of the documents, and send damaged objects again. grace: seconds, the same as for
    pruning there. progress: called with (documents done, documents).

    Raises InvalidInput, DocumentNotFound, DocumentExists, WrongModel, CorruptMemory,
    StoreUnavailable, MemoryNotFound (no such bucket).
    """
    if is_url(store.place):
        raise InvalidInput(f"{store.place} is published; publish from the memory's directory")
    catalog, documents = store.committed.catalog, store.ready(names, to="publish")
    options = PublishOptions(keep, replace, check, grace)
    objects = open_object_store(url, make=True)
    report = publish(catalog, documents, objects, options, progress)
    lists = catalog.database.path / INDEX
    if catalog.index_spec is not None and lists.exists():
        from memstore.store.retrieve.first_stage import ListsDirectory  # these import torch
        from memstore.store.retrieve.published_lists import carry

        carry(ListsDirectory(lists), objects, catalog.index_spec.digest)
    return report


# Out of a publication


class PublishedDocument:
    """A document of a publication, read whole."""

    def __init__(self, objects: ObjectStore, manifest: Manifest, entry: Entry) -> None:
        """entry: an entry of the manifest."""
        self._objects, self._entry = objects, entry
        self.head = Head(manifest.signature, entry.row, manifest.selector)

    @classmethod
    def at(cls, url: str, name: str) -> "PublishedDocument":
        """The document of this name in the newest manifest at a URL. Raises DocumentNotFound,
        MemoryNotFound, StoreUnavailable, CorruptMemory.
        """
        objects = open_object_store(url)
        return cls.named(objects, read_newest(objects), name)

    @classmethod
    def named(cls, objects: ObjectStore, manifest: Manifest, name: str) -> "PublishedDocument":
        """The document of this name. Raises DocumentNotFound."""
        entry, url = manifest.entries.get(name), objects.url
        if entry is None:
            raise DocumentNotFound(
                f"no document {name!r} is published at {url}; memstore ls --store {url} lists them"
            )
        return cls(objects, manifest, entry)

    def parts(self) -> Iterator[Part]:
        """Its parts, each checked before it is yielded. Raises CorruptMemory, StoreUnavailable."""
        try:
            yield from usable_parts(self.head, read_parts(self._objects, self._entry))
        except (ValueError, CorruptBlock) as error:
            raise CorruptMemory(
                f"document {self._entry.row.name!r} at {self._objects.url} is damaged "
                f"({getattr(error, 'reason', error)}); publish it again with --check"
            ) from error


# Into a memory


def import_document(store: MemoryStore, file: Path | str, name: str | None = None) -> Document:
    """Import an exported document, under `name` if given; the same content under the same name is
    left unchanged.

    Raises InvalidInput (no export, damaged, truncated), WrongModel, NewerFormat, DocumentExists,
    StorageFull, ReadOnlyMemory, MemoryLocked; the memory is then unchanged.
    """
    file = expanded(file)
    return import_from(store, DocumentFile(file), file, name)


def pull_document(store: MemoryStore, name: str, url: str, as_name: str | None = None) -> Document:
    """Import a published document as `import_document` imports a file. Raises also
    DocumentNotFound, StoreUnavailable, CorruptMemory, MemoryNotFound.
    """
    store.writable()
    return import_from(store, PublishedDocument.at(url, name), url, as_name)


def import_from(
    store: MemoryStore,
    source: DocumentFile | PublishedDocument,
    place: Path | str,
    name: str | None,
) -> Document:
    """As `import_document`, from an opened file or publication; place: its path or URL."""
    original = source.head.document
    name = original.name if name is None else name
    check_name(name)
    committed = store.writable()
    with committed.writing(name):
        found = admit_import(committed.named(name), original)
        if found is None or found.state != "ready":
            found = _store_document(committed.catalog, source, place, name, found)
    return found


def _store_document(
    catalog: Catalog,
    source: DocumentFile | PublishedDocument,
    place: Path | str,
    name: str,
    instead_of: Document | None,
) -> Document:
    """Store the document of `source` under a free name; instead_of: the row of a killed import to
    replace. The caller holds the writer lock.

    Raises WrongModel, StorageFull, and what reading the parts raises; the memory is then unchanged.
    """
    head, database, path = source.head, catalog.database, catalog.database.path
    catalog.signature.check_same(
        head.signature, str(place), f"only a memory of that model can import it, and {path} is not"
    )
    if head.selector != catalog.index_spec:
        specs = catalog.index_spec, head.selector
        here, there = (spec.name if spec is not None else "none" for spec in specs)
        raise WrongModel(
            f"{place} was written for selector {there}, {path} has {here} or another version "
            "of it; import it into a memory with the same selector"
        )
    imported = replace(source.head.document.portable(), name=name)

    def begin(txn: Transaction) -> int:
        if instead_of is not None:
            catalog.delete_document(txn, instead_of.id)
        number = catalog.new_number(txn)
        row = replace(imported, id=number, state="ingesting", tokens=0, blocks=0, bytes=0)
        catalog.put_document(txn, row)
        return number

    number = database.write(begin)
    imported = replace(imported, id=number)
    try:
        batch: list[Part] = []
        size = 0
        for part in source.parts():
            if size >= _BATCH_BYTES:
                database.write(lambda txn: _store(txn, catalog, imported, batch))  # noqa: B023 (runs now)
                batch, size = [], 0
            batch.append(part)
            size += max(len(x) for x in part if isinstance(x, bytes))

        def end(txn: Transaction) -> Document:
            _store(txn, catalog, imported, batch)
            row = replace(imported, state="ready", bytes=catalog.record_bytes(txn, imported))
            catalog.put_document(txn, row)
            return row

        return database.write(end)
    except BaseException:
        database.write(lambda txn: catalog.delete_document(txn, number))
        raise


def _store(txn: Transaction, catalog: Catalog, document: Document, batch: list[Part]) -> None:
    number, records = document.id, dict[int, bytes]()  # of passages, by block
    for part in batch:
        if isinstance(part, Tokens):
            catalog.texts.put_part(txn, number, part.first, part.value)
            if document.of_passages:
                found = decode_part(part.first, part.value, catalog.signature.block_size)
                digests = catalog.digests(document, found.passages)
                catalog.refer(txn, document, part.first, digests)
        elif isinstance(part, IndexRun):
            catalog.runs.put_value(txn, number, *part)
        elif not document.of_passages:
            catalog.blocks.put(txn, RecordKey(number, part.block, part.layer), part.data)
        else:
            records[part.block] = part.data
    if records:
        for block, digest in catalog.digests_of(txn, document, min(records), max(records) + 1):
            row = catalog.passages.find(txn, digest) if block in records else None
            if row is not None and not row.bytes:  # the passage has no record yet
                catalog.passages.store(txn, row, records[block])
