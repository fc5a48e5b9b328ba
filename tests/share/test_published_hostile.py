"""What lies in an object store may be damaged, truncated, or of somebody who means harm: readers
meet a named error, or what was published, never anything else.
"""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest

from memstore.errors import CorruptMemory, MemstoreError, NewerFormat, OlderFormat
from memstore.share.format import document_pages as pages
from memstore.share.format import manifest
from memstore.share.format import packed_objects as packed
from memstore.share.format.published import Published
from memstore.share.format.read_pieces import Indexes
from memstore.share.format.segments import read_footer
from memstore.share.objects.object_store import ObjectStore
from memstore.share.publish.publish import PublishOptions, publish
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer.published_document import write_published
from memstore.store.verify.verify_memory import verify_published
from support.damaged_bytes import damaged
from support.places import WatchedPlace, in_memory
from support.selected_documents import create as create_selected
from support.selected_documents import ingest as ingest_selected
from support.synthetic_documents import SIGNATURE, ingest

RUNS = int(os.environ.get("MEMSTORE_PUBLISHED_HOSTILE", "120"))


def published(store: MemoryStore) -> WatchedPlace:
    place = in_memory()
    publish(store._on_disk().catalog, store.ready(), place, PublishOptions(segment_bytes=8000))
    return WatchedPlace(place)


@pytest.mark.parametrize("selected", [False, True])
def test_damaged_objects_are_named_and_never_read_as_another(
    selected: bool, tmp_path: Path
) -> None:
    make = create_selected if selected else lambda path: MemoryStore.create(path, SIGNATURE)
    with make(tmp_path / "memory") as store:
        (ingest_selected if selected else ingest)(store, "a", 90)
        (ingest_selected if selected else ingest)(store, "b", 30, text=2)
        place = published(store)
        for name in "ab":
            store.export_document(name, tmp_path / name)
    right = {name: (tmp_path / name).read_bytes() for name in "ab"}
    objects = {found.name: bytes(place.get(found.name)) for found in place.names("")}
    footers = {name: read_footer(place, name, len(data)) for name, data in objects.items()
               if name.startswith("segments")}  # fmt: skip
    errors = same = 0
    source = random.Random(7)
    for _ in range(RUNS // 2):
        victim = source.choice(sorted(objects))
        bad = damaged(objects[victim], source)
        place.inner.put(victim, bad)
        for name in "ab":
            try:
                write_published(Published.open(place), name, tmp_path / "out")
                assert (tmp_path / "out").read_bytes() == right[name]
                same += 1
            except MemstoreError as error:
                assert "\n" not in str(error)
                errors += 1
        if victim in footers:
            with suppress(MemstoreError):
                assert read_footer(place, victim, len(bad)) == footers[victim]
        if bad != objects[victim]:
            with suppress(CorruptMemory):  # of its manifest
                assert not verify_published(place.url).clean
        place.inner.put(victim, objects[victim])
    assert errors > RUNS / 8 and same > RUNS / 16
    assert verify_published(place.url).clean


@pytest.mark.parametrize("kind", ["records", "landmarks", "tokens"])
def test_another_documents_pieces_are_refused(kind: str, tmp_path: Path) -> None:
    """Whole, and with right checksums, in the place of a document's own."""
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 90)
        ingest(store, "b", 90, text=2)
        place = published(store)
    reader = Published.open(place)
    mine, theirs = ([p for p in e.pieces if p.kind == kind] for e in reader.documents())
    pieces = dict(zip(mine, (piece._replace(first=own.first) for own, piece in zip(mine, theirs))))

    def swap(values: dict[str, Any]) -> None:
        (page,) = values["pages"]
        data = bytes(place.get(page[2]))
        segments, ((row, own), other) = msgpack.unpackb(packed.decompressed(data[16:-8]))
        changed = []
        for piece in reader.documents()[0].pieces:
            piece = pieces.get(piece, piece)
            if kind != "records" and piece in pieces.values():  # as an attacker who has no other
                piece = piece._replace(digest=mine[0].digest)
            changed.append((*piece[:5], segments.index(piece.segment), *piece[6:]))
        assert changed != [tuple(piece) for piece in own]
        new = packed.pack(b"mRpage\0\0", pages.FORMAT, (segments, ((row, changed), other)))
        place.put(page[2], new)
        values["pages"] = [[*page[:3], len(new), packed.digest_of(new)]]

    altered(place.inner, swap)
    with pytest.raises(CorruptMemory, match="another write" if kind == "records" else "checksum"):
        write_published(Published.open(place), "a", tmp_path / "out")
    assert [problem.name for problem in verify_published(place.url).problems][:1] == ["a"]


def test_an_index_that_leads_to_another_record_leads_nowhere(tmp_path: Path) -> None:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 60)
        place = published(store)
    (entry,) = Published.open(place).documents()
    indexes = Indexes(place)
    assert indexes.find(entry, [(7, 0), (1, 999)]) == [None, None]
    there = indexes.find(entry, [(1, 0), (2, 14), (0, 0)])
    assert there[0] and there[1] and not there[2]  # layer 0 has no memory: its latest blocks alone


def altered(place: ObjectStore, change: Callable[[dict[str, Any]], None]) -> None:
    """Publish a manifest that has right checksums and says something else."""
    name = manifest.manifest_name(1)
    data = bytes(place.get(name))
    values = msgpack.unpackb(packed.decompressed(data[16:-8]))
    change(values)
    place.put(name, packed.pack(b"mRmanife", manifest.FORMAT, values))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", 7), ("number", -1), ("id", b"short"), ("published", float("nan")),
        ("signature", {}), ("signature", None), ("codec", 5), ("selector", {"name": "x"}),
        ("pages", [["a", 1, "pages/none", 5, 5]]), ("pages", [[]]), ("pages", None),
        ("anything", 1),
    ],
)  # fmt: skip
def test_a_manifest_with_right_checksums_is_checked_as_well(
    field: str, value: object, tmp_path: Path
) -> None:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 20)
        place = published(store)
    altered(place.inner, lambda values: values.update({field: value}))
    with pytest.raises(MemstoreError) as caught:
        write_published(Published.open(place), "a", tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "by, error, words", [(1, NewerFormat, "update memstore"), (-1, OlderFormat, "older version")]
)
def test_another_format_says_so(
    by: int, error: type[MemstoreError], words: str, tmp_path: Path
) -> None:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        ingest(store, "a", 20)
        place = published(store)
        name = manifest.manifest_name(1)
        place.put(name, packed.pack(b"mRmanife", manifest.FORMAT + by, {"anything": 1}))
        for use in (lambda: Published.open(place), lambda: store.publish(place.url)):
            with pytest.raises(error, match=words):
                use()
