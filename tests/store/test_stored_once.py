"""A passage is stored once for all documents that hold it, and is removed with the last of them."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

import msgpack
import pytest
import torch

from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import number_key
from memstore.errors import MemoryNotFound
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document
from memstore.store.verify import verify_memory
from support import killed_calls
from support.fork_server import KILLED, PASSAGES, RIGHT, ForkServer, read_passages_job, shared_job
from support.passage_documents import (
    SETTINGS,
    check_content,
    ingest,
    ingest_known,
    landmarks,
    passages,
)
from support.selected_documents import create, words
from support.synthetic_documents import is_whole, opened

COUNT = 40
SECONDS = int(os.environ.get("MEMSTORE_LOAD_SECONDS", "1"))
PROCESSES = 8 if SECONDS > 60 else 4
CALLS = int(os.environ.get("MEMSTORE_CALLS", "4"))  # at which of them a job is killed


@pytest.fixture
def store(tmp_path: Path):
    with create(tmp_path / "memory", codec="raw") as store:
        yield store


def told(store: MemoryStore) -> dict[bytes, int]:
    """References of every passage, by digest."""
    catalog = store._catalog
    with catalog.database.read() as txn:
        return {row.digest: row.references for row in catalog.passages.all(txn)}


def records(store: MemoryStore) -> int:
    with store._catalog.database.read() as txn:
        return sum(1 for _ in txn.scan("blocks"))


def ingest_text(store: MemoryStore, name: str, count: int) -> Document:
    """A document of passages without keys and values."""
    kept = {"landmarks": landmarks(1, 0, count), "words": words(1, 0, count)}
    with store.write_document(name, source_hash="1:", settings=SETTINGS) as writer:
        writer.add_passages(passages(1, 0, count), [], given=[], **kept)
        return writer.finish()


def test_the_same_text_under_another_name_is_stored_once(store) -> None:
    ingest(store, "a", COUNT)
    there = records(store)
    assert there == COUNT
    assert ingest_known(store, "b", COUNT) == 0
    assert records(store) == there and set(told(store).values()) == {2}
    first, second = store.document("a"), store.document("b")
    assert first.bytes == second.bytes
    assert store.retrieval.stored_at([(first.id, 3)]) == store.retrieval.stored_at([(second.id, 3)])
    check_content(store, second, 1)
    store.forget("a")
    check_content(store, store.document("b"), 1)
    assert records(store) == there and set(told(store).values()) == {1}
    store.forget("b")
    assert not records(store) and not told(store) and is_whole(store.path)


def test_passages_forgotten_during_a_write_are_computed_by_questions(store) -> None:
    ingest(store, "a", COUNT)
    some = passages(1, 0, COUNT)
    with store.write_document("b", source_hash="b", settings=SETTINGS) as writer:
        assert None not in writer.known(some)
        store.forget("a")
        kept = {"landmarks": landmarks(1, 0, COUNT), "words": words(1, 0, COUNT)}
        writer.add_passages(some, [], given=[], **kept)
        document = writer.finish()
    assert not records(store) and store.retrieval.stored_at([(document.id, 0)]) == [None]
    assert set(told(store).values()) == {1} and is_whole(store.path)


def test_passages_can_be_stored_as_text_alone(store) -> None:
    document = ingest_text(store, "a", 2)
    assert store.retrieval.stored_at([(document.id, 0)]) == [None] and not records(store)
    check_content(store, ingest(store, "b", 2), 1)
    check_content(store, store.document("a"), 1)
    assert is_whole(store.path)


def test_erasing_keeps_passages_that_other_documents_hold(store) -> None:
    ingest(store, "a", COUNT)
    ingest_known(store, "b", COUNT // 2)
    store.forget("a", erase=True)
    check_content(store, store.document("b"), 1)
    assert records(store) == COUNT // 2 and is_whole(store.path)


def test_an_import_shares_passages_that_are_stored_already(store, tmp_path) -> None:
    ingest(store, "a", COUNT)
    export_document(store, "a", tmp_path / "file")
    there = records(store)
    check_content(store, import_document(store, tmp_path / "file", "b"), 1)
    assert records(store) == there and set(told(store).values()) == {2}
    store.forget("a")
    check_content(store, store.document("b"), 1)
    assert is_whole(store.path)


def change_row(store: MemoryStore, **what: int) -> None:
    catalog = store._catalog

    def work(txn) -> None:
        row = next(catalog.passages.all(txn))._replace(**what)
        value = msgpack.packb([row.digest, row.references, row.bytes, *row.home])
        txn.put_checked("passages", number_key(row.number), value)

    catalog.database.write(work)


@pytest.mark.parametrize("references", [0, 1, 7])
def test_wrong_reference_counts_are_found_and_repaired(store, references: int) -> None:
    ingest(store, "a", COUNT)
    ingest_known(store, "b", COUNT)
    change_row(store, references=references)
    report = store.verify()
    assert [problem.document for problem in report.problems] == [None]
    assert f"{references} references instead of 2" in report.problems[0].what
    repaired = store.verify(repair=True)
    assert not repaired.dropped and store.verify().clean
    for name in ("a", "b"):
        check_content(store, store.document(name), 1)
    assert set(told(store).values()) == {2}


@pytest.mark.parametrize("lost", ["digest", "row", "references"])
def test_a_repair_mends_the_tables_of_passages_and_drops_no_document(store, lost: str) -> None:
    """A missing digest costs nothing, a missing row its keys and values; a passage without
    references goes.
    """
    document = ingest(store, "a", COUNT)
    catalog = store._catalog

    def work(txn) -> None:
        first = next(catalog.passages.all(txn))
        if lost == "digest":
            txn.delete("digests", first.digest)
        elif lost == "row":
            txn.delete("passages", number_key(first.number))
        else:
            (row,) = catalog.passages.refer(txn, 1, 0, [b"\1" * 16], catalog.new_number)
            catalog.passages.store(txn, row, b"no record")

    catalog.database.write(work)
    assert not store.verify().clean
    assert not store.verify(repair=True).dropped and store.verify().clean
    assert records(store) == COUNT - (lost == "row")
    assert (store.retrieval.stored_at([(document.id, 0)]) == [None]) == (lost == "row")


def test_passages_of_different_codecs_are_stored_separately(tmp_path) -> None:
    for codec in ("raw", "zstd"):
        with create(tmp_path / codec, codec=codec) as store:
            ingest(store, "a", 9)
            export_document(store, "a", tmp_path / f"{codec}.file")
    with opened(tmp_path / "raw") as store:
        document = import_document(store, tmp_path / "zstd.file", "b")
        assert document.codec == "zstd" and document.bytes != store.document("a").bytes
        for name in ("a", "b"):
            check_content(store, store.document(name), 1)
        assert records(store) == 2 * 9
    assert verify_memory(tmp_path / "raw").clean


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, Path]:
    """A memory and an export, for shared_job."""
    origin, export = tmp_path / "origin", tmp_path / "export"
    with create(origin, codec="zstd") as store:
        ingest(store, "goes", PASSAGES)
        ingest(store, "erased", PASSAGES // 2)
        ingest(store, "stays", PASSAGES // 3)
        ingest(store, "changes", PASSAGES // 2, text=2)
        export_document(store, "goes", export)
    return origin, export


def check_after_kill(children: ForkServer, memory: Path, export: Path) -> None:
    """A memory is sound after shared_job was killed, and complete after it ran again."""
    for job in ("verify_job", "read_passages_job"):
        assert children.run(job, memory) == RIGHT
    assert shared_job(str(memory), str(export)) == RIGHT
    assert read_passages_job(str(memory)) == RIGHT
    with opened(memory) as store:
        names = {document.name: document.blocks for document in store.documents()}
        assert names == {
            "stays": PASSAGES // 3,
            "copy": PASSAGES,
            "changes": PASSAGES // 2,
            "comes": PASSAGES,
        }
        assert records(store) == PASSAGES and is_whole(memory)
        assert sum(told(store).values()) == sum(names.values())
    shutil.rmtree(memory)


@pytest.mark.skipif(not killed_calls.SUPPORTED, reason="system calls are traced on Linux alone")
@pytest.mark.timeout(7200 if CALLS > 100 else 300)
def test_changes_killed_at_any_system_call_lose_nothing_and_keep_reference_counts_right(
    children: ForkServer, tmp_path: Path, begun: tuple[Path, Path]
) -> None:
    rng, (origin, export), told_calls = Random(12), begun, tmp_path / "calls"

    def killed(call: int, memory: Path) -> int:
        return children.run("killed_job", told_calls, call, "shared_job", memory, export)

    assert killed(0, shutil.copytree(origin, tmp_path / "undisturbed")) == RIGHT
    calls = int(told_calls.read_text())
    assert calls > 50
    for call in sorted(rng.sample(range(1, calls + 1), min(CALLS, calls))):
        memory = shutil.copytree(origin, tmp_path / str(call))
        assert killed(call, memory) in (KILLED, RIGHT), call
        check_after_kill(children, memory, export)


@pytest.mark.skipif(not killed_calls.SUPPORTED, reason="system calls are traced on Linux alone")
@pytest.mark.timeout(7200 if CALLS > 100 else 300)
def test_an_export_or_publication_killed_at_any_call_is_unchanged_or_complete(
    children: ForkServer, tmp_path: Path, begun: tuple[Path, Path]
) -> None:
    rng, (memory, export), told_calls = Random(12), begun, tmp_path / "calls"
    older = tmp_path / "older"
    with opened(memory) as store:
        export_document(store, "stays", older)

    def killed(call: int) -> tuple[int, Path, str]:
        file, url = tmp_path / f"{call}.file", f"file://{tmp_path}/{call}"
        shutil.copyfile(older, file)
        return (
            children.run("killed_job", told_calls, call, "leave_job", memory, file, url),
            file,
            url,
        )

    assert killed(0)[0] == RIGHT
    calls, new = int(told_calls.read_text()), export.read_bytes()
    assert calls > 20
    seen = set[bool]()
    for call in sorted({1, calls, *rng.sample(range(1, calls + 1), min(CALLS, calls))}):
        code, file, url = killed(call)
        assert code in (KILLED, RIGHT), call
        assert file.read_bytes() in (new, older.read_bytes())
        with suppress(MemoryNotFound):
            assert verify_memory(url).clean and verify_memory(url).documents in (3, 4)
        seen.add(file.read_bytes() == new)
        assert children.run("leave_job", memory, file, url) == RIGHT
        assert file.read_bytes() == new and verify_memory(url).documents == 3
        assert not [*tmp_path.glob("*.partial")]
    assert seen == {False, True} and verify_memory(memory).clean


@pytest.mark.timeout(3600 if SECONDS > 60 else 300)
def test_processes_that_write_read_and_forget_the_same_passages_harm_no_document(
    children: ForkServer, tmp_path: Path
) -> None:
    create(tmp_path / "memory", codec="zstd").close()
    assert children.run("crowd_job", tmp_path / "memory", SECONDS, PROCESSES) == RIGHT
    assert children.run("read_passages_job", tmp_path / "memory") == RIGHT
    assert verify_memory(tmp_path / "memory").clean
    with opened(tmp_path / "memory") as store:
        store.compact()
        for document in store.documents():
            check_content(store, document, int(document.source_hash.split(":")[0]))
            store.forget(document.name)
        assert not records(store) and not told(store)


# Computed passages


def test_a_computed_passage_of_a_forgotten_document_is_not_cached(tmp_path) -> None:
    with create(tmp_path / "m", codec="raw") as store:
        document = ingest_text(store, "book", 3)
        with opened(tmp_path / "m") as other:
            other.forget("book")
        held = store.tiers.host.bytes
        k = torch.ones(1, store.signature.head_dim, dtype=torch.float16)
        store.retrieval.take_computed(document.id, 0, k, k, 0.0)
        assert store.tiers.host.bytes == held
