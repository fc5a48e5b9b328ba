"""Checks that a published memory stores what was published; it is read whole."""

from collections.abc import Iterator
from contextlib import closing

from memstore.errors import (
    CorruptMemory,
    InvalidInput,
    MemstoreError,
    ObjectNotFound,
    StoreUnavailable,
)
from memstore.share.manifest import read_newest
from memstore.share.object_store import ObjectStore, without_credentials
from memstore.share.open_object_store import open_object_store
from memstore.share.pieces import Entry
from memstore.share.segments import FOLDER
from memstore.store.transfer import PublishedDocument
from memstore.store.verify import Problem, Report


def verify_published(url: str, *, repair: bool = False) -> Report:
    """Check every byte of a published memory that a reader could use.

    Raises MemoryNotFound, StoreUnavailable, CorruptMemory (its manifest), InvalidInput (repair).
    """
    if repair:
        raise InvalidInput(
            f"{without_credentials(url)} is published and is not repaired: publish the damaged "
            "documents again with --check, from a memory that has them whole"
        )
    objects = open_object_store(url)
    manifest = read_newest(objects)
    documents = found = size = 0
    problems: list[Problem] = []
    sizes = {found.name: found.size for found in objects.names(FOLDER)}
    for entry in manifest.entries.values():
        try:
            _check_sizes(entry, sizes)
            counted = PublishedDocument(objects, manifest, entry).check()
            documents, found, size = documents + 1, found + counted[0], size + counted[1]
        except MemstoreError as error:
            problems.append(_problem(entry, error))
    if manifest.lists is not None:
        problems += _check_lists(objects)
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


def _check_lists(objects: ObjectStore) -> Iterator[Problem]:
    """Are the lists as they were published? Raises StoreUnavailable."""
    from memstore.index.index_file import Parts, Unusable, decode_file  # these import torch
    from memstore.index.passage_files import FILE
    from memstore.share.published_database import PublishedDatabase
    from memstore.store.retrieve.published_lists import PublishedLists

    url = objects.url
    again = f"run `memstore index --store {url}`"
    try:
        with closing(PublishedDatabase(objects)) as database:
            decode_file(FILE, PublishedLists(database).content(), Parts)
    except FileNotFoundError:  # a newer manifest has none
        pass
    except (CorruptMemory, ObjectNotFound, Unusable) as error:
        yield Problem(None, "", f"{error}; {again}")


def _problem(entry: Entry, error: MemstoreError) -> Problem:
    """What is damaged; that the store is away is not. Raises StoreUnavailable."""
    if isinstance(error, StoreUnavailable) and not isinstance(error, ObjectNotFound):
        raise error
    return Problem(None, entry.row.name, str(error))
