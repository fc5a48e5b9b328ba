"""Objects of a publication may be damaged, or crafted by an attacker: reading gives a clear error
or the right value. MEMSTORE_PUBLISHED_HOSTILE sets the number of examples.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.errors import CorruptMemory, InvalidInput, MemstoreError, NewerFormat, OlderFormat
from memstore.share import manifest
from memstore.share import packed_objects as packed
from memstore.share.pieces import RecordIndex, Value, decode_table, decode_values, encode_values
from memstore.share.published import Published
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import PublishedDocument
from memstore.store.verify.verify_published import verify_published
from support import passage_documents, synthetic_documents
from support.crafted import WRONG, changed, places
from support.damaged_bytes import damaged
from support.places import WatchedPlace, in_memory
from support.publishing import copy_of, send
from support.selected_documents import create as create_selected
from support.selected_documents import ingest as ingest_selected
from support.synthetic_documents import SIGNATURE, ingest

EXAMPLES = int(os.environ.get("MEMSTORE_PUBLISHED_HOSTILE", "25"))
fuzzed = settings(max_examples=EXAMPLES, derandomize="MEMSTORE_PUBLISHED_HOSTILE" not in os.environ)
MANIFEST, PAGE = b"mRmanife", b"mRpage\0\0"


@dataclass
class Publication:
    """Documents "a" and "b", published; "a" has changed since."""

    store: MemoryStore
    place: WatchedPlace
    folder: Path
    objects: dict[str, bytes]
    right: dict[str, bytes]  # exported documents

    def read(self, name: str) -> bytes:
        """A document as it is published, by whatever the objects are now."""
        file = self.folder / "out"
        PublishedDocument.named(Published.at(self.place, 1), name).export(file)
        return file.read_bytes()

    def restore(self) -> None:
        for name, data in self.objects.items():
            self.place.inner.put(name, data)


KINDS: dict[str, tuple[Callable[[Path], MemoryStore], Callable[..., object]]] = {
    "blocks": (lambda path: MemoryStore.create(path, SIGNATURE), synthetic_documents.ingest),
    "selector": (create_selected, ingest_selected),
    "passages": (create_selected, passage_documents.ingest),
}


@pytest.fixture(scope="module", params=list(KINDS))
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
            store.export_document(name, folder / name)
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
def test_a_crafted_manifest_or_page_gives_a_clear_error_or_a_document(
    publication: Publication, data: st.DataObject
) -> None:
    """A value anywhere in it is another, and all checksums are right."""
    place = publication.place
    values = unpacked(place, manifest.manifest_name(1))
    wrong, swapped = data.draw(st.sampled_from(WRONG)), False
    if data.draw(st.booleans()):
        way = data.draw(st.sampled_from([*places(values)][1:]))
        values = changed(values, way, wrong)
    else:
        (page,) = values["pages"]
        table = unpacked(place, page[2])
        swapped = data.draw(st.booleans())
        if swapped:  # each document has the other's pieces
            table[1][0][1], table[1][1][1] = table[1][1][1], table[1][0][1]
        else:
            way = data.draw(st.sampled_from([*places(table)][1:]))
            table = changed(table, way, wrong)
        with suppress(ValueError, OverflowError):
            put_page(place, values, table)
    try:
        with suppress(ValueError, OverflowError):  # msgpack holds no such value
            place.put(manifest.manifest_name(1), packed.pack(MANIFEST, values))
        for name, right in publication.right.items():
            with one_line():
                found = publication.read(name)
                assert not swapped or found == right
        with one_line():
            verify_published(place.url)
    finally:
        publication.restore()


def unpacked(place: WatchedPlace, name: str) -> Any:
    return msgpack.unpackb(packed.decompressed(bytes(place.get(name))[16:-8]))


def put_page(place: WatchedPlace, values: dict[str, Any], table: Any) -> None:
    """Write the only page, and have the manifest's values name it."""
    (page,) = values["pages"]
    data = packed.pack(PAGE, table)
    place.inner.put(page[2], data)
    values["pages"] = [[*page[:3], len(data), packed.digest_of(data)]]


def test_an_older_page_is_refused(tmp_path: Path) -> None:
    """It has right checksums, and is not the one that the manifest names."""
    place = WatchedPlace(in_memory())
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 90)
        send(store, place)
        store.describe("a", {"author": "x"})
        send(store, place)
    old, new = (Published.at(place, number).manifest.pages[0] for number in (1, 2))
    place.inner.put(new.name, bytes(place.get(old.name)))
    with pytest.raises(CorruptMemory, match="another page than the manifest names"):
        Published.at(place, 2).documents()


def test_a_table_that_readers_would_refuse_is_not_written() -> None:
    with pytest.raises(InvalidInput, match="another prefix"):
        packed.pack(PAGE, os.urandom(packed.PACKED_BYTES))


@pytest.mark.parametrize(
    "by, error, words", [(1, NewerFormat, "update memstore"), (-1, OlderFormat, "older version")]
)
def test_another_format_is_named(
    by: int, error: type[MemstoreError], words: str, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 20)
        send(store, place)
        name = manifest.manifest_name(1)
        place.put(name, packed.pack(MANIFEST, {"anything": 1}, number=packed.FORMAT + by))
        for use in (lambda: Published.open(place), lambda: store.publish(place.url)):
            with pytest.raises(error, match=words):
                use()


# Pieces

values = st.lists(
    st.builds(Value, st.integers(0, 1 << 40), st.binary(max_size=80)),
    min_size=1,
    max_size=8,
    unique_by=lambda value: value.first,
)


@fuzzed
@given(some=values, data=st.data())
def test_a_piece_of_values_reads_back_or_is_refused(some: list[Value], data: st.DataObject) -> None:
    piece = encode_values(some)
    assert decode_values(piece, len(some)) == some
    table = decode_table(piece, len(some))
    bad = data.draw(damaged(piece))
    with suppress(ValueError):
        assert decode_table(bad, len(some)) == table
    with suppress(ValueError):  # the checksum of the whole piece is the manifest's
        assert [one.first for one in decode_values(bad, len(some))] == [one.first for one in some]


@st.composite
def indexes(draw: st.DrawFn) -> RecordIndex:
    """An index, which may be of too many or too few writes, or of layers in another order."""
    rows, layers = draw(st.integers(1, 4)), draw(st.lists(st.integers(0, 9), max_size=4))
    if draw(st.booleans()):
        layers = sorted({*layers})
    sizes = draw(st.lists(st.integers(0, 9999), min_size=16, max_size=16))
    return RecordIndex(
        draw(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=4)),
        draw(st.integers(0, 1 << 20)),
        layers,
        draw(st.integers(0, 1 << 40)),
        np.array(sizes, dtype=np.uint32)[: rows * len(layers)].reshape(rows, len(layers)),
    )


@fuzzed
@given(index=indexes(), data=st.data())
def test_an_index_of_records_reads_back_or_is_refused(
    index: RecordIndex, data: st.DataObject
) -> None:
    raw = zstandard.decompress(index.encode())
    right = len(index.writes) in (1, index.rows) and [*index.layers] == sorted({*index.layers})
    for crafted in (raw, data.draw(damaged(raw)), data.draw(st.binary(max_size=99))):
        try:
            found = RecordIndex.decode(zstandard.compress(crafted))
        except ValueError:
            assert crafted != raw or not right
            continue
        assert len(found.writes) in (1, found.rows)
        assert [*found.layers] == sorted({*found.layers})
        extents = [found.find(layer, row) for row in range(found.rows) for layer in found.layers]
        at = found.start
        for extent in filter(None, extents):  # consecutive, and nothing between
            assert extent[0] == at
            at += extent[1]
        assert at == found.end and found.find(1 << 20, 0) is found.find(0, found.rows) is None
        if crafted == raw:
            assert found.encode() == index.encode()
