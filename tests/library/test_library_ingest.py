"""Several workers publish a library as one process would, whichever of them is killed and when.
Nothing is ingested twice, and every omitted document has a reported reason.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("obstore")
pytest.importorskip("transformers")

from memstore.disk.format.document import Document
from memstore.errors import MemstoreError, StoreUnavailable
from memstore.library import library_ingest, ray_engine, reading
from memstore.library.library_ingest import index_library
from memstore.share.manifest import read_newest
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import prune, unpublish
from memstore.store.retrieve import first_stage
from memstore.store.transfer import publish_memory
from support import made_documents as made
from support.commands import run
from support.libraries import Here, clean, content, folder, ingest, job, one_process, passages
from support.many_passages import add, create
from support.places import Killed, WatchedPlace

pytestmark = pytest.mark.usefixtures("passages")
__all__ = ["passages"]


def watched(monkeypatch: pytest.MonkeyPatch, url: str) -> WatchedPlace:
    """What is called of the place at a URL from now on."""
    place = WatchedPlace(open_object_store(url, make=True))
    for module in (library_ingest, reading):
        monkeypatch.setattr(module, "open_object_store", lambda url, make=False: place)
    return place


def document(url: str, name: str) -> Document:
    entry = read_newest(open_object_store(url)).entries.get(name)
    return entry.row


@pytest.mark.parametrize("keep", ["kv", "text"])
def test_workers_publish_what_one_process_publishes(
    keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, url = folder(tmp_path / "library", 9), f"file://{tmp_path}/many"
    library = job(url, keep=keep)
    progress, number, told = ingest(path, library)
    assert number == 1 and {one.status for one in told.values()} == {"read"}
    assert progress.documents.total() == progress.files == len(told) == 9
    assert progress.done == progress.bytes and progress.passages and progress.tokens
    alone = f"file://{tmp_path}/one"
    one_process(path, tmp_path / "memory", alone, **({"keep": keep} if keep == "text" else {}))
    assert content(url, tmp_path) == content(alone, tmp_path)
    clean(url)
    place = watched(monkeypatch, url)  # the same again sends nothing
    progress, number, told = ingest(path, library)
    assert number == 1 and place.sent == 0 and progress.tokens == 0
    assert {one.status for one in told.values()} == {"there"}
    assert not any(call in ("put", "create", "delete") and what for call, what in place.calls)


def test_other_content_is_refused_or_replaces(tmp_path: Path) -> None:
    path, url = folder(tmp_path / "library", 4), f"file://{tmp_path}/many"
    ingest(path, job(url))
    before = document(url, "001.txt")
    (path / "001.txt").write_text("Another text about a lamp.\n")
    (path / "004.txt").write_text("A new text about a door.\n")
    progress, _, told = ingest(path, job(url))
    assert told["001.txt"].status == "refused" and "--replace" in told["001.txt"].error[1]
    assert (told["000.txt"].status, told["004.txt"].status) == ("there", "read")
    assert document(url, "001.txt") == before
    assert progress.documents == {"there": 3, "read": 1, "refused": 1}
    _, number, told = ingest(path, job(url, replace=True))
    assert number == 3 and told["001.txt"].status == "read"
    assert document(url, "001.txt").source_hash != before.source_hash
    clean(url)


def test_publishing_with_keep_text_needs_no_replace(tmp_path: Path) -> None:
    path, url = folder(tmp_path / "library", 3), f"file://{tmp_path}/many"
    ingest(path, job(url, keep="kv"))
    as_text = job(url, keep="text")
    _, _, told = ingest(path, as_text)
    assert {one.status for one in told.values()} == {"read"}
    assert document(url, "001.txt").bytes == 0
    _, number, told = ingest(path, as_text)
    assert number == 2 and {one.status for one in told.values()} == {"there"}
    clean(url)


def test_bad_documents_are_reported_and_the_others_ingested(tmp_path: Path) -> None:
    path, url = folder(tmp_path / "library", 3), f"file://{tmp_path}/many"
    (path / "binary.txt").write_bytes(b"a\0b")
    (path / "empty.txt").write_text(" \n")
    (path / "noise.txt").write_bytes(bytes(range(1, 32)) * 9)
    (path / "broken.pdf").write_bytes(b"%PDF-1.4\nnothing")
    (path / "gone.txt").symlink_to(path / "nowhere")  # links are not followed
    _, _, told = ingest(path, job(url))
    refused = {name: one.error for name, one in told.items() if one.status == "refused"}
    assert refused.keys() == {"binary.txt", "empty.txt", "noise.txt", "broken.pdf"}
    for name, (kind, why) in refused.items():
        assert kind == "UnreadableDocument" and str(path / name) in why
    names = [*read_newest(open_object_store(url)).entries]
    assert names == ["000.txt", "001.txt", "002.txt"]


def test_the_command_reports_documents_that_workers_could_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pypdfium2")
    monkeypatch.setattr(ray_engine, "RayEngine", lambda *_, **__: Here())
    path = folder(tmp_path / "library", 2)
    (path / "part.pdf").write_bytes(made.pdf([], [b"0 0 9 9 re f", made.drawn(["Two."])]))
    note = "2 pages; page 1 is without text"
    words = "ingest", path, "--model", "tiny", "--to"
    printed = run(*words, f"file://{tmp_path}/printed")
    assert printed.out.startswith("3 files: 3 read;") and printed.status == 0
    assert f"note: part.pdf: {note}\n" in printed.err
    told = run(*words, f"file://{tmp_path}/json", "--json").json
    assert told["notes"] == [{"document": "part.pdf", "notes": [note]}]
    assert document(f"file://{tmp_path}/json", "part.pdf").notes == [note]


def test_a_large_library_is_searched_in_two_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    url = f"file://{tmp_path}/many"
    with create(tmp_path / "m") as store:
        add(store, "large", 1, 300)
        publish_memory(store, url)
    assert not index_library(url, lambda done, tokens: None)
    monkeypatch.setattr(first_stage, "PAYING", 12 * 300)
    told: list[tuple[int, int]] = []
    assert index_library(url, lambda *given: told.append(given))
    assert told[-1] == (12 * 300, 12 * 300)
    assert read_newest(open_object_store(url)).lists
    assert not index_library(url, lambda done, tokens: None)


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_an_ingest_killed_at_any_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    monkeypatch.setattr(library_ingest, "_LEAST", 1)  # each a batch
    monkeypatch.setattr(library_ingest, "_COMMIT_SECONDS", 0.0)  # and a manifest
    path = folder(tmp_path / "library", 5)
    undisturbed = f"file://{tmp_path}/undisturbed"
    place = watched(monkeypatch, undisturbed)
    ingest(path, job(undisturbed))
    expected = content(undisturbed, tmp_path)
    calls = place.calls
    every = [at for at in range(len(calls)) if answered is False or calls[at][0] != "get"]
    step = 1 if "MEMSTORE_KILLS" in os.environ else 9
    read: set[int] = set()
    for end in every[::step]:
        url = f"file://{tmp_path}/{answered}-{end}"
        place = watched(monkeypatch, url)

        def die(number: int, name: str, what: object, end: int = end) -> None:
            if number >= end:
                raise Killed

        setattr(place, "after" if answered else "before", die)
        with pytest.raises((Killed, StoreUnavailable)):
            ingest(path, job(url))
        watched(monkeypatch, url)
        _, _, told = ingest(path, job(url))
        read.add(sum(one.status == "read" for one in told.values()))
        assert content(url, tmp_path) == expected, f"ended at {calls[end]}"
        clean(url)
    assert 5 in read and len(read) > 3  # nothing was published, or some of it


def test_an_ingest_that_fails_publishes_its_finished_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_ingest, "_LEAST", 1)  # each a batch
    path, url, engine = folder(tmp_path / "library", 4), f"file://{tmp_path}/many", Here()

    def fail(batch: int) -> None:
        if batch == 2:
            raise MemstoreError("the cluster is lost")

    engine.before = fail
    with pytest.raises(MemstoreError, match="lost"):
        ingest(path, job(url), engine)
    _, number, told = ingest(path, job(url))
    assert number == 2 and [one.status for one in told.values()] == [*["there"] * 2, *["read"] * 2]
    clean(url)


def test_pruned_documents_are_ingested_again(tmp_path: Path) -> None:
    path, url = folder(tmp_path / "library", 6), f"file://{tmp_path}/many"
    objects, engine = open_object_store(url, make=True), Here()
    ingest(folder(tmp_path / "other", 1), job(url))  # a manifest, without which nothing is pruned
    (path / "000.txt").write_text("Another text about a lamp.\n")
    engine.before = lambda batch: prune(objects, grace=0.0)
    with pytest.raises(StoreUnavailable, match="run the command again"):
        ingest(path, job(url, replace=True), engine)
    _, number, told = ingest(path, job(url, replace=True))
    assert number == 2 and "read" in {one.status for one in told.values()}
    clean(url)


# Others at the same time


def push_and_remove(url: str, path: Path) -> list[str]:
    pushed = folder(path / "pushed", 2)
    for number in range(2):
        (pushed / f"{number:03}.txt").rename(pushed / f"pushed-{number}.txt")
    one_process(pushed, path / "memory", url)
    unpublish(open_object_store(url), ["pushed-0.txt"])
    return [*(f"{number:03}.txt" for number in range(6)), "pushed-1.txt"]


def take_a_name(url: str, path: Path) -> list[str]:
    other = folder(path / "other", 1)
    (other / "000.txt").write_text("What others say of it.\n")
    ingest(other, job(url))
    return [f"{number:03}.txt" for number in range(6)]


@pytest.mark.parametrize(
    ("others", "when"), [(push_and_remove, 1), (take_a_name, 0), (take_a_name, 1)]
)
def test_a_library_ingest_keeps_documents_published_meanwhile_by_others(
    others: Callable[[str, Path], list[str]], when: int, tmp_path: Path
) -> None:
    path, url = folder(tmp_path / "library", 6), f"file://{tmp_path}/many"
    engine, names = Here(), list[str]()
    engine.before = lambda batch: names.extend(others(url, tmp_path)) if batch == when else None
    progress, _, told = ingest(path, job(url), engine)
    found = [*read_newest(open_object_store(url)).entries.values()]
    assert [entry.row.name for entry in found] == names
    assert {one.status for one in told.values()} <= {"read", "there", "refused"}
    if others is take_a_name:  # another text of that name: it stays
        assert told["000.txt"].status == "refused" and "by another" in told["000.txt"].error[1]
        assert progress.documents == {"read": 5, "refused": 1}
        assert document(url, "000.txt").tokens < document(url, "002.txt").tokens
    else:
        assert progress.documents["refused"] == 0
    clean(url)


def test_directories_of_killed_workers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(reading.tempfile, "tempdir", str(tmp_path))
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    left = tmp_path / f"{reading._PREFIX}{child}-abc"
    used = tmp_path / f"{reading._PREFIX}{os.getpid()}-abc"
    others = tmp_path / f"{reading._PREFIX}notes"
    for path in (left, used, others):
        (path / "memory").mkdir(parents=True)
    ingest(folder(tmp_path / "library", 2), job(f"file://{tmp_path}/many"))
    assert not left.exists() and used.exists() and others.exists()
    assert [p for p in tmp_path.glob(f"{reading._PREFIX}*") if p not in (used, others)] == []
