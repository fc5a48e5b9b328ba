"""One suite over every tier that a lookup may end in: the directory, the device tier, and
publications with every combination of caches.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")

from memstore.block import BlockKey
from memstore.errors import DocumentNotFound, MemoryClosed
from memstore.share.local_cache import LocalCache
from memstore.share.open_object_store import open_object_store
from memstore.store.memory_store import MemoryStore
from support.published import (
    TEXTS,
    Wild,
    WildServer,
    holds_what_was_written,
    open_at,
    publish_all,
    units_of,
    write,
)
from support.synthetic_documents import SIGNATURE

CASCADES = (
    "directory", "directory-device", "memory", "file", "memory-device", "memory-local",
    "memory-shared", "file-local-shared",
)  # fmt: skip
UNIT = 2 * 4 * 8 * 2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory in a directory, published next to it in codec zstd, and in this process in codec
    raw.
    """
    path = tmp_path_factory.mktemp("written")
    with write(path / "m", codec="zstd") as store:
        publish_all(store, f"file://{path}/published")
    with write(path / "raw", codec="raw") as store:
        publish_all(store, f"memory://{path}")
    return path


@pytest.fixture(params=CASCADES)
def opened(request: pytest.FixtureRequest, written: Path, tmp_path: Path) -> Iterator[MemoryStore]:
    where, *more = request.param.split("-")
    options: dict[str, Any] = {"host_budget": 64 * UNIT}
    if "device" in more:
        options |= {"device": "cpu", "device_budget": 32 * UNIT}
    url = f"memory://{written}" if where == "memory" else f"file://{written}/published"
    if where == "directory":
        store = MemoryStore.open(written / "m", SIGNATURE, **options)
    elif "shared" in more:
        local = LocalCache(tmp_path / "cache", 1 << 20) if "local" in more else None
        shared = WildServer(Wild(0, rate=0.0))
        store = open_at(open_object_store(url), local=local, shared=shared, **options)
    else:
        if "local" in more:
            options["local_cache"] = tmp_path / "cache"
        store = MemoryStore.open(url, SIGNATURE, **options)
    with store:
        yield store


def check(store: MemoryStore, units: list[BlockKey]) -> None:
    """A lease holds what was written, and the lengths of its units."""
    holds_what_was_written(store, units)
    tokens = {row.id: row.tokens for row in store.ready()}
    with store.lease(units) as lease:
        expected = [min(4, tokens[unit.document] - unit.block * 4) for unit in units]
        assert lease.lengths.tolist() == expected


def test_any_selection_of_units_reads_back_bit_for_bit(opened: MemoryStore) -> None:
    rng = random.Random(1)
    every = [unit for name in TEXTS for unit in units_of(opened, name)]
    for _ in range(6):
        check(opened, rng.sample(every, rng.randint(1, 24)))
    check(opened, every[:24])
    check(opened, [every[0], every[0], every[1]])
    row = opened.document("first")
    check(opened, [BlockKey(row.id, 1, row.blocks - 1, head) for head in (1, 0)])


def test_hits_and_misses_add_up_in_every_tier(opened: MemoryStore) -> None:
    units, names = units_of(opened, "second")[:20], [*opened.tier_stats()]
    for tier in (names[-1], names[0]):  # that had them
        with opened.lease(units) as lease:
            assert set(lease.tiers) == {tier}
    top, *below = opened.tier_stats().values()
    assert (top["hits"], top["misses"]) == (20, 20)
    lowest = below[-1]
    assert lowest["hits"] == 20 and not lowest["misses"] and lowest["bytes"] == 20 * UNIT
    for tier in below[:-1]:
        assert (tier["hits"], tier["misses"]) == (0, 20)
    assert not any("failed" in tier for tier in opened.tier_stats().values())


def test_a_prefetched_unit_is_a_hit(opened: MemoryStore) -> None:
    units = units_of(opened, "first")[:16]
    assert opened.retrieval.expect(units) == 16
    opened.tiers._threads.shutdown()
    check(opened, units)
    top = next(iter(opened.tier_stats().values()))
    assert (top["prefetched"], top["misses"]) == (16, 0)


def test_a_missing_document_is_named(opened: MemoryStore) -> None:
    with pytest.raises(DocumentNotFound):
        opened.lease([BlockKey(77, 1, 0, 0)])
    with pytest.raises(DocumentNotFound, match="nothing"):
        opened.document("nothing")
    check(opened, units_of(opened, "third")[:4])


def test_a_closed_memory_refuses_every_call(opened: MemoryStore) -> None:
    opened.close()
    opened.close()
    for call in (lambda: opened.lease([BlockKey(1, 1, 0, 0)]), opened.documents):
        with pytest.raises(MemoryClosed):
            call()
