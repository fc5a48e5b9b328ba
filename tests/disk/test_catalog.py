"""The tables beside the blocks: signature, documents and their states, tokens, landmark keys."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.disk.format.document import Document
from memstore.disk.format.signature import Signature
from memstore.disk.format.text_parts import encode_tokens
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables import catalog as catalog_module
from memstore.disk.tables.catalog import Catalog
from memstore.errors import InvalidConfig, MemoryExists, MemoryNotFound, NewerFormat, OlderFormat

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
        document = Document(catalog.new_document_id(txn), name, "ready")
        catalog.put_document(txn, document)
        return document

    return catalog.database.write(work)


def ids_of(
    catalog: Catalog, txn: Transaction, document: int, first: int = 0, end: int | None = None
) -> np.ndarray:
    """Its content token ids `first` to `end`, fewer where it ends."""
    parts = catalog.texts.token_parts(txn, document, first, end)
    some = [
        part.ids[max(0, first - part.first) : None if end is None else end - part.first]
        for part in parts
    ]
    return np.concatenate([np.zeros(0, np.int64), *some])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    catalog = Catalog.create(path, SIGNATURE)
    yield catalog
    catalog.close()


# The memory itself


def test_a_memory_remembers_its_model_and_codec(path):
    Catalog.create(path, SIGNATURE, codec="raw").close()
    with closing(Catalog.open(path, read_only=True)) as catalog:
        assert (catalog.signature, catalog.codec) == (SIGNATURE, "raw")
    with pytest.raises(MemoryExists):
        Catalog.create(path, SIGNATURE)


def test_an_unknown_codec_makes_no_memory(path):
    with pytest.raises(InvalidConfig, match="'lz9'"):
        Catalog.create(path, SIGNATURE, codec="lz9")
    with pytest.raises(MemoryNotFound):
        Catalog.open(path)


@pytest.mark.parametrize(
    "by, error, words",
    [(1, NewerFormat, "update memstore"), (-1, OlderFormat, "older version; read the documents")],
)
def test_another_format_is_refused_in_one_line(path, monkeypatch, by, error, words):
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
    words = "; ".join(SIGNATURE.difference(other))
    for part in (
        "weights a1a1a1a1a1a1 instead of ffffffffffff",
        "head_dim 6 instead of 8",
        "rope_theta 10000.0 instead of 500000.0",
        "cmt None instead of True",
        "block_size 4 instead of None",
    ):
        assert part in words
    assert "tokenizer" not in words and "memory_layers" not in words


# Documents


def test_ids_are_never_given_out_twice(path, catalog):
    assert [make_document(catalog, name).id for name in "abc"] == [1, 2, 3]
    catalog.database.write(lambda txn: catalog.delete_document(txn, 3))
    catalog.close()
    reopened = Catalog.open(path)
    assert make_document(reopened, "d").id == 4
    reopened.close()


# Tokens


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 20), max_size=8), data=st.data())
def test_any_span_of_tokens_reads_back(tmp_path_factory, sizes, data):
    catalog = Catalog.create(tmp_path_factory.mktemp("tokens") / "memory", SIGNATURE)
    ids = np.random.default_rng(0).integers(0, 2**32, sum(sizes))
    starts = [sum(sizes[:part]) for part in range(len(sizes))]

    def work(txn: Transaction) -> None:
        for document in (1, 2, 3):
            for first, size in zip(starts, sizes, strict=True):
                part = encode_tokens(5 * first, ids[first : first + size] ^ document)
                catalog.texts.put_part(txn, document, first, part)

    catalog.database.write(work)
    first = data.draw(st.integers(0, len(ids) + 2))
    end = data.draw(st.none() | st.integers(first, len(ids) + 5))
    with catalog.database.read() as txn:
        assert ids_of(catalog, txn, 2, first, end).tolist() == (ids[first:end] ^ 2).tolist()
        parts = list(catalog.texts.token_parts(txn, 2, first, end))
        assert [part.first for part in parts] == [
            start
            for start, size in zip(starts, sizes, strict=True)
            if start + size > first and (end is None or start < end)
        ]
        assert all(part.char_start == 5 * part.first for part in parts)
    catalog.close()
