"""A memory of many documents: what several readers see after many changes."""

from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import torch

from memstore.disk.format.document import Document
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from support.synthetic_documents import DIM, HEADS, SETTINGS, SIGNATURE, ingest, is_whole, opened


def put(catalog: Catalog, txn: Transaction, name: str) -> None:
    number = catalog.new_number(txn)
    catalog.put_document(txn, Document(number, name, "ready", settings=SETTINGS))


def filled(path: Path, documents: int) -> Path:
    """A memory of `documents` rows without content, written in one transaction."""

    def work(txn: Transaction) -> None:
        for number in range(1, documents + 1):
            put(catalog, txn, f"old {number}")

    with closing(Catalog.create(path, SIGNATURE)) as catalog:
        catalog.database.write(work)
    return path


def test_readers_that_refresh_often_or_rarely_see_the_same_documents(tmp_path: Path) -> None:
    """Whatever was missed, few changes or more than the memory tells of."""
    random, path = Random(1), filled(tmp_path / "memory", 30)
    with opened(path) as store, opened(path) as often, opened(path) as seldom:
        looking = {often: 5, seldom: 270}
        for reader in looking:
            reader.retrieval.landmarks([]).search(1, torch.zeros(HEADS, 1, DIM), [], 1)
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


@pytest.mark.parametrize("what", ["damaged", "missing"])
def test_all_rows_are_read_again_when_the_log_of_changes_is_missing_or_damaged(
    tmp_path: Path, what: str
) -> None:
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
