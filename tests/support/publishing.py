"""Publishing a test's memory, changing the publication, and comparing it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from memstore.share.contents import Contents, Entry, read_contents
from memstore.share.manifest import newest_number, read_newest
from memstore.share.object_store import ObjectStore
from memstore.share.publish import PublishOptions, Report, publish
from memstore.share.segments import SEGMENT_BYTES
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, pull_document
from memstore.store.verify import verify_published
from support import passage_documents, selected_documents, synthetic_documents
from support.places import WatchedPlace, in_memory
from support.synthetic_documents import SIGNATURE

KINDS: dict[str, tuple[Callable[[Path], MemoryStore], Callable[..., object]]] = {
    "blocks": (lambda path: MemoryStore.create(path, SIGNATURE), synthetic_documents.ingest),
    "passages": (selected_documents.create, passage_documents.ingest),
}
"""Makes a memory of that kind, and ingests a document into it."""


def send(
    store: MemoryStore,
    place: ObjectStore | WatchedPlace,
    *names: str,
    segment_bytes: int = SEGMENT_BYTES,
    **settings,
) -> Report:
    catalog = store._catalog
    options = PublishOptions(**settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memstore.share.segments.SEGMENT_BYTES", segment_bytes)
        return publish(catalog, store.ready(names or None), place, options)  # type: ignore[arg-type]


def names(place: WatchedPlace) -> list[str]:
    return [*read_newest(place).entries]  # type: ignore[arg-type]


def segments(place: WatchedPlace) -> set[str]:
    """The segments that the newest manifest names."""
    return read_newest(place).segments  # type: ignore[arg-type]


def same_as(store: MemoryStore, place: WatchedPlace, tmp_path: Path, *wanted: str) -> None:
    """Published documents, and their pulled copies, equal the memory's exports byte for byte."""
    other = tmp_path / f"pulled-{newest_number(place)}"
    with MemoryStore.create(other, store.signature, codec="raw", selector=store.selector) as pulled:
        for name in wanted:
            document = pull_document(pulled, name, place.url)
            assert document.bytes == store.document(name).bytes
            for memory, file in ((store, "original"), (pulled, "copy")):
                export_document(memory, name, tmp_path / file)
            assert (tmp_path / "copy").read_bytes() == (tmp_path / "original").read_bytes()
            assert document.write == store.document(name).write
    report = verify_published(place.url)
    assert report.clean, report.problems


def copy_of(place: ObjectStore | WatchedPlace) -> WatchedPlace:
    """Another place with the same objects."""
    other = WatchedPlace(in_memory())
    for found in place.names(""):
        other.inner.put(found.name, bytes(place.get(found.name)))
    return other


def spoil(place: WatchedPlace, name: str, at: int) -> None:
    """Change a byte of an object."""
    data = bytearray(place.get(name))
    data[at] ^= 1
    place.inner.put(name, bytes(data))


def contents_of(place: ObjectStore | WatchedPlace, entry: Entry) -> Contents:
    """Where the parts of a published document are."""
    data = place.get_range(*entry.contents.extent)
    return read_contents(place, entry, data)  # type: ignore[arg-type]
