"""Whole documents of published memories: pulled into a memory of this machine, and checked where
they lie.
"""

import fcntl
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memstore.disk.format.keys import landmarks_key
from memstore.disk.format.landmarks import decode_run
from memstore.disk.format.runs import Kind, kinds_of
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.selector_table import SelectorTable
from memstore.errors import (
    CorruptMemory,
    DocumentNotFound,
    MemstoreError,
    ObjectNotFound,
    StoreUnavailable,
)
from memstore.share.format.document_pages import Entry
from memstore.share.format.pieces import Piece
from memstore.share.format.published import Published
from memstore.share.format.read_pieces import damaged, read_values, records
from memstore.share.format.segments import FOLDER, read_footer
from memstore.share.objects.open_object_store import open_object_store
from memstore.store.transfer.document_parts import (
    Head,
    Landmarks,
    Part,
    Record,
    Selected,
    Tokens,
    check_parts,
)
from memstore.store.transfer.export_file import write_export
from memstore.store.verify.verify_memory import Problem, Report


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
    write_export(head, _blocks(published), parts(published, entry), file)
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
        f"no document {name!r} is published at {url}; memstore docs --store {url} lists them"
    )


@contextmanager
def pulled(url: str, name: str, path: Path) -> Iterator[Path]:
    """A file in a memory's directory that holds a published document as an export does, as long as
    the block lasts. Raises as write_published does, and MemoryNotFound.
    """
    published = Published.open(open_object_store(url))
    file = path / f"memstore-{secrets.token_hex(8)}.partial"  # which is swept if this is killed
    write_published(published, name, file)
    try:
        with open(file, "rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # not as long as it is in use
            yield file
    finally:
        file.unlink(missing_ok=True)


def verify_published(url: str) -> Report:
    """Check every byte of a published memory that a reader could use.

    Raises MemoryNotFound, StoreUnavailable (where it is, nobody knows whether it is whole),
    CorruptMemory (its manifest).
    """
    published = Published.open(open_object_store(url))
    manifest = published.manifest
    documents = found = size = 0
    problems: list[Problem] = []
    every: list[tuple[Entry, Piece]] = []
    sizes = {found.name: found.size for found in published.objects.names(FOLDER)}
    for page in manifest.pages:
        try:
            entries = published.read(page)
        except CorruptMemory as error:
            problems.append(Problem(None, "", str(error)))
            continue
        for entry in entries:
            every += [(entry, piece) for piece in entry.pieces]
            try:
                _check_sizes(entry, sizes)
                head = Head(manifest.signature, entry.row, manifest.selector)
                counted = check_parts(head, _blocks(published), parts(published, entry))
                documents, found, size = documents + 1, found + counted[0], size + counted[1]
            except MemstoreError as error:
                problems.append(_problem(entry, error))
    problems += _check_footers(published, every, sizes)
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


def _check_footers(
    published: Published, every: list[tuple[Entry, Piece]], sizes: dict[str, int]
) -> Iterator[Problem]:
    """Does each segment say itself that it holds the pieces that the manifest names in it?"""
    place = published.objects
    by_segment: dict[str, list[tuple[Entry, Piece]]] = {}
    for entry, piece in every:
        by_segment.setdefault(piece.segment, []).append((entry, piece))
    for name, pieces in by_segment.items():
        if name not in sizes:
            continue  # which its documents have told
        try:
            signature, told = read_footer(place, name, sizes[name])
            if signature != published.manifest.signature.digest:
                raise CorruptMemory(f"{name} is a segment of another model's memory")
            known = {_where(piece): piece.row + piece.take for piece in told}
            for entry, piece in pieces:
                told_first = 0 if entry.row.of_passages and piece.kind == "records" else piece.first
                own = piece._replace(first=told_first)
                if known.get(_where(own), 0) < piece.row + piece.take:
                    yield Problem(None, entry.row.name, f"{name} does not tell of its {piece.kind}")
        except MemstoreError as error:
            yield _problem(pieces[0][0], error)


def _where(piece: Piece) -> Piece:
    """A piece without what documents take of it."""
    return piece._replace(take=1, row=0)


def _problem(entry: Entry, error: MemstoreError) -> Problem:
    """What is damaged; that the store is away is not. Raises StoreUnavailable."""
    if isinstance(error, StoreUnavailable) and not isinstance(error, ObjectNotFound):
        raise error
    return Problem(None, entry.row.name, str(error))


def parts(published: Published, entry: Entry) -> Iterator[Part]:
    """The parts of a published document in the order of an export, each as it was in the memory
    that published it. Raises CorruptMemory, StoreUnavailable.
    """
    place, manifest = published.objects, published.manifest
    signature, form = manifest.signature, manifest.selector
    for piece in entry.pieces:
        if piece.kind == "tokens":
            for value in read_values(place, piece):
                yield Tokens(value.first, value.value)
    kinds: dict[int, Kind] = {}
    if form is not None:
        kinds = dict(zip(SelectorTable(form).parts, kinds_of(form)))
    for piece in entry.pieces:
        if piece.kind != "landmarks":
            continue
        for value in read_values(place, piece):
            if form is None:
                key = landmarks_key(1, piece.part, value.first)
                run = decode_run(key, value.value, signature.geometry)
                yield Landmarks(run.layer, run.first_block, run.keys.tobytes())
            elif piece.part in kinds:
                yield Selected(kinds[piece.part], value.first, value.value)
            else:
                raise damaged(place, piece, "its selector has no such part")
    for record, data in records(place, entry, signature):
        yield Record(record.block, record.layer, bytes(data))


def _blocks(published: Published) -> BlockTable:
    return BlockTable(published.manifest.signature, published.manifest.codec)
