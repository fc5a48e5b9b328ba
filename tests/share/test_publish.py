"""Documents are published to an object store and pulled back: bit for bit, once, whole or not at
all.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from memstore.errors import DocumentExists, DocumentNotFound, StoreUnavailable, WrongModel
from memstore.share.entries import Entry
from memstore.share.garbage_collection import prune
from memstore.share.manifest import PAGE_ENTRIES, newest_number
from memstore.share.manifest_commit import Change, commit
from memstore.share.publish import Report, unpublish
from memstore.share.published import Published
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_published import verify_published
from support.places import Killed, WatchedPlace
from support.publishing import before_the_manifest, names, same_as, segments, send, spoil
from support.selected_documents import create as create_selected
from support.selected_documents import ingest as ingest_selected
from support.synthetic_documents import OTHER_MODEL, SIGNATURE, ingest


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryStore]:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE, host_budget=1 << 20) as store:
        yield store


# There and back


@pytest.mark.parametrize("size", [32 << 20, 8_000])
def test_a_published_document_is_pulled_as_it_is_exported(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path, size: int
) -> None:
    for text, tokens in enumerate([0, 1, 4, 100, 333]):
        ingest(memory, f"text {text}", tokens, text=text)
    report = send(memory, place, segment_bytes=size)
    assert report.number == 1 and len(report.documents) == 5
    assert report.segments == 1 if size > 1 << 20 else report.segments > 10
    same_as(memory, place, tmp_path, *report.documents)


def test_published_documents_are_not_sent_again(memory: MemoryStore, place: WatchedPlace) -> None:
    ingest(memory, "a", 400)
    ingest(memory, "b", 100, text=2)
    send(memory, place, "a")
    place.sent = 0
    assert send(memory, place, "a") == Report(1, [], ["a"], 0, 0)
    assert place.sent == 0 and newest_number(place) == 1
    report = send(memory, place)
    assert (report.number, report.documents, report.there) == (2, ["b"], ["a"])
    assert report.bytes < 2 * memory.document("b").bytes


# Other content


def test_what_is_said_of_a_document_is_sent_without_its_content(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    ingest(memory, "a", 800)
    send(memory, place)
    memory.describe("a", {"author": "x"})
    report = send(memory, place)
    assert (report.documents, report.segments) == (["a"], 0)
    same_as(memory, place, tmp_path, "a")
    with MemoryStore.create(tmp_path / "other", SIGNATURE) as other:
        assert other.pull("a", place.url).metadata == {"author": "x"}
        assert send(other, place).documents == []


def test_other_content_needs_replace(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    ingest(memory, "a", 100)
    send(memory, place)
    with MemoryStore.create(tmp_path / "other", SIGNATURE) as other:
        ingest(other, "a", 60, text=9)
        with pytest.raises(DocumentExists, match="--replace"):
            send(other, place)
        same_as(memory, place, tmp_path, "a")
        send(other, place, replace=True)
        same_as(other, place, tmp_path, "a")


# Interrupted publishers


def interrupt(store: MemoryStore, place: WatchedPlace, **settings: int) -> None:
    """A publication that is killed when everything is sent."""

    def stop(number: int, call: str, what: str) -> None:
        if call == "create":
            raise Killed

    place.before = stop
    with pytest.raises(Killed):
        send(store, place, **settings)
    place.before = lambda number, call, what: None


def test_an_interrupted_push_sends_only_what_is_missing(
    memory: MemoryStore, place: WatchedPlace
) -> None:
    ingest(memory, "a", 900)
    interrupt(memory, place, segment_bytes=10_000)
    whole, place.sent = place.sent, 0
    assert send(memory, place, segment_bytes=10_000).segments == 0
    assert place.sent < whole / 10


def test_a_create_whose_answer_was_lost_counts(memory: MemoryStore, place: WatchedPlace) -> None:
    ingest(memory, "a", 50)

    def lose(number: int, call: str, what: str) -> None:
        if call == "create":
            raise StoreUnavailable("no answer")

    place.after = lose
    assert send(memory, place).number == 1
    assert names(place) == ["a"]


# Unpublishing, pruning


def test_pruning_removes_unnamed_objects_and_nothing_else(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    for text in (1, 2):
        ingest(memory, f"text {text}", 80, text=text)
        send(memory, place, f"text {text}")
    unpublish(place, ["text 1"])
    others = [f"manifests/{name}" for name in ("notes.txt", "x" * 16, "ffffffffffffffff/deep")]
    for name in others:  # which are no manifests
        place.put(name, b"mine")
    before = {found.name for found in place.names("")}
    assert prune(place, grace=3600) == (0, 0, 0, 0)
    assert {found.name for found in place.names("")} == before
    pruned = prune(place, grace=0)
    assert (pruned.manifests, pruned.objects) == (2, 3)  # a segment, two pages
    left = {found.name for found in place.names("")}
    assert len(left) == 3 + len(others) and {*others} <= left
    same_as(memory, place, tmp_path, "text 2")
    send(memory, place)
    assert prune(place, grace=-3600).objects == 1  # the page before
    same_as(memory, place, tmp_path, "text 1", "text 2")


@pytest.mark.parametrize(("aged", "sent"), [(0.6, 0), (0.8, 1)])
def test_what_became_too_old_during_a_push_is_sent_again(
    aged: float,
    sent: int,
    memory: MemoryStore,
    place: WatchedPlace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ingest(memory, "a", 80)
    interrupt(memory, place)
    past = [0.0]
    monkeypatch.setattr(
        "memstore.share.segments.time", SimpleNamespace(time=lambda: time.time() + past[0])
    )
    before_the_manifest(place, lambda: past.append(past.pop() + aged * 1e6))
    assert send(memory, place, grace=1e6).segments == sent
    assert verify_published(place.url).clean


# Damage


def test_checking_sends_damaged_segments_again(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    ingest(memory, "a", 140)
    ingest(memory, "b", 40, text=2)
    send(memory, place, segment_bytes=4_000)
    every = sorted(segments(place))
    assert len(every) > 6
    for segment in every:
        if segment not in segments(place):
            continue  # its contents were sent again with those of another
        spoil(place, segment, -1)  # in its footer
        assert send(memory, place, segment_bytes=4_000).segments == 0
        report = send(memory, place, segment_bytes=4_000, check=True)
        assert 0 < report.segments < 5
        same_as(memory, place, tmp_path, "a", "b")
        assert send(memory, place, segment_bytes=4_000, check=True).segments == 0


def test_a_damaged_segment_is_not_used_again(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    ingest(memory, "a", 80)
    send(memory, place)
    (segment,) = place.names("segments")
    spoil(place, segment.name, 500)
    unpublish(place, ["a"])
    assert send(memory, place).segments == 1
    same_as(memory, place, tmp_path, "a")


# The table of documents


def test_a_table_of_many_documents_is_changed_page_by_page(
    memory: MemoryStore, place: WatchedPlace
) -> None:
    ingest(memory, "a", 20)
    send(memory, place)
    entry = Published.open(place).entry("a")
    assert entry is not None

    def put(changes: dict[str, Entry | None]) -> None:
        commit(place, lambda newest: Change(changes))

    named = {f"{n:05}": Entry(replace(entry.row, name=f"{n:05}"), entry.pieces) for n in range(800)}
    put(named)
    newest = Published.open(place)
    assert names(place) == [*named, "a"]
    assert max(page.documents for page in newest.manifest.pages) <= PAGE_ENTRIES
    place.calls.clear()
    put({"00377": None, "00378x": named["00378"]._replace(row=replace(entry.row, name="00378x"))})
    assert len([call for call, _ in place.calls if call == "put"]) == 1  # its page
    assert [call for call, _ in place.calls].count("get") == 2  # that page, and the manifest
    expected = sorted({*named, "a", "00378x"} - {"00377"})
    assert names(place) == expected
    place.calls.clear()
    reader = Published.open(place)
    assert reader.entry("00500") == named["00500"]
    assert [call for call, _ in place.calls] == ["first", "get", "get"]
    put(dict.fromkeys(expected[10:]))
    assert names(place) == expected[:10]


# Input that is refused


def test_another_model_or_selector_is_refused(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    ingest(memory, "a", 40)
    send(memory, place)
    with MemoryStore.create(tmp_path / "foreign", OTHER_MODEL) as foreign:
        ingest(foreign, "b", 20)
        with pytest.raises(WrongModel, match="weights"):
            send(foreign, place)
        with pytest.raises(WrongModel):
            foreign.pull("a", place.url)
        assert [file for file in (tmp_path / "foreign").iterdir() if "partial" in file.name] == []
    with pytest.raises(DocumentNotFound, match="no document 'b'"):
        memory.pull("b", place.url)
    with create_selected(tmp_path / "selected") as selected:
        ingest_selected(selected, "b", 20)
        with pytest.raises(WrongModel):
            send(selected, place)
