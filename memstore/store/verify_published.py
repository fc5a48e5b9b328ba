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
from memstore.share.contents import Entry
from memstore.share.manifest import read_newest
from memstore.share.object_store import ObjectStore, without_credentials
from memstore.share.open_object_store import open_object_store
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
    for entry in manifest.entries.values():
        try:
            counted = PublishedDocument(objects, manifest, entry).check()
            documents, found, size = documents + 1, found + counted[0], size + counted[1]
        except MemstoreError as error:
            problems.append(_problem(entry, error))
    if manifest.lists:
        problems += _check_lists(objects)
    return Report(documents, found, size, problems)


def _check_lists(objects: ObjectStore) -> Iterator[Problem]:
    """Are the lists as they were published? Raises StoreUnavailable."""
    from memstore.index.index_file import Parts, Unusable, decode_file  # these import torch
    from memstore.index.passage_files import FILE
    from memstore.share.publication import PublishedDatabase
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
