"""The disk tier: what is written is read into any slots, and a damaged, missing or forgotten record
is named.
"""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from memstore.block import KV_DTYPES, BlockKey, RecordKey
from memstore.disk.format.codec import CODECS
from memstore.disk.format.document import Write
from memstore.disk.format.keys import record_key
from memstore.disk.lmdb.database import Transaction
from memstore.disk.lmdb.pages import Extent, KeyPage
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptBlock, DocumentNotFound
from memstore.tiers.disk_tier import DiskTier
from memstore.tiers.lease import Lease, UnitSource
from memstore.tiers.raw_bits import from_raw, raw_view
from memstore.tiers.stats import TierCounter, TierStats
from support.disk_records import (
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    ROWS,
    WRITE,
    keys_and_values,
    make,
    mapped,
    new_slab,
    share,
    uncached,
    write,
)
from support.records import decode, encode


@pytest.fixture(params=["as it is", "shared", "uncached", "mapped"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Records are read as it really is (the page cache holds them), by several threads, as if it
    held none of them, or from the mapped file.
    """
    for name, change in (("shared", share), ("uncached", uncached), ("mapped", mapped)):
        if request.param == name:
            change(monkeypatch)
    return str(request.param)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[tuple[Catalog, DiskTier]]:
    catalog, disk = make(tmp_path / "memory")
    yield catalog, disk
    catalog.close()


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_units_in_any_order_land_in_their_slots_as_they_are_stored(tmp_path, codec, dtype, way):
    catalog, disk = make(tmp_path / "memory", codec, dtype)
    source: UnitSource = disk
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
        lengths = source.read(units, slab, slots)
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


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize(
    "layout", ["in a row", "a gap between records", "turned round", "a record twice"]
)
def test_whole_records_land_right_however_their_slots_lie(tmp_path, codec, layout, way):
    catalog, disk = make(tmp_path / "memory", codec)
    # the last but one is short
    blocks = [7, 2, 2 if layout == "a record twice" else 300, BLOCKS - 1, 0]
    want = keys_and_values(1, 0, 300)
    catalog.database.write(lambda txn: write(catalog, txn, RecordKey(1, 300, 0), *want))
    units = [BlockKey(1, 0, block, head) for block in blocks for head in range(HEADS)]
    slots = list(range(len(units)))
    if layout == "a gap between records":
        slots = [slot + slot // HEADS for slot in slots]
    elif layout == "turned round":
        slots.reverse()
    slab = new_slab(len(units) + len(blocks))
    lengths = disk.read(units, slab, slots)
    for unit, slot, length in zip(units, slots, lengths, strict=True):
        k, v = keys_and_values(1, 0, unit.block)
        assert length == (1 if unit.block == BLOCKS - 1 else ROWS)
        assert torch.equal(slab[slot, 0, :length], k[unit.head, :length])
        assert torch.equal(slab[slot, 1, :length], v[unit.head, :length])
    assert bool((slab[sorted(set(range(len(slab))) - set(slots))] == 9).all())
    catalog.close()


def test_one_unit_may_be_read_into_two_slots(memory, way):
    _, disk = memory
    slab = new_slab(2)
    k, v = slab.unbind(1)
    unit = BlockKey(1, 1, 3, 2)
    assert disk.read([unit, unit], slab, [0, 1]) == [ROWS, ROWS]
    assert torch.equal(k[0], k[1]) and torch.equal(v[0], keys_and_values(1, 1, 3)[1][2])


def test_what_the_page_cache_dropped_comes_from_the_disk_bit_for_bit(tmp_path):
    catalog, _ = make(tmp_path / "memory", "raw", documents=8)
    catalog.close()
    file = os.open(tmp_path / "memory" / "data.mdb", os.O_RDONLY)
    os.fsync(file)
    rng = random.Random(11)
    for count in (1, 20, 150):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        catalog = Catalog.open(tmp_path / "memory")
        disk = DiskTier(catalog)
        units = [
            BlockKey(
                rng.randint(1, 8),
                rng.randrange(LAYERS),
                rng.randrange(BLOCKS - 1),
                rng.randrange(HEADS),
            )
            for _ in range(count)
        ]
        slab = new_slab(count)
        k, v = slab.unbind(1)
        with catalog.database.read() if count == 20 else nullcontext():  # also inside a transaction
            assert disk.read(units, slab, range(count)) == [ROWS] * count
        for slot, unit in enumerate(units):
            want_k, want_v = keys_and_values(unit.document, unit.layer, unit.block)
            assert torch.equal(k[slot], want_k[unit.head]) and torch.equal(
                v[slot], want_v[unit.head]
            )
        catalog.close()
    os.close(file)


def test_uncommitted_records_are_read_inside_their_transaction(memory, way):
    catalog, disk = memory
    want_k, want_v = keys_and_values(2, 0, 300)
    slab = new_slab(2)
    k, v = slab.unbind(1)

    def work(txn: Transaction) -> None:
        write(catalog, txn, RecordKey(2, 300, 0), want_k, want_v)
        disk.read([BlockKey(2, 0, 300, 1), BlockKey(1, 0, 2, 1)], slab, [0, 1])

    catalog.database.write(work)
    assert torch.equal(k[0], want_k[1]) and torch.equal(v[1], keys_and_values(1, 0, 2)[1][1])


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("heads", [range(HEADS), [1]])
def test_the_disk_is_asked_for_what_the_page_cache_does_not_hold(
    tmp_path, monkeypatch, codec, heads
):
    catalog, disk = make(tmp_path / "memory", codec)
    asked: list[int] = []
    monkeypatch.setattr("memstore.disk.read.placed_read._WINDOW", 3)
    monkeypatch.setattr(
        "memstore.disk.read.placed_read.ask", lambda file, pieces: asked.append(min(pieces).offset)
    )
    true, lacking, partly = os.preadv, set[int](), False

    def preadv(file, buffers, offset, flags=0):
        if not flags or offset not in lacking:
            return true(file, buffers, offset)
        if partly:
            return true(file, [buffers[0][:1]], offset)
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", preadv)
    units = [BlockKey(1, 0, block, head) for block in range(6) for head in heads]
    with catalog.database.read() as txn:
        keys = [record_key(RecordKey(1, block, 0)) for block in range(6)]
        starts = [place.offset for place in txn.extents_of("blocks", keys) if place is not None]
    for first, last, some_of_it in ((6, 6, False), (2, 2, False), (0, 2, True), (5, 5, False)):
        lacking, partly = set(starts[first : last + 1]), some_of_it
        asked.clear()
        slab = new_slab(len(units))
        assert disk.read(units, slab, range(len(units))) == [ROWS] * len(units)
        for slot, unit in enumerate(units):
            k, v = keys_and_values(1, 0, unit.block)
            assert torch.equal(slab[slot, 0], k[unit.head])
            assert torch.equal(slab[slot, 1], v[unit.head])
        assert asked == (starts[first:] if partly else starts[first : last + 1])
    catalog.close()


def test_a_place_is_looked_up_anew_after_every_commit(tmp_path):
    catalog, _ = make(tmp_path / "memory", "raw")
    keys = [record_key(RecordKey(1, block, 1)) for block in range(4)]
    for turn in range(40):  # pages are used again by then, those of keys for other keys
        k, v = keys_and_values(1, turn, turn)
        key = RecordKey(1, turn % 4, 1)
        catalog.database.write(partial(write, catalog, key=key, k=k, v=v))
        with catalog.database.read() as txn:
            for one, place in zip(keys, txn.extents_of("blocks", keys), strict=True):
                assert place is not None
                assert os.pread(txn.file, place.size, place.offset) == txn.get("blocks", one)
    catalog.close()


def test_what_was_read_outlives_the_transaction_and_later_writes(memory):
    catalog, disk = memory
    slab = new_slab(1)
    k, v = slab.unbind(1)
    disk.read([BlockKey(1, 1, 3, 2)], slab, [0])
    catalog.database.write(lambda txn: catalog.delete_document(txn, 1))
    noise = torch.zeros(HEADS, ROWS, DIM, dtype=torch.float16)
    for block in range(50):
        catalog.database.write(
            lambda txn, block=block: write(catalog, txn, RecordKey(2, 100 + block, 0), noise, noise)
        )
    assert torch.equal(k[0], keys_and_values(1, 1, 3)[0][2]) and torch.equal(
        v[0], keys_and_values(1, 1, 3)[1][2]
    )


def test_a_block_is_read_whole(memory):
    catalog, _ = memory
    with catalog.database.read() as txn:
        k, v, length = catalog.blocks.get(txn, RecordKey(2, 5, 1), WRITE)
    want_k, want_v = keys_and_values(2, 1, 5)
    assert length == ROWS
    assert torch.equal(from_raw(k, "float16"), want_k)
    assert torch.equal(from_raw(v, "float16"), want_v)


def test_a_forgotten_or_unknown_document_is_not_found(memory, way):
    catalog, disk = memory
    slab = new_slab(2)
    catalog.database.write(lambda txn: catalog.delete_document(txn, 1))
    for document in (1, 77, -1, -5):
        with pytest.raises(DocumentNotFound, match=f"document {document} "):
            disk.read([BlockKey(2, 0, 0, 0), BlockKey(document, 0, 0, 0)], slab, [0, 1])


def test_a_missing_record_of_a_document_is_damage(memory, way):
    catalog, disk = memory
    catalog.database.write(lambda txn: txn.delete("blocks", record_key(RecordKey(1, 4, 1))))
    slab = new_slab(1)
    with pytest.raises(CorruptBlock, match="document 1, block 4, layer 1"):
        disk.read([BlockKey(1, 1, 4, 0)], slab, [0])
    with catalog.database.read() as txn, pytest.raises(CorruptBlock):
        catalog.blocks.get(txn, RecordKey(1, 99, 0), WRITE)


def test_a_record_moved_to_another_key_is_refused(memory, way):
    catalog, disk = memory

    def swap(txn: Transaction) -> None:
        record = txn.get("blocks", record_key(RecordKey(1, 4, 1)))
        assert record is not None
        catalog.blocks.put(txn, RecordKey(1, 5, 1), record)

    catalog.database.write(swap)
    slab = new_slab(1)
    with pytest.raises(
        CorruptBlock, match=r"block 5, layer 1 is damaged .*the record of block 4, layer 1 of"
    ):
        disk.read([BlockKey(1, 1, 5, 0)], slab, [0])


def test_flipped_bytes_of_the_file_never_yield_a_wrong_block(tmp_path):
    """Bytes of the records, that is: a damaged tree may end the process, and is tried where that is
    expected.
    """
    catalog, _ = make(tmp_path / "memory", codec="raw")
    path = tmp_path / "memory" / "data.mdb"
    with catalog.database.read() as txn:
        records = [bytes(record.data) for record in catalog.blocks.walk(txn, 1)]
    catalog.close()
    whole = path.read_bytes()
    rng = random.Random(5)
    refused = 0
    for _ in range(60):
        record = rng.choice(records)
        place = whole.index(record) + rng.randrange(len(record))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        catalog = Catalog.open(tmp_path / "memory")
        again = DiskTier(catalog)
        failed = 0
        for block in range(BLOCKS):
            for layer in range(LAYERS):
                for head in range(HEADS):
                    slab = new_slab(1)
                    k, v = slab.unbind(1)
                    try:
                        (length,) = again.read([BlockKey(1, layer, block, head)], slab, [0])
                    except CorruptBlock as error:
                        assert f"document 1, block {block}, layer {layer}" in str(error)
                        failed += 1
                        continue
                    want_k, want_v = keys_and_values(1, layer, block)
                    assert torch.equal(k[0, :length], want_k[head, :length])
                    assert torch.equal(v[0, :length], want_v[head, :length])
        assert failed in (1, HEADS)
        refused += 1
        catalog.close()
    assert refused == 60


def test_records_are_walked_and_checked_in_order(memory):
    catalog, _ = memory
    with catalog.database.read() as txn:
        walked = [record.key[1:] for record in catalog.blocks.walk(txn, 2, first=10)]
        for record in catalog.blocks.walk(txn, 2):
            catalog.blocks.check(record.data, record.key, WRITE)
        sizes = sum(len(record.data) for record in catalog.blocks.walk(txn, 2))
        assert sizes == catalog.document(txn, 2).bytes
    assert walked == [(10, 0), (10, 1), (11, 0), (11, 1)]


def test_blocks_and_layers_are_deleted_and_their_bytes_counted(memory):
    catalog, disk = memory
    database = catalog.database

    def there() -> tuple[set[tuple[int, int]], int]:
        with database.read() as txn:
            records = list(catalog.blocks.walk(txn, 1))
            return {key[1:] for key, _ in records}, sum(len(data) for _, data in records)

    all_keys, before = there()
    freed = database.write(lambda txn: catalog.blocks.delete_layers(txn, 1, {0}, 0, 8))
    keys, left = there()
    assert keys == all_keys - {(block, 0) for block in range(8)} and left == before - freed
    assert database.write(lambda txn: catalog.blocks.delete_layers(txn, 1, [0], 0, 8)) == 0
    freed = database.write(lambda txn: catalog.blocks.delete(txn, 1, 10))
    assert there() == ({key for key in keys if key[0] < 10}, left - freed)
    database.write(lambda txn: catalog.blocks.delete(txn, 1))
    assert there() == (set(), 0)
    slab = new_slab(1)
    disk.read([BlockKey(2, 1, 11, 0)], slab, [0])


def test_a_memory_may_hold_records_of_several_codecs(memory, way):
    catalog, disk = memory
    other = BlockTable(catalog.signature, "raw")
    want_k, want_v = keys_and_values(9, 9, 9)
    key = RecordKey(2, 50, 0)
    (record,) = other.encode(key, raw_view(want_k)[None], raw_view(want_v)[None], [ROWS], WRITE)
    catalog.database.write(lambda txn: catalog.blocks.put(txn, key, record))
    slab = new_slab(2)
    k, v = slab.unbind(1)
    disk.read([BlockKey(2, 0, 50, 1), BlockKey(2, 0, 1, 1)], slab, [0, 1])
    assert torch.equal(k[0], want_k[1]) and torch.equal(v[1], keys_and_values(2, 0, 1)[1][1])


def test_a_record_is_read_only_where_the_document_tells_of_its_write(memory, way):
    catalog, disk = memory
    slab = new_slab(2)
    units = [BlockKey(1, 0, 3, 0), BlockKey(1, 0, 4, 0)]
    disk.read(units, slab, [0, 1])

    def made_by(*writes: Write) -> None:
        def work(txn: Transaction) -> None:
            row = catalog.document(txn, 1)
            catalog.put_document(txn, replace(row, writes=writes))

        catalog.database.write(work)

    made_by(Write(0, WRITE), Write(4, b"another, 16 byte"))  # an append begins at block 4
    with pytest.raises(CorruptBlock, match=r"document 1, block 4, layer 0 is damaged .* the write"):
        disk.read(units, slab, [0, 1])
    disk.read(units[:1], slab, [0])
    made_by(Write(0, bytes(16)), Write(3, WRITE))
    disk.read(units, slab, [0, 1])


def test_threads_read_while_a_document_is_written(memory, way):
    catalog, disk = memory
    errors: list[BaseException] = []

    def reader(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                units = [
                    BlockKey(1, rng.randrange(2), rng.randrange(BLOCKS - 1), rng.randrange(HEADS))
                    for _ in range(8)
                ]
                slab = new_slab(8)
                k, v = slab.unbind(1)
                disk.read(units, slab, range(8))
                for slot, unit in enumerate(units):
                    want_k, want_v = keys_and_values(1, unit.layer, unit.block)
                    assert torch.equal(k[slot], want_k[unit.head]) and torch.equal(
                        v[slot], want_v[unit.head]
                    )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for block in range(20):
        k, v = keys_and_values(2, 0, block)
        catalog.database.write(
            lambda txn, block=block, k=k, v=v: write(
                catalog, txn, RecordKey(2, 200 + block, 0), k, v
            )
        )
    for thread in threads:
        thread.join()
    assert not errors


def test_reads_are_counted_by_layer(memory):
    _, disk = memory
    slab = new_slab(3)
    disk.read([BlockKey(1, 0, 0, 0), BlockKey(1, 1, 0, 0), BlockKey(1, 1, 0, 1)], slab, [0, 1, 2])
    before = disk.stats.snapshot()
    assert (before.hits, before.misses, before.evictions) == (3, 0, 0)
    assert before.bytes == 3 * 2 * ROWS * DIM * 2 and before.seconds > 0
    assert {layer: stats.hits for layer, stats in disk.stats.layers().items()} == {0: 1, 1: 2}
    disk.read([BlockKey(1, 1, 5, 0)], slab, [0])
    after = disk.stats.snapshot()
    assert (after.hits, after.bytes) == (4, before.bytes + 2 * ROWS * DIM * 2)


def test_counts_add_up_over_layers_and_threads():
    counter = TierCounter()
    assert counter.snapshot() == TierStats()
    threads = [
        threading.Thread(
            target=lambda n=n: [counter.count(n % 2, hits=1, evictions=2) for _ in range(200)]
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.layers() == {
        0: TierStats(hits=400, evictions=800),
        1: TierStats(hits=400, evictions=800),
    }
    counted = {"hits": 800, "evictions": 1600}
    assert counter.snapshot().to_dict() == {
        name: counted.get(name, 0) for name in TierStats().to_dict()
    }


def test_a_lease_is_given_back_once():
    given_back = []
    k, v = new_slab(1).unbind(1)
    lengths = torch.tensor([ROWS])
    with Lease([0], "host", {}, k, v, lengths, lambda: given_back.append("slot 0")) as lease:
        assert not given_back
    lease.release()
    assert given_back == ["slot 0"]


def test_a_place_behind_the_end_of_the_file_is_not_believed(memory, monkeypatch):
    """As a flipped bit of a page's number tells it."""
    catalog, _ = memory
    key = record_key(RecordKey(1, 4, 1))
    with catalog.database.read() as txn:
        assert txn.extents_of("blocks", [key]) != [None]
    catalog.database.write(lambda txn: txn.put("meta", b"another state", b""))
    monkeypatch.setattr(KeyPage, "extents", lambda self, key, size: {key: Extent(1 << 62, 64)})
    with catalog.database.read() as txn:
        assert txn.extents_of("blocks", [key]) == [None]
