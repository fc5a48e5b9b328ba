"""Passages are published once, by what they say: what a former version or another document sent is
not sent again, however documents change, are merged, taken out and pruned.
"""

import os
import random
from collections.abc import Iterator, Sequence
from itertools import count, product
from pathlib import Path

import pytest
import torch

from memstore.block import BlockKey
from memstore.disk.format.document import Document
from memstore.disk.format.text_parts import Passage
from memstore.errors import (
    CorruptBlock,
    DocumentNotFound,
    InvalidInput,
    MemstoreError,
    MissingBlock,
)
from memstore.share.format.pieces import RecordIndex, record_pieces
from memstore.share.format.published import Published
from memstore.share.format.segments import read_footer
from memstore.share.objects.object_store import ObjectStore
from memstore.share.publish.garbage_collection import prune
from memstore.share.publish.merge import merge
from memstore.share.publish.publish import unpublish
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer.published_document import write_published
from memstore.store.verify.verify_memory import verify_published
from support.damaged_bytes import damaged
from support.passage_documents import LAYERS, SETTINGS, content, ingest, landmarks, passage, tail_of
from support.passage_documents import kept as kept_of
from support.places import Killed, WatchedPlace, in_memory
from support.published import open_at
from support.publishing import names, same_as, send, spoil
from support.selected_documents import create, words

COUNT = 60
RUNS = int(os.environ.get("MEMSTORE_PUBLISHED_RANDOM", "4"))
STEPS = 14
AT_ONCE = 8  # blocks of two heads, which the smallest budget here has room for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    with create(tmp_path / "memory", codec="raw") as memory:
        yield memory


def write(
    store: MemoryStore, name: str, made_of: Sequence[tuple[int, int]], *, keep: str = "kv"
) -> Document:
    """A document of these passages (text, block), in the place of what has its name."""
    some, at = list[Passage](), 0
    for text, block in made_of:
        one = passage(text, block)
        some.append(Passage(one.ids, one.lead, " ", at + 1, one.characters))
        at = some[-1].end
    mode = "replace" if store.has(name) else "new"
    writer = store.write_document(name, source_hash=repr(made_of), settings=SETTINGS, mode=mode)
    if writer is None:
        return store.document(name)
    given = list(range(len(some))) if keep == "kv" else []
    with writer:
        writer.add_passages(
            some,
            [one for t, b in made_of for one in kept_of(t, b, b + 1)] if given else [],
            given=given,
            landmarks=torch.cat([landmarks(t, b, b + 1) for t, b in made_of]),
            words=[word for t, b in made_of for word in words(t, b, b + 1)],
        )
        return writer.finish("\n")


def records_of(place: WatchedPlace) -> int:
    """Bytes of all records that lie in segments, whoever names them."""
    size = 0
    for found in place.names("segments"):
        _, pieces = read_footer(place, found.name, found.size)
        for piece in pieces:
            if piece.kind == "records":
                (data,) = place.get_ranges(found.name, [(piece.offset, piece.length)])
                index = RecordIndex.decode(data)
                size += index.end - index.start
    return size


def bytes_of(store: MemoryStore, made_of: Sequence[tuple[int, int]]) -> int:
    """Bytes of the records of passages, which the memory holds."""
    catalog = store._on_disk().catalog
    with catalog.database.read() as txn:
        digests = catalog.digests(
            next(row for row in store.documents()), [passage(t, b) for t, b in {*made_of}]
        )
        return sum(catalog.passages.find(txn, digest).bytes for digest in digests)


def read(store: MemoryStore, name: str, made_of: Sequence[tuple[int, int]]) -> int:
    """All keys and values that are there of a document's passages are what they should be; how many
    have none.
    """
    document = store.document(name)
    assert [tuple(p.ids) for p in store.passages(name)] == [
        tuple(passage(t, b).ids) for t, b in made_of
    ]
    places = store.retrieval.stored_at([(document.id, block) for block in range(document.blocks)])
    there = [(block, place) for block, place in enumerate(places) if place is not None]
    for layer, first in product(LAYERS, range(0, len(there), AT_ONCE)):
        some = there[first : first + AT_ONCE]
        units = [BlockKey(key, layer, at, head) for _, (key, at) in some for head in range(2)]
        with store.lease(units) as lease:
            slots = torch.as_tensor(lease.slots).reshape(-1, 2)
            for (block, _), pair in zip(some, slots, strict=True):
                for found, wanted in zip((lease.k, lease.v), content(*of(made_of, layer, block))):
                    assert torch.equal(found[pair], wanted), (name, block)
    return len(places) - len(there)


def of(made_of: Sequence[tuple[int, int]], layer: int, block: int) -> tuple[int, int, int]:
    text, number = made_of[block]
    return text, layer, number


def book(text: int, first: int = 0, end: int = COUNT) -> list[tuple[int, int]]:
    return [(text, block) for block in range(first, end)]


def edited(made_of: Sequence[tuple[int, int]], at: int, by: int) -> list[tuple[int, int]]:
    return [*made_of[:at], (by, at), *made_of[at + 1 :]]


def test_the_same_text_under_two_names_is_sent_once(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    write(store, "b", book(1))
    send(store, place)
    assert records_of(place) == bytes_of(store, book(1))
    same_as(store, place, tmp_path, "a", "b")
    with open_at(place, host_budget=1 << 20) as reader:
        assert read(reader, "a", book(1)) == read(reader, "b", book(1)) == 0


def test_a_copy_of_what_is_published_sends_no_records(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    send(store, place)
    write(store, "b", [*book(1, 30), *book(1, 0, 30)])
    report = send(store, place)  # "a" is one of the documents, and as it was
    assert (report.documents, report.there) == (["b"], ["a"])
    assert records_of(place) == bytes_of(store, book(1))
    same_as(store, place, tmp_path, "a", "b")


def test_an_edited_document_of_many_sends_what_changed(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    for text in range(1, 6):
        write(store, f"text {text}", book(text))
    send(store, place)
    before, place.sent = records_of(place), 0
    changed = [(9, 0), *edited(book(3), 20, 9), (9, 1)]
    write(store, "text 3", changed)
    report = send(store, place, replace=True)
    assert report.documents == ["text 3"]
    new = bytes_of(store, [(9, 0), (9, 20), (9, 1)])
    assert records_of(place) - before == new
    (document,) = [row for row in store.documents() if row.name == "text 3"]
    beside = sum(
        piece.length
        for entry in Published.open(place).documents()
        for piece in entry.pieces
        if entry.row.name == "text 3" and piece.kind != "records"
    )
    assert place.sent < new + beside + 4000  # a page, a manifest, an index, a footer
    same_as(store, place, tmp_path, *(f"text {text}" for text in range(1, 6)))
    with open_at(place, host_budget=1 << 20) as reader:
        assert read(reader, "text 3", changed) == 0
    assert place.sent < document.bytes / 2


def test_what_moves_from_one_document_to_another_is_not_sent_again(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1, 0, 10))
    write(store, "z", book(2))
    send(store, place)
    before = records_of(place)
    write(store, "a", [*book(1, 0, 10), *book(2, 30)])
    write(store, "z", book(2, 0, 30))
    send(store, place, replace=True)
    assert records_of(place) == before
    same_as(store, place, tmp_path, "a", "z")


def test_an_edit_is_never_sent_twice_and_pruning_keeps_what_is_named(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    now = book(1)
    write(store, "a", now)
    send(store, place)
    for at in range(0, COUNT, 7):
        before = records_of(place)
        now = edited(now, at, 2)
        write(store, "a", now)
        send(store, place, replace=True)
        assert records_of(place) - before == bytes_of(store, [(2, at)])
        prune(place, grace=-10)
        before = records_of(place)
    same_as(store, place, tmp_path, "a")
    with open_at(place, host_budget=1 << 20) as reader:
        assert read(reader, "a", now) == 0
    unpublish(place, ["a"])
    prune(place, grace=-10)
    assert not list(place.names("segments"))


def test_a_segment_stays_as_long_as_another_document_needs_it(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    write(store, "b", book(1, 10, 20))
    send(store, place)
    for forgotten in ("a", "b"):
        unpublish(place, [forgotten])
        prune(place, grace=-10)
        if forgotten == "a":
            same_as(store, place, tmp_path, "b")
            with open_at(place, host_budget=1 << 20) as reader:
                assert read(reader, "b", book(1, 10, 20)) == 0
    assert not list(place.names("segments"))


def test_merging_writes_what_is_used_once(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    send(store, place)
    write(store, "b", book(1, 5, 40))
    send(store, place)
    write(store, "a", edited(book(1), 50, 2))
    write(store, "c", [*book(3, 0, 9), (1, 7)])
    send(store, place, replace=True)
    assert merge(place).after == 1
    prune(place, grace=-10)
    used = [*edited(book(1), 50, 2), *book(3, 0, 9)]
    assert records_of(place) == bytes_of(store, used)  # the old sentence is gone
    same_as(store, place, tmp_path, "a", "b", "c")
    with open_at(place, host_budget=1 << 20) as reader:
        assert read(reader, "b", book(1, 5, 40)) == 0


def test_merging_writes_anew_what_is_used_of_a_large_segment_to_less_than_half(
    store, tmp_path
) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    write(store, "b", book(4))
    send(store, place, segment_bytes=20_000)
    before, left = records_of(place), 40
    write(store, "a", book(1, 0, left))
    send(store, place, replace=True)
    assert merge(place, segment_bytes=4_000).before == 0  # large ones, most of which is used
    write(store, "a", [*book(1, 20, 30), *book(2, 0, 3)])
    send(store, place, replace=True)
    assert merge(place, segment_bytes=4_000).before >= 1
    prune(place, grace=-10)
    used = bytes_of(store, [*book(1, 20, 30), *book(2, 0, 3), *book(4)])
    assert used <= records_of(place) < used + before / 4
    same_as(store, place, tmp_path, "a", "b")
    assert merge(place, segment_bytes=4_000).documents == 0  # nothing is left to do


def test_a_reader_follows_edits_whose_segments_were_removed(store) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    write(store, "b", book(1, 0, 12))
    send(store, place)
    with open_at(place, host_budget=4096) as reader:
        assert read(reader, "b", book(1, 0, 12)) == 0
        write(store, "a", book(2))
        send(store, place, replace=True)
        merge(place)
        prune(place, grace=-10)
        assert read(reader, "b", book(1, 0, 12)) == 0  # it looks where the newest has it
        reader._on_disk().catalog.database.refresh()
        assert read(reader, "a", book(2)) == 0


def test_what_is_damaged_is_sent_again_for_all_who_refer_to_it(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    write(store, "b", book(1, 5, 40))
    send(store, place, segment_bytes=8_000)
    held = {piece.segment for e in Published.open(place).documents() for piece in e.pieces}
    for segment in sorted(held):
        spoil(place, segment, 40)
    assert not verify_published(place.url).clean
    send(store, place, segment_bytes=8_000, check=True, replace=True)
    same_as(store, place, tmp_path, "a", "b")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_publisher_of_an_edit_killed_at_any_call_can_be_followed(store, when: str) -> None:
    """Before every second call, and after every second: what was done before one was done after
    the last.
    """
    base = in_memory()
    write(store, "a", book(1))
    send(store, WatchedPlace(base))
    write(store, "a", edited(book(1), 20, 2))
    write(store, "b", [*book(1, 0, 30), *book(3, 0, 20)])
    states = set()
    for number in count(step=2):
        place = copy_of(base)

        def stop(now: int, call: str, what: object, number: int = number) -> None:
            if now >= number:
                raise Killed

        setattr(place, when, stop)
        killed = False
        try:
            send(store, place, segment_bytes=4000, replace=True)
        except Killed:
            killed = True
        after = WatchedPlace(place.inner)
        states.add(tuple(names(after)))
        assert verify_published(after.url).clean
        send(store, after, segment_bytes=4000, replace=True)
        assert names(after) == ["a", "b"] and verify_published(after.url).clean
        prune(after, grace=-10)
        with open_at(after, host_budget=1 << 20) as reader:
            assert read(reader, "a", edited(book(1), 20, 2)) == 0
            assert read(reader, "b", [*book(1, 0, 30), *book(3, 0, 20)]) == 0
        if not killed:
            break
    assert number > 10 and states == {("a",), ("a", "b")}


def test_text_alone_is_published_as_such_and_back(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    write(store, "b", book(2))
    send(store, place, "a")
    size = records_of(place)
    report = send(store, place, keep="text", replace=True)
    assert report.documents == ["a", "b"] and report.bytes < size / 2
    assert send(store, place, keep="text").there == ["a", "b"]
    prune(place, grace=-10)
    assert records_of(place) == 0
    with open_at(place) as reader:
        assert reader.stats()["passages"]["stored"] == 0
        assert {row.name: row.bytes for row in reader.documents()} == {"a": 0, "b": 0}
        assert read(reader, "a", book(1)) == COUNT
    assert verify_published(place.url).clean
    with create(tmp_path / "pulled") as pulled:
        assert pulled.pull("b", place.url).bytes == 0
        assert pulled.verify().clean
    assert send(store, place).documents == ["a", "b"]
    same_as(store, place, tmp_path, "a", "b")


def test_what_is_kept_as_text_is_published_beside_what_is_not(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1, 0, 20))
    write(store, "b", [*book(1, 0, 20), *book(2, 0, 10)], keep="text")
    send(store, place)
    assert records_of(place) == bytes_of(store, book(1, 0, 20))
    with open_at(place) as reader:
        assert read(reader, "b", [*book(1, 0, 20), *book(2, 0, 10)]) == 10


def test_only_passages_can_be_text_alone(tmp_path) -> None:
    from support.synthetic_documents import SIGNATURE
    from support.synthetic_documents import ingest as ingest_blocks

    place = WatchedPlace(in_memory())
    with MemoryStore.create(tmp_path / "blocks", SIGNATURE) as blocks:
        ingest_blocks(blocks, "a", 40)
        with pytest.raises(InvalidInput, match="'a' is not made of passages"):
            send(blocks, place, keep="text")
        with pytest.raises(InvalidInput, match="kv or text"):
            send(blocks, place, keep="some")
    assert not place.calls


@pytest.mark.parametrize("kind", ["record", "index"])
def test_a_record_that_is_damaged_or_not_found_for_damage_is_told_as_one(store, kind: str) -> None:
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    send(store, place)
    (entry,) = Published.open(place).documents()
    (piece,) = record_pieces(entry.pieces)
    spoil(place, piece.segment, piece.offset + 20 if kind == "index" else 600)
    with open_at(place) as reader:
        number = reader.document("a").id
        units = [
            BlockKey(at[0], layer, at[1], head)
            for at in reader.retrieval.stored_at([(number, block) for block in range(COUNT)])
            for layer in LAYERS
            for head in range(2)
        ]
        with pytest.raises(CorruptBlock, match="damaged") as caught:
            reader.lease(units)
        assert not isinstance(caught.value, MissingBlock)


def test_hostile_indexes_are_named(store, tmp_path) -> None:
    """Every byte of an index is checked, and an index with right checksums is checked as well."""
    index = RecordIndex([b"x" * 16, b"y" * 16], 0, [1, 2], 50, torch.ones(2, 2).int().numpy())
    assert RecordIndex.decode(index.encode()).writes == index.writes
    source = random.Random(3)
    for _ in range(300):
        try:
            RecordIndex.decode(damaged(index.encode(), source))
        except ValueError:
            continue
    place = WatchedPlace(in_memory())
    write(store, "a", book(1, 0, 9))
    send(store, place)
    (entry,) = Published.open(place).documents()
    (piece,) = record_pieces(entry.pieces)
    with open_at(place) as reader:
        for wrong in (
            piece._replace(row=5),  # more rows than there are
            piece._replace(row=3, take=4),  # other passages
            piece._replace(first=2, take=7),
        ):
            others = [other for other in entry.pieces if other.kind != "records"]
            state = reader._on_disk().catalog.database.state
            state.entries[1] = entry._replace(pieces=tuple(sorted([*others, wrong])))
            with pytest.raises(CorruptBlock) as caught:
                (at,) = reader.retrieval.stored_at([(1, 3)])
                reader.lease([BlockKey(at[0], LAYERS[0], at[1], 0)])
            assert "\n" not in str(caught.value)


def copy_of(place: ObjectStore) -> WatchedPlace:
    """Another place with the same objects."""
    other = WatchedPlace(in_memory())
    for found in place.names(""):
        other.inner.put(found.name, bytes(place.get(found.name)))
    return other


def test_damaged_segments_are_named_by_readers_and_publishers(store, tmp_path) -> None:
    base = in_memory()
    write(store, "a", book(1, 0, 9))
    send(store, WatchedPlace(base))
    write(store, "a", book(1, 0, 10))
    source, errors = random.Random(5), 0
    for _ in range(60):
        place = copy_of(base)
        (segment,) = place.names("segments")
        place.inner.put(segment.name, damaged(bytes(place.get(segment.name)), source))
        for use in (
            lambda place: write_published(Published.open(place), "a", tmp_path / "out"),
            lambda place: send(store, place, replace=True),
        ):
            try:
                use(place)
            except MemstoreError as error:
                errors += 1
                assert "\n" not in str(error)
    assert errors > 40


def orphans_and_lost(place: WatchedPlace) -> tuple[set[str], set[str]]:
    """Objects that the newest manifest does not name, and names of objects that are not there."""
    newest = Published.open(place)
    named = {page.name for page in newest.manifest.pages}
    named |= {piece.segment for entry in newest.documents() for piece in entry.pieces}
    there = {found.name for folder in ("segments", "pages") for found in place.names(folder)}
    return there - named, named - there


@pytest.mark.timeout(3600 if RUNS > 20 else 300)
@pytest.mark.parametrize("seed", range(RUNS))
def test_whatever_is_done_readers_see_the_memory_and_nothing_is_lost_or_left(
    seed: int, store, tmp_path
) -> None:
    source, place = random.Random(seed), WatchedPlace(in_memory())
    here: dict[str, list[tuple[int, int]]] = {}
    there: dict[str, tuple[list[tuple[int, int]], str]] = {}
    for _ in range(STEPS):
        for _ in range(source.randrange(1, 4)):
            name = source.choice("abcd")
            made = list(here.get(name) or book(source.randrange(1, 4), 0, source.randrange(1, 25)))
            change = source.randrange(6)
            if change == 0 and name in here:
                store.forget(name)
                del here[name]
                continue
            if change == 1:  # a part of another, or a copy
                other = source.choice([*here.values(), made])
                made += other[source.randrange(len(other)) :]
            elif change == 2:
                made = edited(made, source.randrange(len(made)), source.randrange(1, 4))
            elif change == 3 and len(made) > 1:
                del made[source.randrange(len(made))]
            elif change == 4:
                made.insert(source.randrange(len(made) + 1), (source.randrange(1, 4), 30))
            made = made[:40]
            write(store, name, made, keep=source.choice(["kv", "kv", "kv", "text"]))
            here[name] = made
        some = [name for name in here if source.random() < 0.7]
        keep = source.choice(["kv", "kv", "text"])
        if some:
            size = source.choice([3_000, 1 << 25])
            send(store, place, *some, keep=keep, replace=True, segment_bytes=size)
            there |= {name: (here[name], keep) for name in some}
        gone = [name for name in there if source.random() < 0.15]
        if gone:
            unpublish(place, gone)  # type: ignore[arg-type]
            for name in gone:
                del there[name]
        if there and source.random() < 0.4:
            merge(place, segment_bytes=source.choice([6_000, 1 << 25]))
        if there and source.random() < 0.6:
            prune(place, grace=-10)
            assert orphans_and_lost(place) == (set(), set())
        if not some and not there:
            continue
        assert names(place) == sorted(there)
        report = verify_published(place.url)
        assert report.clean, report.problems
        for name, (made, kept) in there.items():
            with open_at(place, host_budget=1 << 20) as reader:  # with tiers of its own
                missing = read(reader, name, made)
            assert kept == "kv" or missing == len(made)
    assert store.verify().clean


def test_a_piece_takes_rows_of_an_index(store) -> None:
    """The pieces of a scattered edit are few: consecutive passages are one."""
    place = WatchedPlace(in_memory())
    write(store, "a", book(1))
    send(store, place)
    write(store, "a", edited(edited(book(1), 20, 2), 40, 2))
    send(store, place, replace=True)
    (entry,) = Published.open(place).documents()
    assert [(p.first, p.take, p.row) for p in record_pieces(entry.pieces)] == [
        (0, 20, 0),
        (20, 1, 0),
        (21, 19, 21),
        (40, 1, 1),
        (41, 19, 41),
    ]


def test_an_append_sends_what_it_added_of_passages(store, tmp_path) -> None:
    place = WatchedPlace(in_memory())
    ingest(store, "a", 40)
    send(store, place)
    before = records_of(place)
    ingest(store, "a", 43, mode="append")
    assert tail_of(1, 43) == store.tail("a")
    send(store, place)
    assert records_of(place) - before <= bytes_of(store, book(1, 39, 43))
    same_as(store, place, tmp_path, "a")


def test_passages_that_were_asked_for_long_ago_are_forgotten_and_found_again(
    store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.share.read.passage_numbers._MOST", 4)
    place = WatchedPlace(in_memory())
    write(store, "a", book(1, 0, 9))
    send(store, place)
    with open_at(place, host_budget=1 << 20) as reader:
        number = reader.document("a").id

        def numbers(*blocks: int) -> list[int]:
            return [
                at[0] for at in reader.retrieval.stored_at([(number, block) for block in blocks])
            ]

        first = numbers(0, 1, 2, 3)
        assert numbers(0, 4) == [first[0], first[-1] + 1]  # another's place, that was asked before
        assert numbers(1)[0] > first[-1] + 1
        places = reader._on_disk().catalog.database.places
        assert len(places._known) == len(places._numbers) == 4
        with pytest.raises(DocumentNotFound):
            reader.lease([BlockKey(first[1], LAYERS[0], 0, 0)])
        monkeypatch.undo()
        assert read(reader, "a", book(1, 0, 9)) == 0
