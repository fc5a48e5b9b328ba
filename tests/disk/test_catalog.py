"""The tables beside the blocks: signature, documents and their states, tokens, landmark keys."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.block import RecordKey
from memstore.disk.format.document import Document
from memstore.disk.format.runs import KeyRun
from memstore.disk.format.signature import Signature
from memstore.disk.format.text_parts import encode_tokens
from memstore.disk.lmdb.database import Transaction
from memstore.disk.tables import catalog as catalog_module
from memstore.disk.tables.catalog import Catalog
from memstore.errors import (
    InvalidConfig,
    InvalidInput,
    MemoryExists,
    MemoryNotFound,
    NewerFormat,
    OlderFormat,
)
from memstore.tiers.raw_bits import raw_view

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


WRITE = bytes(range(16))


def landmark_keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 2, 6, generator=torch.Generator().manual_seed(seed)).to(
        torch.bfloat16
    )


def make_document(catalog: Catalog, name: str, *, blocks: int = 10) -> Document:
    """A ready document with records, landmark runs of 4 blocks and token parts of 16 tokens."""

    def work(txn: Transaction) -> Document:
        number = catalog.new_document_id(txn)
        k = raw_view(torch.full((blocks, 2, 4, 6), float(number), dtype=torch.bfloat16))
        records = [
            (RecordKey(number, block, layer), record)
            for layer in range(3)
            for block, record in enumerate(
                catalog.blocks.encode(RecordKey(number, 0, layer), k, k, [4] * blocks, WRITE)
            )
        ]
        size = sum(catalog.blocks.put(txn, key, record) for key, record in sorted(records))
        for first in range(0, blocks, 4):
            count = min(4, blocks - first)
            ids = range(4 * first, 4 * (first + count))
            catalog.texts.put_part(txn, number, 4 * first, encode_tokens(10 * first, ids))
            for layer in (1, 2):
                keys = raw_view(landmark_keys(count, seed=first + layer))
                catalog.runs.put(txn, number, layer, KeyRun(first, keys))
        document = Document(
            number, name, "ready", tokens=4 * blocks, blocks=blocks, bytes=size, created=1.5
        )
        document = replace(document, write=WRITE)
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


def test_a_memory_remembers_its_model_codec_and_quota(path):
    Catalog.create(path, SIGNATURE, codec="raw", quota=5_000_000).close()
    for quota in (5_000_000, 1_000_000, None):
        with closing(Catalog.open(path)) as catalog:
            catalog.set_quota(quota)
        with closing(Catalog.open(path, read_only=True)) as catalog:
            assert (catalog.signature, catalog.codec, catalog.quota) == (SIGNATURE, "raw", quota)
    with pytest.raises(MemoryExists):
        Catalog.create(path, SIGNATURE)


def test_an_unknown_codec_makes_no_memory(path):
    with pytest.raises(InvalidConfig, match="'lz9'"):
        Catalog.create(path, SIGNATURE, codec="lz9")
    with pytest.raises(MemoryNotFound):
        Catalog.open(path)


@pytest.mark.parametrize("quota", [1.5, -1, True, "a", 1 << 62, 1 << 64])
def test_what_is_no_quota_is_refused_before_anything_is_written(path, catalog, quota):
    with pytest.raises(InvalidInput, match="whole number of bytes"):
        catalog.set_quota(quota)
    with pytest.raises(InvalidInput, match="whole number of bytes"):
        Catalog.create(path / "new", SIGNATURE, quota=quota)
    assert not (path / "new").exists()
    catalog.close()
    with closing(Catalog.open(path)) as reopened:
        assert reopened.quota is None
        reopened.set_quota((1 << 62) - 1)


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


def test_a_file_with_named_tables_is_of_an_older_version(path):
    path.mkdir()
    with lmdb.open(str(path), max_dbs=2) as environment:
        for name in (b"blocks", b"meta"):
            environment.open_db(name)
    with pytest.raises(OlderFormat, match="older version; read the documents"):
        Catalog.open(path)


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
