"""Documents are published to an object store and pulled back: bit for bit, once, and whole or not
at all.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.errors import DocumentExists, DocumentNotFound, WrongModel
from memstore.share.publish import prune, unpublish
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import pull_document
from memstore.store.verify import verify_published
from support.places import Killed, WatchedPlace
from support.publishing import names, same_as, send
from support.synthetic_documents import OTHER_MODEL, SIGNATURE, ingest


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryStore]:
    with MemoryStore.create(tmp_path / "memory", SIGNATURE, host_budget=1 << 20) as store:
        yield store


# There and back


@pytest.mark.parametrize("size", [32 << 20, 8_000])
def test_a_pulled_document_equals_its_export(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path, size: int
) -> None:
    for text, tokens in enumerate([0, 1, 4, 100, 333]):
        ingest(memory, f"text {text}", tokens, text=text)
    report = send(memory, place, segment_bytes=size)
    assert report.number == 1 and len(report.documents) == 5
    assert report.segments == 1 if size > 1 << 20 else report.segments > 10
    same_as(memory, place, tmp_path, *report.documents)


# Other content


def test_publishing_changed_metadata_sends_no_content(
    memory: MemoryStore, place: WatchedPlace, tmp_path: Path
) -> None:
    ingest(memory, "a", 800)
    send(memory, place)
    for metadata in ({"author": 1}, {"author": True}):  # equal for Python
        memory.describe("a", metadata)
        report = send(memory, place)
        assert (report.documents, report.segments) == (["a"], 0)
        same_as(memory, place, tmp_path, "a")
    with MemoryStore.create(tmp_path / "other", SIGNATURE) as other:
        assert pull_document(other, "a", place.url).metadata["author"] is True
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


def test_a_create_whose_response_was_lost_counts_as_done(
    memory: MemoryStore, place: WatchedPlace
) -> None:
    ingest(memory, "a", 50)

    create = place.inner.create
    place.inner.create = lambda *given: create(*given) and create(*given)  # type: ignore[method-assign]
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
    assert prune(place, grace=3600) == (0, 0, 0)
    assert {found.name for found in place.names("")} == before
    pruned = prune(place, grace=0)
    assert (pruned.manifests, pruned.objects) == (2, 1)
    left = {found.name for found in place.names("")}
    assert len(left) == 2 + len(others) and {*others} <= left
    same_as(memory, place, tmp_path, "text 2")
    send(memory, place)
    assert prune(place, grace=-3600).manifests == 1
    same_as(memory, place, tmp_path, "text 1", "text 2")


def test_a_segment_older_than_the_grace_period_is_sent_again(
    memory: MemoryStore, place: WatchedPlace
) -> None:
    ingest(memory, "a", 80)
    interrupt(memory, place)
    assert send(memory, place, grace=0).segments == 1
    assert verify_published(place.url).clean


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
            pull_document(foreign, "a", place.url)
        assert [file for file in (tmp_path / "foreign").iterdir() if "partial" in file.name] == []
    with pytest.raises(DocumentNotFound, match="no document 'b'"):
        pull_document(memory, "b", place.url)
