"""Damaged or crafted objects of a publication: reading gives a clear error or the right value.

MEMSTORE_PUBLISHED_HOSTILE sets the number of examples.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.disk.format.document import Document
from memstore.errors import CorruptMemory, InvalidInput, MemstoreError, NewerFormat, OlderFormat
from memstore.share import manifest as packed
from memstore.share.contents import Contents
from memstore.share.document_file import write_document
from memstore.share.manifest import MAGIC, manifest_name, read_manifest, read_newest
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import PublishedDocument, export_document, publish_memory
from memstore.store.verify import verify_published
from support.crafted import WRONG, changed, damaged, places
from support.places import WatchedPlace, in_memory
from support.publishing import KINDS, copy_of, send
from support.synthetic_documents import SIGNATURE, ingest

EXAMPLES = int(os.environ.get("MEMSTORE_PUBLISHED_HOSTILE", "25"))
fuzzed = settings(max_examples=EXAMPLES, derandomize="MEMSTORE_PUBLISHED_HOSTILE" not in os.environ)


@dataclass
class Publication:
    """Documents "a" and "b", published; "a" has changed since."""

    store: MemoryStore
    place: WatchedPlace
    folder: Path
    objects: dict[str, bytes]
    right: dict[str, bytes]  # exported documents

    def read(self, name: str) -> bytes:
        """Reads a published document from the objects that are there now."""
        file = self.folder / "out"
        found = PublishedDocument.named(self.place, read_manifest(self.place, 1), name)
        write_document(found.head, found.parts(), file)
        return file.read_bytes()

    def restore(self) -> None:
        for name, data in self.objects.items():
            self.place.inner.put(name, data)


@pytest.fixture(scope="module", params=KINDS)
def publication(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Publication]:
    folder = tmp_path_factory.mktemp("published")
    create, ingest = KINDS[request.param]
    with create(folder / "memory") as store:
        ingest(store, "a", 70)
        ingest(store, "b", 30, text=2)
        place = WatchedPlace(in_memory())
        send(store, place, segment_bytes=8000)
        for name in "ab":
            export_document(store, name, folder / name)
        store.describe("a", {"author": "x"})
        objects = {found.name: bytes(place.get(found.name)) for found in place.names("")}
        right = {name: (folder / name).read_bytes() for name in "ab"}
        yield Publication(store, place, folder, objects, right)


@fuzzed
@given(data=st.data())
def test_a_damaged_object_is_named_and_never_read_as_another(
    publication: Publication, data: st.DataObject
) -> None:
    place, objects = publication.place, publication.objects
    victim = data.draw(st.sampled_from(sorted(objects)))
    bad = data.draw(damaged(objects[victim]))
    place.inner.put(victim, bad)
    try:
        for name, right in publication.right.items():
            with one_line():
                assert publication.read(name) == right
        with suppress(CorruptMemory):  # of the manifest
            if verify_published(place.url).clean:
                assert all(publication.read(name) == publication.right[name] for name in "ab")
        with one_line():  # a publisher that uses what is there
            send(publication.store, copy_of(place), "a", replace=True)
    finally:
        publication.restore()
    assert verify_published(place.url).clean


class one_line(suppress):
    """The block may raise an error of memstore, of one line."""

    def __init__(self) -> None:
        super().__init__(MemstoreError)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert error is None or not isinstance(error, MemstoreError) or "\n" not in str(error)
        return super().__exit__(kind, error, trace)


@fuzzed
@given(data=st.data())
def test_a_crafted_manifest_gives_a_clear_error_or_a_document(
    publication: Publication, data: st.DataObject
) -> None:
    """A value anywhere in it is another, or documents have each other's contents, and its checksum
    is right.
    """
    place, name = publication.place, manifest_name(1)
    values = msgpack.unpackb(zstandard.decompress(place.get(name)[16:-8]))
    swapped = data.draw(st.booleans())
    if swapped:
        one, other = values["documents"]
        one[1:], other[1:] = other[1:], one[1:]
    else:
        way = data.draw(st.sampled_from([*places(values)][1:]))
        values = changed(values, way, data.draw(st.sampled_from(WRONG)))
    try:
        with suppress(ValueError, OverflowError, RecursionError):  # msgpack holds no such value
            place.put(name, packed.pack(MAGIC, values))
        for document, right in publication.right.items():
            with one_line():
                found = publication.read(document)
                assert not swapped or found == right
        with one_line():
            verify_published(place.url)
    finally:
        publication.restore()


def test_a_row_that_contradicts_itself_is_reported_as_damage(publication: Publication) -> None:
    place, name = publication.place, manifest_name(1)
    values = msgpack.unpackb(zstandard.decompress(place.get(name)[16:-8]))
    values["documents"][0][0]["tokens"] += 1000
    try:
        place.put(name, packed.pack(MAGIC, values))
        with pytest.raises(CorruptMemory, match="document 'a'"):
            publication.read("a")
        assert not verify_published(place.url).clean
    finally:
        publication.restore()


def test_a_table_too_large_for_readers_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "OBJECT_BYTES", 1000)
    with pytest.raises(InvalidInput, match="another prefix"):
        packed.pack(MAGIC, os.urandom(1000))


@pytest.mark.parametrize(
    "by, error, words", [(1, NewerFormat, "update memstore"), (-1, OlderFormat, "older version")]
)
def test_a_publication_of_another_format_is_refused(
    by: int, error: type[MemstoreError], words: str, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 20)
        send(store, place)
        place.put(manifest_name(1), packed.pack(MAGIC, {"a": 1}, number=packed.FORMAT + by))
        for use in (lambda: read_newest(place), lambda: publish_memory(store, place.url)):
            with pytest.raises(error, match=words):
                use()


# Contents


@st.composite
def contents(draw: st.DrawFn) -> list[Any]:
    """The values of the contents of a document of three blocks, which may be wrong."""
    layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    numbers = st.lists(st.integers(-1, 3), min_size=9 * len(layers), max_size=9 * len(layers))
    value = st.tuples(
        st.sampled_from(["tokens", "landmarks"]), st.integers(0, 3), st.integers(0, 9)
    )
    place = st.tuples(st.just("x"), st.integers(-1, 99), st.integers(-1, 99), st.integers(0, 9))
    records = np.array(draw(numbers), "<i8").tobytes()
    names = draw(st.lists(st.sampled_from(["", "y"]), max_size=2))
    return [draw(st.lists(st.tuples(value, place), max_size=3)), b"", layers, names, records]


@fuzzed
@given(values=contents(), data=st.data())
def test_crafted_contents_are_refused_or_locate_records(
    values: list[Any], data: st.DataObject
) -> None:
    raw = msgpack.packb(values, default=list)
    row = Document(1, "a", "ready", 12, 3)
    for crafted in (raw, data.draw(damaged(raw)), data.draw(st.binary(max_size=99))):
        try:
            found = Contents.decode(zstandard.compress(crafted), row, "own")
        except ValueError:
            continue
        for block, layer in product(range(4), range(11)):
            extent = found.record(block, layer)
            assert extent is None or (extent.name in ("own", "y") and min(extent[1:]) >= 0)
            assert extent is None or (block < 3 and layer in found.layers)


def test_many_names_packed_in_few_bytes_are_refused_before_memory_is_allocated() -> None:
    names = b"\xdd" + (200 << 20).to_bytes(4, "big") + bytes([0xA0]) * (200 << 20)
    crafted = b"\x95\x90\xc4\x00\x91\x00" + names + b"\xc4\x48" + bytes(72)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="length"):
        Contents.decode(zstandard.compress(crafted), Document(1, "a", "ready", 12, 3), "own")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1 << 20  # KiB


def test_contents_too_large_for_readers_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 200)
        monkeypatch.setattr("memstore.share.contents.OBJECT_BYTES", 100)
        with pytest.raises(InvalidInput, match="'a' is too large"):
            publish_memory(store, in_memory().url)
        with pytest.raises(InvalidInput, match="'a' is too large"):
            export_document(store, "a", tmp_path / "a")
        assert not (tmp_path / "a").exists()
