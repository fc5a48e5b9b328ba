"""Documents of published memories: sent from a memory of this machine, and pulled into one."""

import fcntl
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from memstore.disk.files import INDEX
from memstore.disk.format.document import Document
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.catalog import Catalog
from memstore.errors import DocumentNotFound
from memstore.share.manifest import Entry
from memstore.share.open_object_store import open_object_store
from memstore.share.pieces import read_values, records
from memstore.share.publish import PublishOptions, Report, publish
from memstore.share.published import Published
from memstore.store.transfer.document_parts import Head, IndexRun, Part, Record, Tokens
from memstore.store.transfer.exports import write_export


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
    manifest = published.manifest
    entry = published.entry(name)
    if entry is None:
        raise no_published(published, name)
    head = Head(manifest.signature, entry.row, manifest.selector)
    write_export(head, blocks_of(published), parts(published, entry), file)
    return head


def export_published(url: str, name: str, file: Path) -> int:
    """Write a published document to a new file, as `export_document` does; return its bytes.
    Raises as write_published does, and MemoryNotFound.
    """
    write_published(Published.open(open_object_store(url)), name, file)
    return file.stat().st_size


def no_published(published: Published, name: str) -> DocumentNotFound:
    """The error for a name that no published document has."""
    url = published.objects.url
    return DocumentNotFound(
        f"no document {name!r} is published at {url}; memstore ls --store {url} lists them"
    )


@contextmanager
def pulled(url: str, name: str, path: Path) -> Iterator[Path]:
    """A file in a memory's directory that holds a published document as an export does, as long as
    the block lasts. Raises as write_published does, and MemoryNotFound.
    """
    published = Published.open(open_object_store(url))
    file = path / f"memstore-{secrets.token_hex(8)}.partial"  # which is swept if this is killed
    try:
        write_published(published, name, file)
        with open(file, "rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # not as long as it is in use
            yield file
    finally:
        file.unlink(missing_ok=True)


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


def blocks_of(published: Published) -> BlockTable:
    """What reads the records of a published memory."""
    return BlockTable(published.manifest.signature, published.manifest.codec)
