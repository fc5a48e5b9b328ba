"""A trace of lookups gives back what was written, and whatever was on the disk when its writer
died.
"""

import os
import resource
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay import Recorded
from memstore.block import BlockKey
from memstore.errors import InvalidInput
from memstore.store.memory_store import MemoryStore
from memstore.tiers.cascade import Cascade
from memstore.tiers.lookup_trace import TraceEntry, TraceWriter, read_trace
from support.counting_source import SHAPE, UNIT_BYTES, CountingSource, check_slots, unit
from support.crafted import WRONG, changed, fuzzed, places
from support.damaged_bytes import damaged
from support.synthetic_documents import SIGNATURE


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "t", unit_bytes=UNIT_BYTES)
    big = BlockKey(2**63 - 1, 65_535, 2**32 - 1, 65_535)
    trace.lookup([unit(0), unit(3)], [0])
    trace.prediction([unit(4, layer=1)])
    trace.lookup([], [])
    trace.prediction([])
    trace.lookup([big, BlockKey(-3, 65_535, 0, 1)], [])
    trace.close()
    trace.close()
    trace.lookup([unit(9)], [])  # after the end: nothing
    entries = list(read_trace(tmp_path / "t"))
    assert [(entry.is_lookup, entry.units, entry.missed) for entry in entries] == [
        (True, [unit(0), unit(3)], [0]),
        (False, [unit(4, layer=1)], []),
        (True, [big, BlockKey(-3, 65_535, 0, 1)], []),
    ]
    times = [entry.seconds for entry in entries]
    assert times == sorted(times) and 0 <= times[0] < 60


def test_a_killed_process_leaves_what_it_had_written(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        try:
            trace = TraceWriter(tmp_path / "t", unit_bytes=UNIT_BYTES)
            for number in range(20_000):
                trace.lookup([unit(number), unit(number + 1)], [1])
        finally:
            os._exit(9)  # nothing is closed or flushed
    os.waitpid(child, 0)
    entries: list[TraceEntry] = list(read_trace(tmp_path / "t"))
    assert len(entries) > 15_000
    assert [entry.units[0] for entry in entries] == [unit(number) for number in range(len(entries))]


@fuzzed
@given(data=st.data())
def test_crafted_or_damaged_trace_is_refused_or_gives_valid_entries(
    tmp_path: Path, data: st.DataObject
) -> None:
    entries: list[Any] = [
        {"format": 1, "unit_bytes": 64},
        [0, 10, 1, [1, 1], [0, 1], [0, 1], [1]],
        [1, 20, 2, [1], [3], [0], []],
    ]
    if crafted := data.draw(st.booleans()):
        ways = [way for way in places(entries) if way]
        path = data.draw(st.sampled_from([*ways, *[(1, 6, 0)] * 8]))  # places of missed units
        entries = changed(entries, path, data.draw(st.sampled_from(WRONG)))
    content = zstandard.compress(b"".join(msgpack.packb(entry) for entry in entries))
    if not crafted:
        content = data.draw(damaged(content))
    (tmp_path / "trace").write_bytes(content)
    try:
        found = list(read_trace(tmp_path / "trace"))
        Recorded.load(tmp_path / "trace")
    except InvalidInput as error:
        assert str(tmp_path / "trace") in str(error)
        return
    for entry in found:
        assert entry.units and all(0 <= place < len(entry.units) for place in entry.missed)


# A trace that cannot be written


def test_a_path_that_cannot_be_written_is_an_os_error_before_anything_else_happens(
    tmp_path: Path,
) -> None:
    nowhere = tmp_path / "no such directory" / "t"
    with pytest.raises(OSError, match="no such directory"):
        MemoryStore.create(tmp_path / "m", SIGNATURE, trace=nowhere)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("there", ["file", "link", "directory"])
def test_a_trace_is_written_over_nothing(tmp_path: Path, there: str) -> None:
    MemoryStore.create(tmp_path / "m", SIGNATURE).close()
    (tmp_path / "file").write_text("my own words")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "directory").mkdir()
    for use in (
        lambda: TraceWriter(tmp_path / there, unit_bytes=UNIT_BYTES),
        lambda: MemoryStore.open(tmp_path / "m", trace=tmp_path / there),
        lambda: MemoryStore.create(tmp_path / "other", SIGNATURE, trace=tmp_path / there),
    ):
        with pytest.raises(InvalidInput, match="name a new file"):
            use()
    assert (tmp_path / "file").read_text() == "my own words"
    assert not (tmp_path / "other").exists() and not (tmp_path / "nowhere").exists()


def test_a_trace_is_kept_out_of_a_memory_by_any_path(tmp_path: Path) -> None:
    MemoryStore.create(tmp_path / "m", SIGNATURE).close()
    (tmp_path / "m" / "index").mkdir(exist_ok=True)
    (tmp_path / "way").symlink_to(tmp_path / "m" / "index")
    for path in (tmp_path / "m" / "t", tmp_path / "m" / "index" / "t", tmp_path / "way" / "t"):
        with pytest.raises(InvalidInput, match="in the directory of a memory"):
            MemoryStore.open(tmp_path / "m", trace=path)
        assert not path.exists()
    # what lies further below is not the memory's: others call their files data.mdb, too
    (tmp_path / "m" / "of" / "mine").mkdir(parents=True)
    MemoryStore.open(tmp_path / "m", trace=tmp_path / "m" / "of" / "mine" / "t").close()
    (tmp_path / "new").mkdir()
    with pytest.raises(InvalidInput, match="in the directory of a memory"):
        MemoryStore.create(tmp_path / "new", SIGNATURE, trace=tmp_path / "new" / "t")
    MemoryStore.create(tmp_path / "new", SIGNATURE).close()  # nothing is in its way


def test_a_full_disk_ends_the_trace_but_no_lookup_and_is_reported_at_the_end(
    tmp_path: Path,
) -> None:
    tiers = Cascade(None, SHAPE, host_budget=8 * UNIT_BYTES, trace=tmp_path / "trace")
    tiers.host.source = CountingSource()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        for number in range(12_000):
            tiers.lease([unit(number % 10)]).release()
            tiers.expect([unit(number % 10)])
        tiers.settle()
        check_slots(tiers.host)
        with pytest.raises(OSError, match="File too large"):
            tiers.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tiers.close()
