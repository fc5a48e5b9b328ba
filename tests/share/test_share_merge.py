"""Small segments are written into few: readers on either side of it answer alike, what others
publish meanwhile is theirs, and what is pulled is what was published, byte for byte.
"""

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from memstore.disk.format.document import Document
from memstore.disk.format.keys import document_key
from memstore.errors import BlocksUnavailable, CorruptMemory, StoreUnavailable
from memstore.share.format.manifest import newest_number
from memstore.share.format.published import Published
from memstore.share.publish.garbage_collection import prune
from memstore.share.publish.merge import Merged, merge
from memstore.share.publish.publish import unpublish
from memstore.store.memory_store import MemoryStore
from support import passage_documents, synthetic_documents
from support.places import Killed, WatchedPlace, in_memory
from support.published import open_at, units_of
from support.publishing import before_the_manifest, names, same_as, send
from support.selected_documents import create as create_selected
from support.synthetic_documents import SIGNATURE

BUDGET = 1 << 20
TEXTS = {"a": (1, 203), "b": (2, 118), "c": (3, 64), "d": (4, 7)}


@pytest.fixture(scope="module", params=["blocks", "passages"])
def kind_of_text(request: pytest.FixtureRequest) -> str:
    return request.param


def create(path: Path, kind: str) -> MemoryStore:
    if kind == "passages":
        return create_selected(path, host_budget=BUDGET)
    return MemoryStore.create(path, SIGNATURE, host_budget=BUDGET)


@pytest.fixture
def empty(kind_of_text: str, tmp_path: Path) -> Iterator[MemoryStore]:
    with create(tmp_path / "memory", kind_of_text) as store:
        yield store


@pytest.fixture(scope="module")
def made(
    kind_of_text: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, bytes]]:
    """A memory, and objects: each document by a publication of its own, and one of them appended
    to twice.
    """
    path, place = tmp_path_factory.mktemp("merge") / "memory", WatchedPlace(in_memory())
    with create(path, kind_of_text) as memory:
        for name, (text, tokens) in TEXTS.items():
            ingest(memory, name, tokens if name != "a" else 160, text=text)
            send(memory, place, name)
        for tokens in (180, TEXTS["a"][1]):
            ingest(memory, "a", tokens, mode="append", text=1)
            send(memory, place, "a")
    return path, {found.name: bytes(place.inner.get(found.name)) for found in place.names("")}


@pytest.fixture
def memory(made: tuple[Path, dict[str, bytes]], tmp_path: Path) -> Iterator[MemoryStore]:
    """A copy of it, and `place` of where it was published."""
    path = shutil.copytree(made[0], tmp_path / "memory")
    with MemoryStore.open(path, host_budget=BUDGET) as store:
        yield store


@pytest.fixture
def place(made: tuple[Path, dict[str, bytes]]) -> WatchedPlace:
    place = WatchedPlace(in_memory())
    for name, data in made[1].items():
        place.inner.put(name, data)
    return place


def ingest(
    memory: MemoryStore, name: str, tokens: int, *, text: int, mode: str = "new"
) -> Document:
    """Read a text of about so many tokens, as the memory holds texts."""
    if memory.selector is None:
        return synthetic_documents.ingest(memory, name, tokens, text=text, mode=mode)
    count = -(-tokens // 4)
    return passage_documents.ingest(memory, name, count, text=text, mode=mode)


def segments(place: WatchedPlace) -> set[str]:
    return {p.segment for entry in Published.open(place).documents() for p in entry.pieces}


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


def test_large_segments_stay_where_they_are(empty: MemoryStore, tmp_path: Path) -> None:
    place = WatchedPlace(in_memory())
    for name, (text, tokens) in TEXTS.items():
        ingest(empty, name, tokens, text=text)
        send(empty, place, name, segment_bytes=8_000)
    before = {found.name: found.size for found in place.names("segments")}
    large = {name for name, size in before.items() if size >= 2_000}
    assert large and large != before.keys()
    merge(place, segment_bytes=8_000)
    after = {found.name: found.size for found in place.names("segments")}
    assert large == segments(place) & before.keys()
    assert len(segments(place)) < len(before)
    assert max(after[name] for name in segments(place)) < 16_000
    same_as(empty, place, tmp_path, *TEXTS)


def test_readers_on_either_side_answer_alike(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    with open_at(place, host_budget=4096) as before, open_at(place, host_budget=4096) as idle:
        read(before, memory)
        merge(place)
        read(before, memory)
        before._on_disk().catalog.database.refresh()
        read(before, memory)
        prune(place, grace=0)
        read(before, memory)
        read(idle, memory)  # it looks again, since what it knows of is gone
    with open_at(place, host_budget=4096) as after:
        read(after, memory)


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


def test_a_segment_of_many_documents_is_read_once(
    empty: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = WatchedPlace(in_memory())
    for name, (text, tokens) in TEXTS.items():
        ingest(empty, name, tokens, text=text)
    send(empty, place, "a", "b", "c")
    send(empty, place, "d")
    size = sum(found.size for found in place.names("segments"))
    monkeypatch.setattr("memstore.share.publish.merge._TOGETHER", size)
    place.calls.clear()
    assert merge(place).before == 2
    read = [what for name, what in place.calls if name == "get" and "segments/" in what]
    assert len(read) == len(set(read)) == 2


def idle_reader(place: WatchedPlace, **options: float) -> MemoryStore:
    """It has seen the indexes of every document, and holds no block."""
    store = open_at(place, host_budget=4096, **options)
    for name in TEXTS:
        with store.lease(units_of(store, name)[:1]):
            pass
    return store


def test_what_another_thread_has_looked_for_is_read_again(
    memory: MemoryStore, place: WatchedPlace
) -> None:
    with idle_reader(place) as store:
        merge(place)
        prune(place, grace=0)
        database = store._on_disk().catalog.database

        def looked(number: int, name: str, what: object) -> None:
            place.before = lambda *_: None  # the first read of what is gone
            database.refresh()

        place.before = looked
        read(store, memory)


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
                found = list(txn.scan(table, document_key(number), document_key(number + 1)))
                assert found, table
        for name in TEXTS:
            assert [*store.tokens(name).ids] == [*memory.tokens(name).ids]


def test_what_was_appended_to_and_pruned_is_missing_not_damaged(
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
        if memory.selector is not None:  # passages are where they were, or stand there again
            assert len(source.read(units, slab, range(len(units)))) == len(units)
            return
        with pytest.raises(BlocksUnavailable) as failed:
            # as a batch that was begun before the manifest was read again
            source.read(units, slab, range(len(units)))
        anew = {u for u in units if before.write_of(u.block) != after.write_of(u.block)}
        assert failed.value.units == anew and len(anew) < len(units)


def test_what_others_publish_meanwhile_is_theirs(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:

    def others(number: int, name: str, what: object) -> None:
        if name == "create":  # the merge's manifest is about to be written
            place.before = lambda *_: None
            ingest(memory, "b", 130, mode="append", text=2)
            send(memory, place, "b")
            unpublish(place, ["c"])  # type: ignore[arg-type]

    place.before = others
    assert merge(place).documents == 2
    assert names(place) == ["a", "b", "d"]
    same_as(memory, place, tmp_path, "a", "b", "d")
    prune(place, grace=0)
    (tmp_path / "again").mkdir()
    same_as(memory, place, tmp_path / "again", "a", "b", "d")


def test_a_publisher_that_a_merge_overtakes_tries_again(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:

    def merging(number: int, name: str, what: object) -> None:
        if name == "create":
            place.before = lambda *_: None
            merge(place)
            prune(place, grace=0)

    ingest(memory, "a", 230, mode="append", text=1)
    place.before = merging
    assert send(memory, place, "a").documents == ["a"]
    same_as(memory, place, tmp_path, *TEXTS)


def test_a_merge_that_is_stopped_changes_nothing_and_goes_on(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    number, held = newest_number(place), segments(place)
    for at in count():
        place.calls.clear()

        def stop(number: int, name: str, what: object, at: int = at) -> None:
            if number == at:
                raise Killed

        place.before = stop
        try:
            merged = merge(place)
            break
        except Killed:
            assert newest_number(place) == number and segments(place) == held
    place.before = lambda *_: None
    assert at > 10 and merged.number == number + 1 and merged.after == 0  # its segment was there
    same_as(memory, place, tmp_path, *TEXTS)


def test_a_merge_that_is_pruned_before_its_manifest_is_written_changes_nothing(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    number = newest_number(place)
    before_the_manifest(place, lambda: prune(place.inner, grace=-10))
    with pytest.raises(StoreUnavailable, match="merge again"):
        merge(place)
    assert newest_number(place) == number
    assert merge(place).after == 1
    same_as(memory, place, tmp_path, *TEXTS)


@pytest.mark.parametrize("kind", ["records", "landmarks", "tokens"])
def test_what_is_damaged_is_named_and_not_merged(
    memory: MemoryStore, place: WatchedPlace, kind: str
) -> None:
    number = newest_number(place)
    (entry,) = Published.open(place).entries(["b"]).values()
    piece = next(piece for piece in entry.pieces if piece.kind == kind)
    data = bytearray(place.get(piece.segment))
    # records stand before their index, which is the piece
    data[piece.offset - 1 if kind == "records" else piece.offset + piece.length - 1] ^= 1
    place.delete([piece.segment])
    place.put(piece.segment, bytes(data))
    with pytest.raises(CorruptMemory, match=f"{kind} at byte .* are damaged"):
        merge(place)
    assert newest_number(place) == number
