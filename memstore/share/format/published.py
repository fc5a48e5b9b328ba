"""A published memory as one manifest has it: its documents, read page by page as asked for."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, partial

from memstore.errors import CorruptMemory, MemoryNotFound
from memstore.share.format.document_pages import Entry, PageRef, read_page
from memstore.share.format.manifest import Manifest, manifest_name, newest_number, read_manifest
from memstore.share.format.rollback import Remembering, Seen, check_newest, newest_seen, note_newest
from memstore.share.objects.daemon_threads import at_once
from memstore.share.objects.object_store import ObjectStore


class Published:
    """A published memory as one manifest has it, and its table of documents as far as it was read.
    May be used by several threads.
    """

    def __init__(
        self, objects: ObjectStore, manifest: Manifest, before: "Published | None" = None
    ) -> None:
        """Use Published.open. before: an earlier one, whose pages are not read again."""
        self.objects, self.manifest = objects, manifest
        held: dict[str, list[Entry]] = {} if before is None else before._pages
        self._pages: dict[str, list[Entry]] = {
            page.name: held[page.name] for page in manifest.pages if page.name in held
        }

    @classmethod
    def open(
        cls, objects: ObjectStore, *, cache: Remembering | None = None, at_least: int | None = None
    ) -> "Published":
        """The newest.

        cache: remembers which that is. at_least: its number, whatever was read before. Raises
        MemoryNotFound, CorruptMemory, StaleMemory, NewerFormat, StoreUnavailable.
        """
        found = cls.newest(objects, cache=cache, at_least=at_least)
        if found is None:
            raise MemoryNotFound(
                f"{objects.url} holds no published memory; memstore share push makes one"
            )
        return found

    @classmethod
    def newest(
        cls, objects: ObjectStore, *, cache: Remembering | None = None, at_least: int | None = None
    ) -> "Published | None":
        """The newest, or None where nothing was published. Raises as `open` does."""
        before = newest_seen(objects.identity, cache)
        number = newest_number(objects)
        if number is None:
            return None
        found = cls.at(objects, number)
        check_newest(objects.url, found.seen, before, at_least)
        note_newest(objects.identity, found.seen, cache, anew=at_least is not None)
        return found

    @property
    def seen(self) -> Seen:
        """Which manifest it is."""
        return self.manifest.number, self.manifest.id

    @classmethod
    def at(
        cls, objects: ObjectStore, number: int, before: "Published | None" = None
    ) -> "Published":
        """The memory as manifest `number` has it. before: an earlier one, whose pages are not read
        again. Raises as `open` does, and ObjectNotFound.
        """
        name = manifest_name(number)
        manifest = read_manifest(objects, number)
        if manifest.number != number:
            raise CorruptMemory(
                f"{objects.url}: {name} is another manifest; restore it from a copy"
            )
        return cls(objects, manifest, before)

    def documents(self) -> list[Entry]:
        """Every document, in order of names."""
        return [entry for page in self._read(self.manifest.pages) for entry in page]

    def entry(self, name: str) -> Entry | None:
        """One document by name, or None."""
        return self.entries([name]).get(name)

    def entries(self, names: Sequence[str]) -> dict[str, Entry]:
        """Documents by name; those that there are. Reads the pages that may hold them alone."""
        wanted = {*names}
        pages = sorted({self.page_of(name) for name in wanted} - {-1})
        found = self._read([self.manifest.pages[page] for page in pages])
        return {e.row.name: e for page in found for e in page if e.row.name in wanted}

    def page_of(self, name: str) -> int:
        """Which page may hold a document; -1 for none."""
        return bisect_right(self._firsts, name) - 1

    @cached_property
    def _firsts(self) -> list[str]:
        return [page.first for page in self.manifest.pages]

    def read(self, page: PageRef) -> list[Entry]:
        """The documents of one page, as it lies there."""
        return self._read([page])[0]

    def _read(self, pages: Sequence[PageRef]) -> list[list[Entry]]:
        missing = [page for page in pages if page.name not in self._pages]
        for page, entries in zip(missing, at_once(partial(read_page, self.objects), missing)):
            self._pages[page.name] = entries
        return [self._pages[page.name] for page in pages]
