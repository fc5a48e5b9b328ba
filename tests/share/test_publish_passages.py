"""Passages are published once, by content: a passage that an earlier version or another document
sent is not sent again.

MEMSTORE_PUBLISHED_RANDOM sets the number of random histories.
"""

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from memstore.block import BlockKey
from memstore.disk.format.document import Document
from memstore.disk.tables.texts import Passage
from memstore.share.manifest import manifest_number, read_manifest
from memstore.share.publish import prune, unpublish
from memstore.share.ranges import Extent
from memstore.store.memory_store import MemoryStore
from memstore.store.verify import verify_published
from support.passage_documents import SETTINGS, content, landmarks, passage
from support.passage_documents import kept as kept_of
from support.places import WatchedPlace
from support.published import open_at
from support.publishing import contents_of, names, same_as, segments, send, spoil
from support.selected_documents import create, words

COUNT = 60
RUNS = int(os.environ.get("MEMSTORE_PUBLISHED_RANDOM", "2"))
STEPS = 14
AT_ONCE = 8  # passages, which the smallest budget here has room for

MadeOf = Sequence[tuple[int, int]]
"""The passages of a document, each a text and the number of a passage in it."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MemoryStore]:
    with create(tmp_path / "memory", codec="raw") as memory:
        yield memory


def book(text: int, first: int = 0, end: int = COUNT) -> list[tuple[int, int]]:
    return [(text, block) for block in range(first, end)]


def edited(made_of: MadeOf, at: int, by: int) -> list[tuple[int, int]]:
    return [*made_of[:at], (by, at), *made_of[at + 1 :]]


def write(store: MemoryStore, name: str, made_of: MadeOf, *, keep: str = "kv") -> Document:
    """A document of these passages, in place of any other of its name."""
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
        return writer.finish()


def records_of(place: WatchedPlace) -> int:
    """Bytes of all records that manifests name."""
    found = set[Extent]()
    for each in place.names("manifests"):
        for entry in read_manifest(place, manifest_number(each.name)).entries.values():
            contents = contents_of(place, entry)
            found |= {contents.record(block, 0) for block in range(entry.row.blocks)} - {None}
    return sum(extent.length for extent in found)


def bytes_of(store: MemoryStore, made_of: MadeOf) -> int:
    """Bytes of the records of passages, which the memory holds."""
    catalog = store._catalog
    with catalog.database.read() as txn:
        digests = catalog.digests(
            next(row for row in store.documents()), [passage(t, b) for t, b in {*made_of}]
        )
        return sum(catalog.passages.find(txn, digest).bytes for digest in digests)


def read(store: MemoryStore, name: str, made_of: MadeOf) -> int:
    """Check all keys and values of a document's passages; return how many passages have none."""
    document = store.document(name)
    assert [tuple(p.ids) for p in store.passages(name)] == [
        tuple(passage(t, b).ids) for t, b in made_of
    ]
    places = store.retrieval.stored_at([(document.id, block) for block in range(document.blocks)])
    there = [(block, place) for block, place in enumerate(places) if place is not None]
    for first in range(0, len(there), AT_ONCE):
        some = there[first : first + AT_ONCE]
        with store.lease([BlockKey(key, 0, at, 0) for _, (key, at) in some]) as lease:
            for (block, _), held in zip(some, lease.of_units, strict=True):
                for found, wanted in zip((lease.k, lease.v), content(*made_of[block])):
                    assert torch.equal(found[list(held)].flatten(0, 1), wanted), (name, block)
    return len(places) - len(there)


def test_a_passage_is_sent_once(store: MemoryStore, place: WatchedPlace, tmp_path: Path) -> None:
    """The same under two names, one of several edited, moved to another document."""
    edits = [(9, 0), *edited(book(3), 20, 9), (9, 1)]
    first: dict[str, MadeOf] = {"a": book(1), "b": book(1), "3": book(3), "z": book(2)}
    second: dict[str, MadeOf] = {"3": edits, "a": [*book(1, 0, 10), *book(2, 30)]}
    for documents, new in (
        (first, [*book(1), *book(2), *book(3)]),
        (second, [(9, 0), (9, 20), (9, 1)]),
    ):
        before = records_of(place)
        for name, made_of in documents.items():
            write(store, name, made_of)
        report = send(store, place, replace=True)
        assert report.documents == sorted(documents)
        assert records_of(place) - before == bytes_of(store, new)
    there = first | second
    same_as(store, place, tmp_path, *there)
    with open_at(place, host_budget=1 << 20) as reader:
        for name, made_of in there.items():
            assert read(reader, name, made_of) == 0


def test_checking_sends_damaged_passages_again_for_all_documents(
    store: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    write(store, "a", book(1))
    write(store, "b", book(1, 5, 40))
    send(store, place, segment_bytes=8_000)
    for segment in sorted(segments(place)):
        spoil(place, segment, 40)
    assert send(store, place, segment_bytes=8_000).segments == 0
    assert not verify_published(place.url).clean
    assert send(store, place, segment_bytes=8_000, check=True).segments > 0
    same_as(store, place, tmp_path, "a", "b")
    assert send(store, place, segment_bytes=8_000, check=True).segments == 0


@pytest.mark.timeout(3600 if RUNS > 20 else 300)
@pytest.mark.parametrize("seed", range(RUNS))
def test_after_random_changes_readers_see_the_memory_and_no_object_is_lost_or_left_over(
    seed: int, store: MemoryStore, place: WatchedPlace
) -> None:
    source = random.Random(seed)
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
        if there and source.random() < 0.6:
            prune(place, grace=-10)
            assert {found.name for found in place.names("segments")} == segments(place)
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
