"""The catalog of a memory: signature, format, codec, and rows of documents."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memstore.disk.format.document import Document
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables import catalog as catalog_module
from memstore.disk.tables.catalog import Catalog
from memstore.errors import InvalidConfig, MemoryNotFound, NewerFormat, OlderFormat

SIGNATURE = Signature(
    weights="a1" * 32,
    tokenizer="b2" * 32,
    architecture={"rope_theta": 10000.0, "block_size": 4},
    kv_dtype="bfloat16",
    num_layers=3,
    memory_layers=(1, 2),
    num_kv_heads=2,
    head_dim=6,
    block_size=4,
)


def make_document(catalog: Catalog, name: str) -> Document:
    """The row of a new document."""

    def work(txn: Transaction) -> Document:
        document = Document(catalog.new_number(txn), name, "ready")
        catalog.put_document(txn, document)
        return document

    return catalog.database.write(work)


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    catalog = Catalog.create(path, SIGNATURE)
    yield catalog
    catalog.close()


# The memory itself


def test_an_unknown_codec_makes_no_memory(path):
    with pytest.raises(InvalidConfig, match="'lz9'"):
        Catalog.create(path, SIGNATURE, codec="lz9")
    with pytest.raises(MemoryNotFound):
        Catalog.open(path)


@pytest.mark.parametrize(
    "by, error, words",
    [(1, NewerFormat, "update memstore"), (-1, OlderFormat, "older version; ingest the documents")],
)
def test_a_memory_of_another_format_is_refused_in_one_line(path, monkeypatch, by, error, words):
    with monkeypatch.context() as patch:
        patch.setattr(catalog_module, "FORMAT", catalog_module.FORMAT + by)
        Catalog.create(path, SIGNATURE).close()
    with pytest.raises(error, match=words) as caught:
        Catalog.open(path)
    assert "\n" not in str(caught.value)


def test_a_signature_survives_and_says_what_differs():
    assert Signature.from_dict(SIGNATURE.to_dict()) == SIGNATURE
    assert SIGNATURE.difference(SIGNATURE) == []
    other = replace(
        SIGNATURE, weights="ff" * 32, head_dim=8, architecture={"rope_theta": 5e5, "cmt": True}
    )
    differing = ["weights", "head_dim", "block_size", "cmt", "rope_theta"]
    assert SIGNATURE.difference(other) == differing


# Documents


def test_ids_are_never_given_out_twice(path, catalog):
    assert [make_document(catalog, name).id for name in "abc"] == [1, 2, 3]
    catalog.database.write(lambda txn: catalog.delete_document(txn, 3))
    catalog.close()
    reopened = Catalog.open(path)
    assert make_document(reopened, "d").id == 4
    reopened.close()
