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
from memstore.share import packed_objects as packed
from memstore.share.manifest import MAGIC, manifest_name, read_manifest, read_newest
from memstore.share.pieces import (
    Piece,
    RecordIndex,
    Value,
    decode_table,
    decode_values,
    encode_values,
)
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import PublishedDocument
from memstore.store.verify_published import verify_published
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
        PublishedDocument.named(self.place, read_manifest(self.place, 1), name).export(file)
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
def test_a_crafted_manifest_gives_a_clear_error_or_a_document(
    publication: Publication, data: st.DataObject
) -> None:
    """A value anywhere in it is another, or documents have each other's pieces, and its checksum is
    right.
    """
    place, name = publication.place, manifest_name(1)
    values = msgpack.unpackb(packed.decompressed(bytes(place.get(name))[16:-8]))
    swapped = data.draw(st.booleans())
    if swapped:
        one, other = values["documents"]
        one[1], other[1] = other[1], one[1]
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


def test_a_table_that_readers_would_refuse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PACKED_BYTES", 1000)
    with pytest.raises(InvalidInput, match="another prefix"):
        packed.pack(MAGIC, os.urandom(1000))


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
        place.put(manifest_name(1), packed.pack(MAGIC, {"a": 1}, number=packed.FORMAT + by))
        for use in (lambda: read_newest(place), lambda: store.publish(place.url)):
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
    rows = draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    if draw(st.booleans()):
        layers = sorted({*layers})
    sizes = draw(st.lists(st.integers(0, 9999), min_size=16, max_size=16))
    return RecordIndex(
        draw(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=4)),
        draw(st.integers(0, 1 << 20)),
        layers,
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
        piece = Piece("records", 0, found.first, found.rows, 0, "x", 10 + found.bytes, 1, 0)
        blocks = range(found.first, found.first + found.rows)
        extents = [found.find(piece, layer, block) for block in blocks for layer in found.layers]
        at = 10
        for extent in filter(None, extents):  # consecutive, and nothing between
            assert extent.offset == at
            at += extent.length
        assert at == piece.offset and found.find(piece, 1 << 20, blocks[0]) is None
        assert found.find(piece, 0, blocks.stop) is None
        if crafted == raw:
            assert found.encode() == index.encode()
