"""Faults below the disk tier: each ends in an error that names what is wrong, or in the right
answer, later.
"""

import errno
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.keys import record_key
from memstore.disk.lmdb.database import Transaction
from memstore.disk.lmdb.pages import Extent
from memstore.disk.read.batch import Batch, Wanted
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptBlock, MemoryClosed
from memstore.tiers.disk_tier import DiskTier
from support.disk_records import (
    BLOCKS,
    HEADS,
    LAYERS,
    ROWS,
    keys_and_values,
    make,
    mapped,
    new_slab,
    share,
    uncached,
)

UNITS = [
    BlockKey(1, layer, block, head)
    for layer in range(LAYERS)
    for block in range(BLOCKS - 1)
    for head in (0, 2)
]


@pytest.fixture(params=["raw", "zstd"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Catalog, DiskTier]]:
    catalog, disk = make(tmp_path / "memory", request.param)
    yield catalog, disk
    catalog.close()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record is read as one that the page cache does not hold."""
    uncached(monkeypatch)


def check_right(disk: DiskTier, units: Sequence[BlockKey] = UNITS) -> None:
    slab = new_slab(len(units))
    k, v = slab.unbind(1)
    assert disk.read(units, slab, [(slot,) for slot in range(len(units))]) == [ROWS] * len(units)
    for slot, unit in enumerate(units):
        want_k, want_v = keys_and_values(unit.document, unit.layer, unit.block)
        assert torch.equal(k[slot], want_k[unit.head]) and torch.equal(v[slot], want_v[unit.head])


def spoil(catalog: Catalog, key: RecordKey) -> None:
    """Flip a bit of a record's last head."""
    with catalog.database.read() as txn:
        place = txn.extents_of("blocks", [record_key(key)])[0]
        assert place is not None
        end = place.offset + place.size - 1
    file = os.open(catalog.database.path / "data.mdb", os.O_RDWR)
    os.pwrite(file, bytes([os.pread(file, 1, end)[0] ^ 4]), end)
    os.close(file)


def reading(monkeypatch: pytest.MonkeyPatch, change: Callable[..., int]) -> None:
    """Have `change` called in place of os.preadv, with the true one before its arguments."""
    true = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: change(true, *arguments))


def test_io_error_names_the_record(memory, cold, monkeypatch):
    _, disk = memory
    with monkeypatch.context() as patched:

        def fail(true, file, buffers, offset, *flags):
            if next(calls) == 7:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return true(file, buffers, offset)

        calls = itertools.count()
        reading(patched, fail)
        with pytest.raises(
            CorruptBlock,
            match=r"document 1, block \d+, layer \d cannot be read .*Input/output error",
        ):
            check_right(disk)
    check_right(disk)


def test_file_that_ends_within_a_record_is_an_error(memory, cold, monkeypatch):
    _, disk = memory
    reading(monkeypatch, lambda true, file, buffers, offset, *flags: 0)
    with pytest.raises(CorruptBlock, match=r"cannot be read .*the file ends before it"):
        check_right(disk)


def test_stale_extent_still_reads_the_right_record(memory, cold, monkeypatch):
    _, disk = memory
    true = Transaction.extents_of

    def stale(txn: Transaction, table: str, keys: Sequence[bytes]) -> list[Extent | None]:
        return [
            None
            if place is None
            else [Extent(place.offset + 4096, place.size), Extent(16, 3000)][key[-3] % 2]
            for key, place in zip(keys, true(txn, table, keys))
        ]

    monkeypatch.setattr(Transaction, "extents_of", stale)
    check_right(disk)


@pytest.mark.parametrize("way", [None, share, uncached, mapped])
def test_bad_checksum_is_refused_and_other_heads_are_read(memory, monkeypatch, way):
    catalog, disk = memory
    spoil(catalog, RecordKey(1, 4, 1))
    if way is not None:
        way(monkeypatch)
    disk = DiskTier(catalog)
    with pytest.raises(
        CorruptBlock, match=f"document 1, block 4, layer 1 is damaged .*head {HEADS - 1}"
    ):
        check_right(disk)
    with pytest.raises(CorruptBlock, match=f"head {HEADS - 1}"):
        check_right(disk, [BlockKey(1, 1, 4, HEADS - 1)])
    check_right(disk, [BlockKey(1, 1, 4, 0)])
    check_right(disk, [unit for unit in UNITS if unit != BlockKey(1, 1, 4, HEADS - 1)])


def in_child(disk: DiskTier, results: multiprocessing.Queue) -> None:
    try:
        check_right(disk)
    except MemoryClosed as error:
        results.put(str(error))
    else:
        results.put("read")


def in_shared_child(tier: DiskTier, path: Path, results: "multiprocessing.Queue[str]") -> None:
    in_child(tier, results)
    catalog, disk = make(path)
    check_right(disk)
    catalog.close()
    results.put("right")


def test_child_forked_during_reads_has_its_own_threads(tmp_path, monkeypatch):
    share(monkeypatch)
    catalog, disk = make(tmp_path / "memory")
    true, reading, forked = Batch.fill, threading.Event(), threading.Event()

    def waiting(batch: Batch, record: Wanted, data: memoryview) -> None:
        reading.set()
        assert forked.wait(60)
        true(batch, record, data)

    monkeypatch.setattr(Batch, "fill", waiting)
    reader = threading.Thread(target=check_right, args=(disk,))
    reader.start()
    assert reading.wait(60)
    monkeypatch.setattr(Batch, "fill", true)  # as the child has it
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=in_shared_child, args=(disk, tmp_path / "child", results))
    child.start()
    assert f"opened by process {os.getpid()}" in results.get(timeout=60)
    assert results.get(timeout=60) == "right"
    child.join()
    forked.set()
    reader.join()
    check_right(disk)
    catalog.close()


def test_interrupt_stops_every_reading_thread(tmp_path, monkeypatch):
    share(monkeypatch)
    catalog, disk = make(tmp_path / "memory")
    true, helped = Batch.fill, threading.Event()

    def interrupted(batch: Batch, record: Wanted, data: memoryview) -> None:
        if threading.current_thread() is threading.main_thread():
            assert helped.wait(60)
            raise KeyboardInterrupt
        helped.set()
        time.sleep(0.1)
        true(batch, record, data)

    monkeypatch.setattr(Batch, "fill", interrupted)
    slab = new_slab(len(UNITS))
    with pytest.raises(KeyboardInterrupt):
        disk.read(UNITS, slab, [(slot,) for slot in range(len(UNITS))])
    before = slab.clone()
    time.sleep(0.3)
    assert torch.equal(slab, before)
    monkeypatch.setattr(Batch, "fill", true)
    check_right(disk)
    catalog.close()


# What stands above
