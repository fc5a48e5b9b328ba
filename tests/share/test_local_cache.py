"""The local cache keeps its budget, also on a full disk and with foreign files in its directory."""

import os
import resource
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from memstore.errors import InvalidInput
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import ObjectStore
from support.published import open_at, units_of

MOST = 1 << 20


def get(cache: LocalCache, key: str) -> bytes | None:
    return cache.get_many([key], MOST)[0]


def used(cache: LocalCache) -> int:
    return sum(file.stat().st_size for file in cache.path.glob("??/*"))


def test_a_local_cache_keeps_its_budget_and_the_files_used_last(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "c", 20 * 4096)
    for number in range(100):
        cache.put([(f"k{number}", bytes([number]) * 4000)])
        assert used(cache) <= cache.budget
    assert get(cache, "k99") == bytes([99]) * 4000 and get(cache, "k1") is None
    again = LocalCache(tmp_path / "c", 20 * 4096)
    assert get(again, "k99") == bytes([99]) * 4000
    again.put([("more", bytes(4096))])
    assert used(again) <= cache.budget
    cache.drop("k99")
    assert get(cache, "k99") is None
    before = used(cache)
    cache.put([("large", bytes(30 * 4096))])  # deletes nothing
    assert get(cache, "large") is None and used(cache) == before


def test_a_full_disk_caches_nothing_and_is_counted(texts: ObjectStore, tmp_path: Path) -> None:
    """Every write meets a limit of the file system."""
    local = LocalCache(tmp_path / "c", 1 << 24)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        with open_at(texts, local=local) as store:
            store.lease(units_of(store, "first")[:8]).release()
            assert local.counter.failures.keys() == {"full"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(local.path.glob("??/*"))


def test_a_file_that_is_too_large_is_removed_unread(texts: ObjectStore, tmp_path: Path) -> None:
    def read() -> dict[str, float]:
        with open_at(texts, local=LocalCache(tmp_path / "c", 1 << 24)) as store:
            store.lease(units_of(store, "first")[:8]).release()
            return store.tier_stats()["local"]

    read()
    for file in list((tmp_path / "c").glob("??/*")):
        os.truncate(file, 1 << 33)
    assert read()["failed_damaged"] > 0
    assert all(file.stat().st_size < MOST for file in (tmp_path / "c").glob("??/*"))
    again = read()
    assert "failed" not in again and again["hits"] == 8


def test_a_local_cache_leaves_foreign_files_alone(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "note").write_text("mine")
    cache = LocalCache(tmp_path, 20 * 4096)
    for number in range(100):
        cache.put([(f"k{number}", bytes(4000))])
    assert (tmp_path / "ab" / "note").read_text() == "mine"
    with pytest.raises(InvalidInput, match="cannot be used"):
        LocalCache(tmp_path / "ab" / "note" / "c", MOST)
