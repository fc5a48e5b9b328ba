"""Publishing documents to an object store, and having them back: bit for bit, once, whole or not
at all.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from memstore.errors import (
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    MemoryNotFound,
    WrongModel,
)
from memstore.share.format.manifest import newest_number
from memstore.share.format.published import Published
from memstore.share.publish.garbage_collection import prune
from memstore.share.publish.publish import Report, unpublish
from memstore.store.memory_store import MemoryStore
from memstore.store.verify.verify_memory import verify_published
from support.places import Killed, WatchedPlace, in_memory
from support.published import open_at
from support.publishing import before_the_manifest, names, same_as, send, spoil
from support.selected_documents import FORM
from support.selected_documents import create as create_selected
from support.selected_documents import ingest as ingest_selected
from support.synthetic_documents import OTHER_MODEL, SIGNATURE, ingest


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryStore]:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE, host_budget=1 << 20) as store:
        yield store


def test_a_published_document_is_pulled_as_it_is_exported(
    memory: MemoryStore, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    for text, tokens in enumerate([1, 4, 100, 333], 1):
        ingest(memory, f"text {text}", tokens, text=text)
    report = send(memory, place)
    assert report.number == 1 and len(report.documents) == 4
    assert report.segments == 1  # many documents share one
    same_as(memory, place, tmp_path, *report.documents)


def test_a_document_without_tokens_is_exported_published_and_pulled(
    memory: MemoryStore, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "nothing", 0)
    send(memory, place)
    same_as(memory, place, tmp_path, "nothing")
    memory.export_document("nothing", tmp_path / "file")
    assert memory.import_document(tmp_path / "file", "again").tokens == 0


def test_documents_fill_segments_and_run_over_from_one_to_the_next(
    memory: MemoryStore, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    for text in (1, 2, 3):
        ingest(memory, f"text {text}", 160, text=text)
    report = send(memory, place, segment_bytes=8_000)
    assert report.segments > 10
    same_as(memory, place, tmp_path, *report.documents)


def test_a_memory_with_a_selector_is_published_with_its_landmarks_and_words(tmp_path: Path) -> None:
    place = WatchedPlace(in_memory())
    with create_selected(tmp_path / "memory") as store:
        ingest_selected(store, "a", 300, text=1)
        ingest_selected(store, "b", 70, text=2)
        send(store, place)
        assert Published.open(place).manifest.selector == FORM
        same_as(store, place, tmp_path, "a", "b")


def test_what_is_published_is_not_sent_again(memory: MemoryStore, tmp_path: Path) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 400)
    ingest(memory, "b", 100, text=2)
    send(memory, place, "a")
    place.sent = 0
    assert send(memory, place, "a") == Report(1, [], ["a"], 0, 0)
    assert place.sent == 0 and newest_number(place) == 1
    report = send(memory, place)
    assert (report.number, report.documents, report.there) == (2, ["b"], ["a"])
    assert report.bytes < 2 * memory.document("b").bytes


def test_an_append_sends_what_it_added(memory: MemoryStore, tmp_path: Path) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 800)
    first = send(memory, place)
    for tokens in (840, 847):
        ingest(memory, "a", tokens, mode="append")
        report = send(memory, place)
        assert report.documents == ["a"] and report.bytes < first.bytes / 5
        same_as(memory, place, tmp_path, "a")
    assert names(place) == ["a"]


def test_a_name_is_not_taken_from_other_content(memory: MemoryStore, tmp_path: Path) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 100)
    send(memory, place)
    with MemoryStore.create(tmp_path / "other", SIGNATURE) as other:
        ingest(other, "a", 60, text=9)
        with pytest.raises(DocumentExists, match="--replace"):
            send(other, place)
        same_as(memory, place, tmp_path, "a")
        send(other, place, replace=True)
        same_as(other, place, tmp_path, "a")


@pytest.mark.parametrize(
    "appends",
    [
        (),  # an older state
        ((180, 1),),  # another append of the same beginning
        ((150, 9), (180, 9)),  # another text of the same length, appended to
    ],
)
def test_what_is_no_append_does_not_take_the_place_of_one(
    appends: tuple[tuple[int, int], ...], memory: MemoryStore, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 100)
    send(memory, place)
    with MemoryStore.create(tmp_path / "other", SIGNATURE) as other:
        other.pull("a", place.url)
        ingest(memory, "a", 150, mode="append")
        send(memory, place)
        for tokens, text in appends:
            ingest(other, "a", tokens, mode="append", text=text)
        with pytest.raises(DocumentExists):
            send(other, place)


@pytest.mark.parametrize(
    ("before", "after"), [([7], [9]), ([7], [9, 11]), ([96, 100], [102, 105]), ([7], [40, 41, 90])]
)
def test_appends_since_the_last_publication_are_that_however_short_they_are(
    before: list[int], after: list[int], memory: MemoryStore, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    for tokens in before:
        ingest(memory, "a", tokens, mode="append" if tokens > before[0] else "new")
    send(memory, place)
    for tokens in after:
        ingest(memory, "a", tokens, mode="append")
    assert send(memory, place).documents == ["a"]
    same_as(memory, place, tmp_path, "a")


def test_publishers_never_lose_each_others_documents(tmp_path: Path) -> None:
    place = in_memory()
    with (
        MemoryStore.create(tmp_path / "one", SIGNATURE) as one,
        MemoryStore.create(tmp_path / "two", SIGNATURE) as two,
    ):
        for number in range(6):
            ingest(one, f"one {number}", 40, text=number)
            ingest(two, f"two {number}", 40, text=number)
        mine, theirs = WatchedPlace(place), WatchedPlace(place)
        left = [f"two {number}" for number in range(6)]

        def overtake(number: int, call: str, what: str) -> None:
            if call == "create" and left:
                send(two, theirs, left.pop())

        mine.before = overtake
        for number in range(3):
            send(one, mine, f"one {number}", f"one {number + 3}")
        assert names(mine) == sorted(
            f"{who} {number}" for who in ("one", "two") for number in range(6)
        )
        assert newest_number(place) == 9
        same_as(one, mine, tmp_path, "one 0", "one 5")


def test_two_publishers_of_one_new_memory_both_find_their_documents_in_it(tmp_path: Path) -> None:
    place = in_memory()
    with (
        MemoryStore.create(tmp_path / "one", SIGNATURE) as one,
        MemoryStore.create(tmp_path / "two", SIGNATURE) as two,
    ):
        ingest(one, "a", 40)
        ingest(two, "b", 40, text=2)
        mine = WatchedPlace(place)
        sent: list[int] = []

        def overtake(number: int, call: str, what: str) -> None:
            if call == "put" and not sent:
                sent.append(send(two, WatchedPlace(place)).number)

        mine.before = overtake
        assert send(one, mine).number == 2 and sent == [1]
        assert names(mine) == ["a", "b"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_publisher_killed_at_any_call_leaves_what_was_there_and_can_be_followed(
    when: str, memory: MemoryStore, tmp_path: Path
) -> None:
    ingest(memory, "a", 60)
    ingest(memory, "b", 100, text=2)
    base = in_memory()
    send(memory, WatchedPlace(base), "a")
    ingest(memory, "a", 90, mode="append")

    def kill(number: int) -> tuple[WatchedPlace, bool]:
        place = WatchedPlace(in_memory())
        for found in base.names(""):
            place.inner.put(found.name, bytes(base.get(found.name)))

        def stop(now: int, call: str, what: str) -> None:
            if now >= number:  # whatever else was under way ends as well
                raise Killed

        setattr(place, when, stop)
        try:
            send(memory, place, segment_bytes=5000)
        except Killed:
            return place, True
        return place, False

    number, killed, states = 0, True, set()
    while killed:
        place, killed = kill(number)
        after = WatchedPlace(place.inner)
        found = Published.open(after)
        rows = {entry.row.name: entry.row.tokens for entry in found.documents()}
        assert rows in ({"a": 60}, {"a": 90, "b": 100})
        states.add(len(rows))
        assert verify_published(after.url).clean
        resumed = send(memory, after, segment_bytes=5000)
        assert names(after) == ["a", "b"] and verify_published(after.url).clean
        assert len(rows) == 1 or resumed.segments == 0
        number += 2  # before one call is after the last
    assert number > 10 and states == {1, 2}


def test_publishing_that_was_interrupted_sends_what_was_missing(memory: MemoryStore) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 900)

    def stop(number: int, call: str, what: str) -> None:
        if call == "create":
            raise Killed

    place.before = stop
    with pytest.raises(Killed):
        send(memory, place, segment_bytes=10_000)
    whole, place.sent = place.sent, 0
    del place.before
    place.before = lambda number, call, what: None
    assert send(memory, place, segment_bytes=10_000).segments == 0
    assert place.sent < whole / 10


def test_a_create_whose_answer_was_lost_is_found_done(memory: MemoryStore) -> None:
    from memstore.errors import StoreUnavailable

    place = WatchedPlace(in_memory())
    ingest(memory, "a", 50)

    def lose(number: int, call: str, what: str) -> None:
        if call == "create":
            raise StoreUnavailable("no answer")

    place.after = lose
    assert send(memory, place).number == 1
    assert names(place) == ["a"]


def test_unpublishing_takes_documents_out(memory: MemoryStore, tmp_path: Path) -> None:
    place = WatchedPlace(in_memory())
    for text in (1, 2, 3):
        ingest(memory, f"text {text}", 50, text=text)
    send(memory, place)
    reader = Published.open(place)
    assert unpublish(place, ["text 2"]) == 2
    assert names(place) == ["text 1", "text 3"]
    assert len(reader.documents()) == 3  # who has the manifest before goes on with it
    with pytest.raises(DocumentNotFound, match="'text 2'"):
        unpublish(place, ["text 1", "text 2"])
    same_as(memory, place, tmp_path, "text 1", "text 3")
    unpublish(place, ["text 1", "text 3"])
    assert names(place) == [] and verify_published(place.url).clean
    send(memory, place)
    same_as(memory, place, tmp_path, "text 1", "text 2", "text 3")


def test_pruning_removes_what_nothing_names_and_nothing_else(
    memory: MemoryStore, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    for text in (1, 2):
        ingest(memory, f"text {text}", 80, text=text)
        send(memory, place, f"text {text}")
    unpublish(place, ["text 1"])
    before = {found.name for found in place.names("")}
    assert prune(place, grace=3600) == (0, 0, 0, 0)
    assert {found.name for found in place.names("")} == before
    pruned = prune(place, grace=0)
    assert (pruned.manifests, pruned.objects) == (2, 3)  # a segment, two pages
    assert len(list(place.names(""))) == 3
    same_as(memory, place, tmp_path, "text 2")
    send(memory, place)
    assert prune(place, grace=-3600).objects == 1  # the page before
    same_as(memory, place, tmp_path, "text 1", "text 2")


def test_pruning_leaves_what_is_no_manifest_where_it_is(memory: MemoryStore) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 40)
    send(memory, place)
    others = [f"manifests/{name}" for name in ("notes.txt", "x" * 16, "ffffffffffffffff/deep")]
    for name in others:
        place.put(name, b"mine")
    assert unpublish(place, ["a"]) == 2
    pruned = prune(place, grace=-10)
    assert (pruned.manifests, pruned.objects) == (1, 2)
    assert {*others} <= {found.name for found in place.names("")} and names(place) == []


def test_what_may_be_removed_meanwhile_is_sent_anew(memory: MemoryStore) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 80)
    send(memory, place)
    unpublish(place, ["a"])
    assert send(memory, place, grace=3600).segments == 0  # it is young enough to be relied on
    unpublish(place, ["a"])
    assert send(memory, place, grace=-1e9).segments == 1


def interrupt(store: MemoryStore, place: WatchedPlace) -> None:
    """A publication that is killed when all is sent."""

    def stop(number: int, call: str, what: str) -> None:
        if call == "create":
            raise Killed

    place.before = stop
    with pytest.raises(Killed):
        send(store, place)


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_others_prune_before_the_manifest_is_written_is_sent_anew(
    interrupted: bool, memory: MemoryStore, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 40)
    send(memory, place)
    ingest(memory, "b", 80, text=2)
    if interrupted:
        interrupt(memory, place)
    before_the_manifest(place, lambda: prune(place.inner, grace=-10))
    assert send(memory, place).segments == 1
    same_as(memory, place, tmp_path, "a", "b")


@pytest.mark.parametrize(("aged", "sent"), [(0.6, 0), (0.8, 1)])
def test_what_became_too_old_while_publishing_is_sent_anew(
    aged: float, sent: int, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 80)
    interrupt(memory, place)
    past = [0.0]
    monkeypatch.setattr(
        "memstore.share.publish.segment_writer.time",
        SimpleNamespace(time=lambda: time.time() + past[0]),
    )
    before_the_manifest(place, lambda: past.append(past.pop() + aged * 1e6))
    assert send(memory, place, grace=1e6).segments == sent
    assert verify_published(place.url).clean


def test_what_is_damaged_is_sent_again_where_it_is_checked(
    memory: MemoryStore, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 200)
    ingest(memory, "b", 40, text=2)
    send(memory, place, segment_bytes=4_000)
    ingest(memory, "a", 240, mode="append")
    send(memory, place, segment_bytes=4_000)

    def named() -> set[str]:
        entries = Published.open(place).documents()
        return {piece.segment for entry in entries for piece in entry.pieces}

    segments = sorted(named())
    assert len(segments) > 6
    for segment in segments:
        if segment not in named():
            continue  # what it held was sent again with what another held
        spoil(place, segment, -1)  # in its footer
        assert send(memory, place, segment_bytes=4_000).segments == 0
        report = send(memory, place, segment_bytes=4_000, check=True)
        assert 0 < report.segments < 5
        same_as(memory, place, tmp_path, "a", "b")
        assert send(memory, place, segment_bytes=4_000, check=True).segments == 0


def test_a_damaged_segment_is_not_taken_for_one_that_was_sent(
    memory: MemoryStore, tmp_path: Path
) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 80)
    send(memory, place)
    (segment,) = place.names("segments")
    spoil(place, segment.name, 500)
    unpublish(place, ["a"])
    assert send(memory, place).segments == 1
    same_as(memory, place, tmp_path, "a")


def test_a_table_of_many_documents_is_changed_page_by_page(memory: MemoryStore) -> None:
    from dataclasses import replace

    from memstore.share.format.document_pages import PAGE_ENTRIES, Entry
    from memstore.share.publish.manifest_commit import Change, commit

    place = WatchedPlace(in_memory())
    ingest(memory, "a", 20)
    send(memory, place)
    entry = Published.open(place).entry("a")
    assert entry is not None

    def put(changes: dict[str, Entry | None]) -> None:
        def change(newest: Published | None):
            assert newest is not None
            return newest.manifest, Change(changes)

        commit(place, change)

    named = {f"{n:05}": Entry(replace(entry.row, name=f"{n:05}"), entry.pieces) for n in range(800)}
    put(named)
    newest = Published.open(place)
    assert names(place) == [*named, "a"]
    assert max(page.documents for page in newest.manifest.pages) <= PAGE_ENTRIES
    place.calls.clear()
    put({"00377": None, "00378x": named["00378"]._replace(row=replace(entry.row, name="00378x"))})
    assert len([call for call, _ in place.calls if call == "put"]) == 1  # the page it lies on
    assert [call for call, _ in place.calls].count("get") == 2  # that, and the manifest
    expected = sorted({*named, "a", "00378x"} - {"00377"})
    assert names(place) == expected
    place.calls.clear()
    reader = Published.open(place)
    assert reader.entry("00500") == named["00500"]
    assert [call for call, _ in place.calls] == ["first", "get", "get"]
    assert reader.entry("0050") is None and reader.entry("") is None
    reader.documents()
    put({"00500": None})
    place.calls.clear()
    later = Published.at(place, newest_number(place) or 0, reader)
    assert len(later.documents()) == len(reader.documents()) - 1
    assert [call for call, _ in place.calls] == ["first", "get", "get"]  # the page that changed
    put(dict.fromkeys(expected[10:]))  # pages that become small are joined
    newest = Published.open(place)
    assert names(place) == expected[:10] and len(newest.manifest.pages) == 1


def test_bad_input_is_one_line(memory: MemoryStore, tmp_path: Path) -> None:
    from memstore.share.objects.open_object_store import open_object_store

    ingest(memory, "a", 40)
    for url, error, line in (
        ("ftp://x/y", InvalidInput, "unknown scheme 'ftp'"),
        ("s3:///x", InvalidInput, "name a bucket"),
        ("s3://key:secret@bucket/x", InvalidInput, "no credentials"),
        ("az://container/x?sig=secret", InvalidInput, "no credentials"),
        ("file://host/x", InvalidInput, "directory of this machine"),
        (f"file://{tmp_path}/memory", InvalidInput, "a memory's own directory"),
    ):
        with pytest.raises(error, match=line) as caught:
            memory.publish(url)
        assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    with pytest.raises(MemoryNotFound, match="no such directory"):
        Published.open(open_object_store(f"file://{tmp_path}/nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(MemoryNotFound, match="holds no published memory"):
        Published.open(open_object_store(f"file://{tmp_path}/empty"))
    place = WatchedPlace(in_memory())
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
        with pytest.raises(WrongModel, match="selector"):
            send(selected, place)


def test_readers_look_for_a_newer_manifest_as_often_as_they_are_told(memory: MemoryStore) -> None:
    place = WatchedPlace(in_memory())
    ingest(memory, "a", 40)
    send(memory, place)
    with open_at(place, refresh=1e-9) as eager, open_at(place, refresh=3600.0) as patient:
        ingest(memory, "b", 40)
        send(memory, place)
        place.calls.clear()
        assert not patient.has("b") and not place.calls
        until = time.monotonic() + 120
        while not eager.has("b") and time.monotonic() < until:
            time.sleep(0.01)
        assert eager.has("b") and not patient.has("b")
