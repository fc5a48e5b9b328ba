"""Merging copies small segments into large ones: readers on either side answer alike, and pulled
documents are byte for byte what was published.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memstore.disk.format.document import Document
from memstore.disk.format.keys import number_key
from memstore.errors import BlocksUnavailable, CorruptMemory
from memstore.share.format.manifest import newest_number
from memstore.share.format.published import Published
from memstore.share.publish.garbage_collection import prune
from memstore.share.publish.merge import Merged, merge
from memstore.store.memory_store import MemoryStore
from support import passage_documents, synthetic_documents
from support.places import WatchedPlace, in_memory
from support.published import open_at, units_of
from support.publishing import copy_of, same_as, segments, send
from support.selected_documents import create as create_selected
from support.synthetic_documents import SIGNATURE

BUDGET = 1 << 20
TEXTS = {"a": (1, 203), "b": (2, 118), "c": (3, 64), "d": (4, 7)}


def create(path: Path, kind: str) -> MemoryStore:
    if kind == "passages":
        return create_selected(path, host_budget=BUDGET)
    return MemoryStore.create(path, SIGNATURE, host_budget=BUDGET)


def ingest(
    memory: MemoryStore, name: str, tokens: int, *, text: int, mode: str = "new"
) -> Document:
    """Ingest a text of about so many tokens, in the memory's kind."""
    if memory.selector is None:
        return synthetic_documents.ingest(memory, name, tokens, text=text, mode=mode)
    count = -(-tokens // 4)
    return passage_documents.ingest(memory, name, count, text=text, mode=mode)


@pytest.fixture(scope="module", params=["blocks", "passages"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, WatchedPlace]:
    """A memory, published document by document; one of them was appended to twice."""
    path, place = tmp_path_factory.mktemp("merge") / "memory", WatchedPlace(in_memory())
    with create(path, request.param) as memory:
        for name, (text, tokens) in TEXTS.items():
            ingest(memory, name, tokens if name != "a" else 160, text=text)
            send(memory, place, name)
        for tokens in (180, TEXTS["a"][1]):
            ingest(memory, "a", tokens, mode="append", text=1)
            send(memory, place, "a")
    return path, place


@pytest.fixture
def memory(made: tuple[Path, WatchedPlace], tmp_path: Path) -> Iterator[MemoryStore]:
    """A copy of the memory."""
    path = shutil.copytree(made[0], tmp_path / "memory")
    with MemoryStore.open(path, host_budget=BUDGET) as store:
        yield store


@pytest.fixture
def place(made: tuple[Path, WatchedPlace]) -> WatchedPlace:
    """A copy of the publication."""
    return copy_of(made[1])


def test_many_small_segments_become_few(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    assert len(segments(place)) == 6
    number = newest_number(place)
    merged = merge(place)
    assert merged[:4] == (number + 1, 4, 6, 1) and len(segments(place)) == 1
    (entry,) = Published.open(place).entries(["a"]).values()
    kinds = [(piece.kind, piece.part) for piece in entry.pieces if piece.kind != "records"]
    assert len(kinds) == len(set(kinds))  # what appends had added is one piece
    same_as(memory, place, tmp_path, *TEXTS)
    assert merge(place) == Merged(number + 1, 0, 1, 0, 0)  # nothing is left to do
    assert prune(place, grace=0).objects > 5
    (tmp_path / "pruned").mkdir()
    same_as(memory, place, tmp_path / "pruned", *TEXTS)
    ingest(memory, "a", 230, mode="append", text=1)  # and goes on from there
    report = send(memory, place, "a")
    assert report.documents == ["a"] and report.bytes < memory.document("a").bytes
    (tmp_path / "after").mkdir()
    same_as(memory, place, tmp_path / "after", *TEXTS)


def test_large_segments_stay_and_each_small_one_is_read_once(
    memory: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = WatchedPlace(in_memory())
    for name in TEXTS:
        send(memory, place, name, segment_bytes=8_000)
    before = {found.name: found.size for found in place.names("segments")}
    large = {name for name, size in before.items() if size >= 2_000}
    assert large and large != before.keys()
    monkeypatch.setattr("memstore.share.publish.merge._TOGETHER", sum(before.values()))
    place.calls.clear()
    merge(place, segment_bytes=8_000)
    read = [what for call, what in place.calls if call == "get" and what in before]
    assert sorted(read) == sorted(before.keys() - large)
    after = {found.name: found.size for found in place.names("segments")}
    assert large == segments(place) & before.keys()
    assert len(segments(place)) < len(before)
    assert max(after[name] for name in segments(place)) < 16_000
    same_as(memory, place, tmp_path, *TEXTS)


def read(store: MemoryStore, memory: MemoryStore) -> None:
    """All blocks are those of the memory."""
    for name in TEXTS:
        own, original = units_of(store, name), units_of(memory, name)
        for at in range(0, len(own), 16):
            with (
                store.lease(own[at : at + 16]) as lease,
                memory.lease(original[at : at + 16]) as right,
            ):
                assert lease.k[lease.slots].equal(right.k[right.slots])
                assert lease.v[lease.slots].equal(right.v[right.slots])


def idle_reader(place: WatchedPlace) -> MemoryStore:
    """A reader that has read the indexes of every document, and holds no block."""
    store = open_at(place, host_budget=4096)
    for name in TEXTS:
        with store.lease(units_of(store, name)[:1]):
            pass
    return store


def test_readers_on_either_side_answer_alike(memory: MemoryStore, place: WatchedPlace) -> None:
    with (
        open_at(place, host_budget=4096) as before,
        open_at(place, host_budget=4096) as idle,
        idle_reader(place) as overtaken,
    ):
        read(before, memory)
        merge(place)
        read(before, memory)
        before._on_disk().catalog.database.refresh()
        read(before, memory)
        prune(place, grace=0)
        read(before, memory)
        read(idle, memory)  # it looks again, since what it knows of is gone
        database = overtaken._on_disk().catalog.database

        def looked(number: int, name: str, what: object) -> None:
            place.before = lambda *_: None  # another thread, as the first read fails
            database.refresh()

        place.before = looked
        read(overtaken, memory)
    with open_at(place, host_budget=4096) as after:
        read(after, memory)


def test_an_idle_reader_finds_tokens_and_landmarks_again(
    memory: MemoryStore, place: WatchedPlace
) -> None:
    with open_at(place) as store:
        catalog = store._on_disk().catalog
        merge(place)
        prune(place, grace=0)
        with catalog.database.read() as txn:
            for table in ("tokens", "landmarks"):
                number = store.document("a").id
                found = list(txn.scan(table, number_key(number), number_key(number + 1)))
                assert found, table
        for name in TEXTS:
            assert [*store.tokens(name).ids] == [*memory.tokens(name).ids]


def test_blocks_that_an_append_replaced_and_pruning_removed_are_missing_not_damaged(
    memory: MemoryStore, place: WatchedPlace
) -> None:
    with idle_reader(place) as store:
        units, before = units_of(store, "a"), memory.document("a")
        ingest(memory, "a", 230, mode="append", text=1)
        after = memory.document("a")
        send(memory, place, "a")
        merge(place)
        prune(place, grace=0)
        source = store._on_disk().catalog.source
        size = len(units), 2, SIGNATURE.block_size, SIGNATURE.head_dim
        slab = torch.empty(size, dtype=getattr(torch, SIGNATURE.geometry.dtype))
        if memory.selector is not None:  # passages are where they were, or are there again
            assert len(source.read(units, slab, range(len(units)))) == len(units)
            return
        with pytest.raises(BlocksUnavailable) as failed:
            # as a batch that began before the manifest was read again
            source.read(units, slab, range(len(units)))
        again = {u for u in units if before.write_of(u.block) != after.write_of(u.block)}
        assert failed.value.units == again and len(again) < len(units)


@pytest.mark.parametrize("kind", ["records", "landmarks", "tokens"])
def test_damage_is_named_and_not_merged(place: WatchedPlace, kind: str) -> None:
    number = newest_number(place)
    (entry,) = Published.open(place).entries(["b"]).values()
    piece = next(piece for piece in entry.pieces if piece.kind == kind)
    data = bytearray(place.get(piece.segment))
    # records are before their index, which is the piece
    data[piece.offset - 1 if kind == "records" else piece.offset + piece.length - 1] ^= 1
    place.put(piece.segment, bytes(data))
    with pytest.raises(CorruptMemory, match=f"{kind} at byte .* are damaged"):
        merge(place)
    assert newest_number(place) == number
