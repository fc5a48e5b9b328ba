"""Faults below the disk tier: each ends in an error that names what is wrong, or in the right
answer, later.
"""

import errno
import itertools
import multiprocessing
import os
import select
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
from memstore.tiers.host_tier import HostTier
from memstore.tiers.slots import UnitShape
from support.disk_records import (
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    ROWS,
    keys_and_values,
    make,
    mapped,
    new_slab,
    share,
    uncached,
    write,
)
from support.faulty_source import FailingSource, SlowSource
from support.other_process import hear, other_process, say

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
    assert disk.read(units, slab, range(len(units))) == [ROWS] * len(units)
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


def test_an_input_output_error_names_the_record(memory, cold, monkeypatch):
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


def test_a_read_that_comes_in_parts_is_put_together(memory, cold, monkeypatch):
    _, disk = memory

    def part(true, file, buffers, offset, *flags):
        return true(file, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset)

    reading(monkeypatch, part)
    check_right(disk)


def test_a_file_that_ends_within_a_record_is_an_error(memory, cold, monkeypatch):
    _, disk = memory
    reading(monkeypatch, lambda true, file, buffers, offset, *flags: 0)
    with pytest.raises(CorruptBlock, match=r"cannot be read .*the file ends before it"):
        check_right(disk)


def test_a_slow_disk_gives_the_right_blocks_and_its_waits_overlap(memory, cold, monkeypatch):
    catalog, _ = memory
    disk = DiskTier(catalog, threads=4)
    units = [
        BlockKey(1, layer, block, head)
        for layer in (0, 1)
        for block in range(8)
        for head in range(HEADS)
    ]
    units += [
        BlockKey(2, layer, block, head)
        for layer in (0, 1)
        for block in range(8)
        for head in range(HEADS)
    ]

    in_flight, together = threading.Condition(), 0

    def late(true, file, buffers, offset, *flags):
        nonlocal together
        with in_flight:  # nothing comes before four reads were asked for
            together += 1
            in_flight.notify_all()
            assert in_flight.wait_for(lambda: together >= 4, timeout=60)
        return true(file, buffers, offset)

    reading(monkeypatch, late)
    check_right(disk, units)


def test_a_place_that_is_no_longer_true_costs_time_only(memory, cold, monkeypatch):
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
def test_a_bad_checksum_is_refused_on_every_way_and_spares_the_other_heads(
    memory, monkeypatch, way
):
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


def test_a_stuck_reader_elsewhere_makes_the_file_grow_and_nothing_fail(memory):
    catalog, disk = memory
    database = catalog.database
    want_k, want_v = keys_and_values(1, 0, 0)

    def rewrite(times: int) -> int:
        for _ in range(times):
            for block in range(20):
                database.write(
                    lambda txn, block=block: write(
                        catalog, txn, RecordKey(2, 100 + block, 0), want_k, want_v
                    )
                )
        return database.file_bytes

    rewrite(2)
    settled = rewrite(2)
    code = """
        with Database.open(sys.argv[1]).read() as txn:
            say("reading"); hear()
            say(sum(len(value) for _, value in txn.scan("blocks")))
    """
    with database.read() as txn:
        before = sum(len(value) for _, value in txn.scan("blocks"))
    with other_process(code, database.path) as process:
        assert hear(process) == "reading"
        grown = rewrite(5)
        assert grown > settled + 50 * 4096
        check_right(disk)
        say(process)
        assert hear(process) == str(before)  # its snapshot
        process.wait()
    database.write(lambda txn: None)
    freed = rewrite(1)  # what the reader kept can be used again
    assert rewrite(3) == freed


def test_the_map_that_another_process_grows_is_taken_over_while_this_one_reads(tmp_path, cold):
    code = """
        database = Database.open(sys.argv[1])
        say("open"); hear()
        for first in range(100, 500, 20):
            def work(txn):
                record = txn.get("blocks", record_key(RecordKey(1, 0, 0)))
                for n in range(first, first + 20):
                    txn.put("blocks", record_key(RecordKey(1, n, 0)), record)
            database.write(work)
        say(database._environment._inner.info()["map_size"])
    """
    catalog, disk = make(tmp_path / "memory", "raw", documents=1, quota=1 << 19)
    catalog.set_quota(None)  # the map is as small as it was
    database = catalog.database
    units = [unit for unit in UNITS if unit.document == 1]
    size = database._environment._inner.info()["map_size"]
    with other_process(code, database.path) as process:
        assert hear(process) == "open"
        say(process)
        while not select.select([process.stdout], [], [], 0)[0]:
            check_right(disk, units)
        grown = int(hear(process))
    check_right(disk, units)
    assert database._environment._inner.info()["map_size"] == grown > size
    catalog.close()


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


def test_a_child_forked_while_threads_read_has_threads_of_its_own(tmp_path, monkeypatch):
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


def test_an_interrupt_leaves_no_thread_that_fills_slots(tmp_path, monkeypatch):
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
        disk.read(UNITS, slab, range(len(UNITS)))
    before = slab.clone()
    time.sleep(0.3)
    assert torch.equal(slab, before)
    monkeypatch.setattr(Batch, "fill", true)
    check_right(disk)
    catalog.close()


def test_a_closed_memory_has_no_threads_and_says_that_it_is_closed(tmp_path, monkeypatch):
    share(monkeypatch)
    others = set(threading.enumerate())  # threads of earlier tests may still be ending
    catalog, disk = make(tmp_path / "memory")
    check_right(disk)
    assert set(threading.enumerate()) - others
    disk.close()
    assert set(threading.enumerate()) <= others
    check_right(disk)  # by this thread alone
    catalog.close()
    with pytest.raises(MemoryClosed):
        check_right(disk)


def test_of_several_damaged_records_the_first_is_named(tmp_path, monkeypatch):
    share(monkeypatch)
    for number, way in enumerate((share, uncached)):
        way(monkeypatch)
        catalog, disk = make(tmp_path / str(number))
        for block in (9, 4, 6):
            spoil(catalog, RecordKey(1, block, 1))
        for _ in range(20):  # whichever thread meets it
            with pytest.raises(CorruptBlock, match="document 1, block 4, layer 1 is damaged"):
                check_right(disk)
        catalog.close()


def test_a_forked_child_cannot_read_through_its_parents_tier(memory, cold):
    _, disk = memory
    check_right(disk)  # its threads run by now
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=in_child, args=(disk, results))
    child.start()
    assert f"opened by process {os.getpid()}" in results.get(timeout=60)
    child.join()
    check_right(disk)


# What stands above


def host_over(source: SlowSource | FailingSource, slots: int) -> HostTier:
    return HostTier(source, slots * 2 * ROWS * DIM * 2, UnitShape(ROWS, DIM, torch.float16))


def test_a_host_tier_waits_for_a_slow_source_and_has_the_right_units(memory):
    _, disk = memory
    host = host_over(SlowSource(disk, 0.1), len(UNITS))
    began = time.perf_counter()
    with host.lease(UNITS[:6]) as lease:
        assert time.perf_counter() - began >= 0.3  # three records
        for slot, unit in zip(lease.slots.tolist(), UNITS):
            assert torch.equal(
                lease.k[slot], keys_and_values(unit.document, unit.layer, unit.block)[0][unit.head]
            )


def test_a_host_tier_keeps_nothing_of_a_call_that_failed(memory):
    _, disk = memory
    source = FailingSource(disk, lambda: CorruptBlock("made up"), lambda call, units: call == 1)
    host = host_over(source, len(UNITS))
    with host.lease(UNITS[:4]):
        pass
    held = host.bytes
    with pytest.raises(CorruptBlock, match="made up"):
        host.lease(UNITS[2:12])
    assert host.bytes == held and not any(host.holds(unit) for unit in UNITS[4:12])
    with host.lease(UNITS) as lease:
        for slot, unit in zip(lease.slots.tolist(), UNITS):
            assert torch.equal(
                lease.v[slot], keys_and_values(unit.document, unit.layer, unit.block)[1][unit.head]
            )
