"""A memory of many documents: what writing, forgetting and noticing changes read, counted in rows;
what several readers then see.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import torch

from memstore.disk.format.document import Document
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.changes import Changes, read_changes
from memstore.disk.tables.run_table import RunTable
from memstore.errors import DocumentNotFound
from memstore.store.memory_store import MemoryStore
from support.synthetic_documents import (
    DIM,
    HEADS,
    SETTINGS,
    SIGNATURE,
    check_content,
    ingest,
    is_whole,
)

BUDGET = 1 << 20
SECONDS = 100  # until a test that waits has failed


def filled(path: Path, documents: int) -> Path:
    """A memory of so many documents, empty but for their rows, in one transaction."""

    def work(txn: Transaction) -> None:
        for _ in range(documents):
            number = catalog.new_document_id(txn)
            catalog.put_document(txn, Document(number, f"old {number}", "ready", settings=SETTINGS))

    with closing(Catalog.create(path, SIGNATURE)) as catalog:
        catalog.database.write(work)
    return path


def opened(path: Path, **options: bool) -> MemoryStore:
    return MemoryStore.open(path, SIGNATURE, host_budget=BUDGET, **options)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the rows and the documents' landmark keys that are read from now on."""
    counts: Counter[str] = Counter()
    all_rows, row, landmarks = Catalog.documents, Catalog.row, RunTable.values

    def documents(self: Catalog, txn: Transaction) -> list[Document]:
        found = all_rows(self, txn)
        counts["rows"] += len(found)
        return found

    def one_row(self: Catalog, txn: Transaction, document: int) -> Document | None:
        counts["rows"] += 1
        return row(self, txn, document)

    def keys(self: RunTable, txn: Transaction, document: int) -> Iterator[object]:
        counts["landmarks"] += 1
        return landmarks(self, txn, document)

    monkeypatch.setattr(Catalog, "documents", documents)
    monkeypatch.setattr(Catalog, "row", one_row)
    monkeypatch.setattr(RunTable, "values", keys)
    return counts


def test_writing_and_forgetting_read_as_little_among_many_documents_as_among_few(
    tmp_path: Path, reads: Counter[str]
) -> None:
    counted = []
    for documents in (20, 400):
        path = filled(tmp_path / str(documents), documents)
        with opened(path) as store, opened(path, read_only=True) as reader:
            for one in (store, reader):
                one.retrieval.search_landmarks(1, torch.zeros(HEADS, 1, DIM), [], 1)
            reads.clear()
            book = ingest(store, "book", 100)
            check_content(reader, book, text=1)
            ingest(store, "book", 200, mode="append")
            ingest(store, "book", 90, text=2, mode="replace")
            check_content(reader, reader.document("book"), text=2)
            store.export_document("book", tmp_path / "book")
            store.forget("book")
            store.import_document(tmp_path / "book", "again")
            assert reader.document("again").tokens == 90
            with pytest.raises(DocumentNotFound):
                reader.document("book")
            counted.append(dict(reads))
            assert len(reader.documents()) == documents + 1
    assert counted[0] == counted[1] and counted[1]["rows"] < 200


def test_a_memory_is_opened_and_listed_by_one_walk_over_its_rows(
    tmp_path: Path, reads: Counter[str]
) -> None:
    path = filled(tmp_path / "memory", 300)
    with opened(path) as store:
        for _ in range(3):
            assert len(store.documents()) == len(store.ready()) == store.stats()["documents"] == 300
            assert store.document("old 7").id == 7
        assert reads == {"rows": 300}  # and no landmark keys


def test_readers_that_look_often_seldom_or_late_see_the_same_documents(tmp_path: Path) -> None:
    """Whatever was missed, few changes or more than the memory tells of."""
    random, path = Random(1), filled(tmp_path / "memory", 30)
    with opened(path) as store, opened(path) as often, opened(path) as seldom:
        looking = {often: 5, seldom: 270}
        for reader in looking:
            reader.retrieval.search_landmarks(1, torch.zeros(HEADS, 1, DIM), [], 1)
        for step in range(1, 541):
            names = [document.name for document in store.documents()]
            if len(names) < 20 or random.random() < 0.4:
                with closing(Catalog.open(path)) as catalog:
                    catalog.database.write(lambda txn, step=step, catalog=catalog: put(
                        catalog, txn, f"new {step}"
                    ))  # fmt: skip
            else:
                store.forget(random.choice(names))
            for reader, every in looking.items():
                if step % every == 0:
                    with opened(path) as fresh:
                        assert reader.documents() == fresh.documents() == store.documents()
                        for document in fresh.documents():
                            assert reader.document(document.name) == document


def put(catalog: Catalog, txn: Transaction, name: str) -> None:
    number = catalog.new_document_id(txn)
    catalog.put_document(txn, Document(number, name, "ready", settings=SETTINGS))


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_all_rows_are_read_where_what_tells_of_changes_is_gone(tmp_path: Path, what: str) -> None:
    path = filled(tmp_path / "memory", 10)

    def spoil(txn: Transaction) -> None:
        txn.delete("meta", b"changes")
        if what == "damaged":
            txn.put("meta", b"changes", b"x" * 50)
        txn.delete_range("documents", (3).to_bytes(8, "big"), (4).to_bytes(8, "big"))

    with opened(path) as store, closing(Catalog.open(path)) as catalog:
        assert len(store.documents()) == 10
        catalog.database.write(spoil)
        assert len(store.documents()) == 9
        ingest(store, "book", 10)
        store.forget("old 5")
        with opened(path) as fresh:
            assert store.documents() == fresh.documents() and len(fresh.documents()) == 9
    assert is_whole(path)


def test_changes_tell_what_was_missed_or_that_it_is_not_known() -> None:
    now = Changes(b"a" * 8, 12, (4, 5, 4))
    assert now.since(now) == set()
    assert now.since(Changes(b"a" * 8, 11)) == {4}
    assert now.since(Changes(b"a" * 8, 9)) == {4, 5}
    for seen in (None, Changes(b"a" * 8, 8), Changes(b"a" * 8, 13), Changes(b"b" * 8, 11)):
        assert now.since(seen) is None


def test_few_changes_are_told_of_however_many_there_were(tmp_path: Path) -> None:
    path = filled(tmp_path / "memory", 1000)
    with closing(Catalog.open(path)) as catalog, catalog.database.read() as txn:
        changes = read_changes(txn)
        assert changes.last == 1000 and changes.documents[-1] == 1000
        assert len(txn.get("meta", b"changes")) < 2000  # it lies in a page with others


def test_all_but_one_of_many_documents_are_forgotten_and_compacted(tmp_path: Path) -> None:
    path = filled(tmp_path / "memory", 200)
    with opened(path) as store:
        book = ingest(store, "book", 400)
        for document in store.documents():
            if document.name != "book":
                store.forget(document.name)
        before, after = store.compact()
        assert after < before and store.documents() == [book]
        check_content(store, book, text=1)
        check_content(store, ingest(store, "next", 40, text=2), text=2)
    assert is_whole(path)


def test_documents_are_listed_and_found_while_others_come_and_go(tmp_path: Path) -> None:
    path = filled(tmp_path / "memory", 50)
    failures: list[BaseException] = []
    done = threading.Event()
    with opened(path) as store, opened(path) as other:
        kept = {document.name for document in store.documents()}

        def look(one: MemoryStore) -> Callable[[], None]:
            def run() -> None:
                try:
                    while not done.is_set():
                        rows = one.documents()
                        assert kept <= {row.name for row in rows}
                        assert [row.id for row in rows] == sorted({row.id for row in rows})
                        assert one.document("old 1").id == 1 and one.stats()["documents"] >= 50
                        one.tokens("old 2")
                except BaseException as error:
                    failures.append(error)

            return run

        threads = [threading.Thread(target=look(one)) for one in (store, store, other)]
        for thread in threads:
            thread.start()
        for turn in range(12):
            ingest(store if turn % 2 else other, "comes", 20, text=turn)
            store.forget("comes")
        done.set()
        for thread in threads:
            thread.join(SECONDS)
    assert not failures
