"""The disk tier: records read back into any slots, and damaged or missing ones are named."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memstore.block import KV_DTYPES, BlockKey, RecordKey
from memstore.disk.format.codec import CODECS
from memstore.disk.lmdb.transaction import Transaction, record_key
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptBlock
from memstore.tiers.cascade import DiskTier
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.slots import LowestTier
from support.disk_records import (
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    ROWS,
    decode,
    encode,
    keys_and_values,
    make,
    new_slab,
)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[tuple[Catalog, DiskTier]]:
    catalog, disk = make(tmp_path / "memory")
    yield catalog, disk
    catalog.close()


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_units_in_any_order_land_in_their_slots_as_they_are_stored(tmp_path, codec, dtype):
    catalog, disk = make(tmp_path / "memory", codec, dtype)
    source: LowestTier = disk
    rng = random.Random(3)
    every = [
        BlockKey(document, layer, block, head)
        for document in (1, 2)
        for layer in range(LAYERS)
        for block in range(BLOCKS)
        for head in range(HEADS)
    ]
    for count in (0, 1, 5, len(every)):
        units = rng.sample(every, count)
        slots = rng.sample(range(len(every) + 3), count)
        slab = new_slab(len(every) + 3, dtype)
        k, v = slab.unbind(1)
        lengths, _ = source.read_from(units, slab, [(slot,) for slot in slots])
        for unit, slot, length in zip(units, slots, lengths, strict=True):
            want_k, want_v = keys_and_values(unit.document, unit.layer, unit.block, dtype)
            assert length == (1 if unit.block == BLOCKS - 1 else ROWS)
            if not CODECS[codec].lossless:
                record = encode(want_k, want_v, length, codec, dtype)
                want_k, want_v, _ = decode(record, (HEADS, ROWS, DIM), dtype)
            assert torch.equal(k[slot, :length], want_k[unit.head, :length])
            assert torch.equal(v[slot, :length], want_v[unit.head, :length])
            assert not raw_view(k[slot, length:]).any() and not raw_view(v[slot, length:]).any()
        untouched = sorted(set(range(len(every) + 3)) - set(slots))
        assert bool((k[untouched] == 9).all()) and bool((v[untouched] == 9).all())
    catalog.close()


def test_a_missing_record_of_a_document_is_damage(memory):
    catalog, disk = memory
    catalog.database.write(lambda txn: txn.delete("blocks", record_key(RecordKey(1, 4, 1))))
    slab = new_slab(1)
    with pytest.raises(CorruptBlock, match="document 1, block 4, layer 1"):
        disk.read_from([BlockKey(1, 1, 4, 0)], slab, [(0,)])


def test_a_record_moved_to_another_key_is_refused(memory):
    catalog, disk = memory

    def swap(txn: Transaction) -> None:
        record = bytes(txn.view("blocks", record_key(RecordKey(1, 4, 1))))
        catalog.blocks.put(txn, RecordKey(1, 5, 1), record)

    catalog.database.write(swap)
    slab = new_slab(1)
    with pytest.raises(CorruptBlock, match=r"block 5, layer 1 is damaged .*of block 4, layer 1"):
        disk.read_from([BlockKey(1, 1, 5, 0)], slab, [(0,)])


def test_a_record_of_another_write_is_refused(memory):
    catalog, disk = memory
    slab = new_slab(2)
    units = [BlockKey(1, 0, 3, 0), BlockKey(1, 0, 4, 0)]
    disk.read_from(units, slab, [(0,), (1,)])

    def work(txn: Transaction) -> None:
        catalog.put_document(txn, replace(catalog.document(txn, 1), write=b"another, 16 byte"))

    catalog.database.write(work)
    catalog._writes.clear()  # no document's write changes
    with pytest.raises(
        CorruptBlock, match=r"document 1, block 3, layer 0 is damaged .*another write"
    ):
        disk.read_from(units, slab, [(0,), (1,)])
    disk.read_from([BlockKey(2, 0, 3, 0)], slab, [(0,)])
