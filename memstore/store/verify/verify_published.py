"""Checking a published memory where it lies."""

from collections.abc import Iterator

from memstore.errors import CorruptMemory, MemstoreError, ObjectNotFound, StoreUnavailable
from memstore.share.format.document_pages import Entry
from memstore.share.format.pieces import Piece
from memstore.share.format.published import Published
from memstore.share.format.segments import FOLDER, read_footer
from memstore.share.objects.open_object_store import open_object_store
from memstore.store.transfer.document_parts import Head, check_parts
from memstore.store.transfer.published_document import blocks_of, parts
from memstore.store.verify.report import Problem, Report


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
                counted = check_parts(head, blocks_of(published), parts(published, entry))
                documents, found, size = documents + 1, found + counted[0], size + counted[1]
            except MemstoreError as error:
                problems.append(_problem(entry, error))
    problems += _check_footers(published, every, sizes)
    if manifest.selector is not None and manifest.lists is not None:
        from memstore.store.verify.verify_lists import check_lists  # which imports torch

        problems += check_lists(published, manifest.selector, manifest.lists)
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
