"""Documents of published memories: sent from a memory of this machine, and pulled into one."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from memstore.disk.files import INDEX
from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptBlock, CorruptMemory, DocumentNotFound
from memstore.share.manifest import Entry
from memstore.share.open_object_store import open_object_store
from memstore.share.pieces import read_values, records
from memstore.share.publish import PublishOptions, Report, publish
from memstore.share.published import Published
from memstore.store.transfer.document_parts import Head, IndexRun, Part, Record, Tokens
from memstore.store.transfer.exports import usable_parts, write_export


def publish_from(
    catalog: Catalog,
    documents: Sequence[Document],
    url: str,
    options: PublishOptions,
    progress: Callable[[int, int], None],
) -> Report:
    """Publish ready documents of a memory's directory, with the lists beside it where all that they
    are of is published. Raises as MemoryStore.publish does.
    """
    place = open_object_store(url, make=True)
    report = publish(catalog, documents, place, options, progress)
    lists = catalog.database.path / INDEX
    if catalog.index_spec is not None and lists.exists():
        from memstore.index.passage_files import PassageDirectory  # these import torch
        from memstore.store.retrieve.published_lists import carry

        carry(PassageDirectory(lists), place, catalog.index_spec.digest)
    return report


def write_published(published: Published, name: str, file: Path) -> Head:
    """Write a published document to a new file, as `export_document` would have; return what it
    says of itself.

    Raises DocumentNotFound, CorruptMemory, StoreUnavailable, InvalidInput (the file), StorageFull.
    """
    manifest, entry = published.manifest, entry_of(published, name)
    head = Head(manifest.signature, entry.row, manifest.selector)
    write_export(head, parts(published, entry), file)
    return head


def export_published(url: str, name: str, file: Path) -> int:
    """Write a published document to a new file, as `export_document` does; return its bytes.
    Raises as write_published does, and MemoryNotFound.
    """
    write_published(Published.open(open_object_store(url)), name, file)
    return file.stat().st_size


def entry_of(published: Published, name: str) -> Entry:
    """What is published of a document. Raises DocumentNotFound."""
    entry = published.entry(name)
    if entry is None:
        raise no_published(published, name)
    return entry


def no_published(published: Published, name: str) -> DocumentNotFound:
    """The error for a name that no published document has."""
    url = published.objects.url
    return DocumentNotFound(
        f"no document {name!r} is published at {url}; memstore ls --store {url} lists them"
    )


def usable(published: Published, entry: Entry) -> Iterator[Part]:
    """The parts of a published document, each checked. Raises CorruptMemory, StoreUnavailable."""
    head = Head(published.manifest.signature, entry.row, published.manifest.selector)
    try:
        yield from usable_parts(head, parts(published, entry))
    except (ValueError, CorruptBlock) as error:
        raise CorruptMemory(
            f"document {entry.row.name!r} at {published.objects.url} is damaged ({error}); publish "
            "it again with --check"
        ) from error


def parts(published: Published, entry: Entry) -> Iterator[Part]:
    """The parts of a published document in the order of an export, each as it was in the memory
    that published it. Raises CorruptMemory, StoreUnavailable.
    """
    place, manifest = published.objects, published.manifest
    for piece in entry.pieces:
        if piece.kind == "tokens":
            for value in read_values(place, piece):
                yield Tokens(value.first, value.value)
    for piece in entry.pieces:
        if piece.kind == "landmarks":
            for value in read_values(place, piece):
                yield IndexRun(piece.part, value.first, value.value)
    for record, data in records(place, entry.row, entry.pieces, manifest.signature):
        yield Record(record.block, record.layer, bytes(data))
