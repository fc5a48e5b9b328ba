"""Checking the lists of token landmarks of a published memory where they lie."""

from collections.abc import Iterator
from contextlib import closing

from memstore.disk.format.index_spec import IndexSpec
from memstore.errors import CorruptMemory, ObjectNotFound
from memstore.index.index_file import Unusable
from memstore.index.passage_files import ListsHead
from memstore.share.format.manifest import LISTS, ListsRef
from memstore.share.format.published import Published
from memstore.share.publication_options import DEADLINE
from memstore.share.read.published_tables import PublishedDatabase
from memstore.share.read.remote import Remote
from memstore.store.retrieve.published_lists import PublishedLists
from memstore.store.verify.report import Problem


def check_lists(published: Published, selector: IndexSpec, lists: ListsRef) -> Iterator[Problem]:
    """Are those of a selector as they were published? Raises StoreUnavailable."""
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
