"""I/O faults under the disk tier give a named error, and later reads are right."""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from memstore.block import BlockKey, RecordKey
from memstore.disk import reading
from memstore.disk.lmdb.transaction import record_key
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptBlock, CorruptMemory
from memstore.tiers.cascade import DiskTier
from support.disk_records import BLOCKS, LAYERS, ROWS, keys_and_values, make, new_slab

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


def check_right(disk: DiskTier, units: Sequence[BlockKey] = UNITS) -> None:
    slab = new_slab(len(units))
    k, v = slab.unbind(1)
    lengths, _ = disk.read_from(units, slab, [(slot,) for slot in range(len(units))])
    assert lengths == [ROWS] * len(units)
    for slot, unit in enumerate(units):
        want_k, want_v = keys_and_values(unit.document, unit.layer, unit.block)
        assert torch.equal(k[slot], want_k[unit.head]) and torch.equal(v[slot], want_v[unit.head])


def spoil(catalog: Catalog, key: RecordKey) -> None:
    """Flip a bit of a record's last head."""
    with catalog.database.read() as txn:
        place = txn.extents_of("blocks", [record_key(key)])[0]
        end = place.offset + place.size - 1
    file = os.open(catalog.database.path / "data.mdb", os.O_RDWR)
    os.pwrite(file, bytes([os.pread(file, 1, end)[0] ^ 4]), end)
    os.close(file)


def with_preadv(monkeypatch: pytest.MonkeyPatch, change: Callable[..., int]) -> None:
    """Have `change` called in place of os.preadv that may wait, with the true one before its
    arguments; no record is one that the page cache holds.
    """
    true = os.preadv

    def preadv(file, buffers, offset, flags):
        if flags:
            raise BlockingIOError
        return change(true, file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def test_io_error_names_the_record(memory, monkeypatch):
    _, disk = memory
    with monkeypatch.context() as patched:

        def fail(true, file, buffers, offset):
            if next(calls) == 7:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return true(file, buffers, offset)

        calls = itertools.count()
        with_preadv(patched, fail)
        with pytest.raises(
            CorruptBlock,
            match=r"document 1, block \d+, layer \d cannot be read .*Input/output error",
        ):
            check_right(disk)
    check_right(disk)


def test_io_error_of_a_page_of_keys_is_an_error(memory, monkeypatch):
    _, disk = memory

    def fail(file, size, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", fail)
        with pytest.raises(CorruptMemory, match=r"cannot be read .*Input/output error"):
            check_right(disk)
    check_right(disk)


@pytest.mark.parametrize("started", [0, 1, 3])
def test_threads_share_a_batch_as_far_as_they_can_be_started(memory, monkeypatch, started):
    _, disk = memory
    monkeypatch.setattr(reading, "_SHARE_BYTES", 1)
    monkeypatch.setattr(reading, "_LARGE", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    true, starts = threading.Thread.start, itertools.count()

    def start(thread):
        if next(starts) >= started:
            raise RuntimeError("can't start new thread")
        true(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(20):
        check_right(disk)
    assert next(starts) >= min(started + 1, 3)


def test_file_that_ends_within_a_record_is_an_error(memory, monkeypatch):
    _, disk = memory
    with_preadv(monkeypatch, lambda true, file, buffers, offset: 0)
    with pytest.raises(CorruptBlock, match=r"cannot be read .*the file ends before it"):
        check_right(disk)
