"""The cache in a directory keeps its budget, with several writers, on a full disk, and whatever
others put into it.
"""

import os
import resource
import threading
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from memstore.errors import InvalidInput
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import ObjectStore
from support.published import open_at, units_of

MOST = 1 << 20


def has(cache: LocalCache, key: str) -> bool:
    return cache.get(key, MOST) is not None


def test_the_budget_holds_and_what_was_used_last_stays(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "c", 20 * 4096)
    for number in range(100):
        cache.put([(f"k{number}", bytes([number]) * 4000)])
        assert cache.used <= cache.budget
        assert sum(file.stat().st_size for file in cache.path.glob("??/*")) <= cache.budget
    assert cache.get("k99", MOST) == bytes([99]) * 4000 and cache.get("k1", MOST) is None
    assert cache.evicted >= 80
    again = LocalCache(tmp_path / "c", 20 * 4096)
    assert again.get("k99", MOST) == bytes([99]) * 4000 and again.used == cache.used
    cache.drop("k99")
    assert cache.get("k99", MOST) is None
    before = cache.evicted
    cache.put([("large", bytes(30 * 4096)), ("small", bytes(100))])  # evicts nothing
    assert has(cache, "small") and not has(cache, "large") and cache.evicted == before


@pytest.mark.parametrize("first", [True, False])
def test_two_processes_that_make_a_cache_at_once_both_have_it(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other is faster, before or after this one has looked what is in the directory."""
    listdir, others = os.listdir, list[LocalCache]()

    def overtaken(path: Path) -> list[str]:
        monkeypatch.setattr("os.listdir", listdir)
        found = [] if first else listdir(path)
        others.append(LocalCache(path, MOST))
        others[0].put([("key", bytes(5000))])
        return listdir(path) if first else found

    monkeypatch.setattr("os.listdir", overtaken)
    cache = LocalCache(tmp_path / "c", MOST)
    assert cache.get("key", MOST) == bytes(5000) and cache.used == others[0].used == 8192


def test_several_caches_in_one_directory_keep_one_budget(tmp_path: Path) -> None:
    caches = [LocalCache(tmp_path / "c", 40 * 4096) for _ in range(4)]
    done = []

    def work(number: int) -> None:
        for at in range(60):
            caches[number].put([(f"{number}:{at}", bytes(4096)), (f"both:{at}", bytes(100))])
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    files = list((tmp_path / "c").glob("??/*"))
    assert 0 < len(files) * 4096 <= 40 * 4096 and caches[0].used <= 40 * 4096


def test_a_full_disk_keeps_nothing_and_is_counted(texts: ObjectStore, tmp_path: Path) -> None:
    """Every write meets a limit of the file system."""
    local = LocalCache(tmp_path / "c", 1 << 24)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        with open_at(texts, local=local) as store:
            store.lease(units_of(store, "first")[:8]).release()
            store._on_disk().catalog.source.settle()
            assert local.counter.failures().keys() == {"full"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert local.used == 0 and not list(local.path.glob("??/*"))


def test_a_file_that_is_too_large_is_removed_unread(texts: ObjectStore, tmp_path: Path) -> None:
    def read() -> dict[str, float]:
        with open_at(texts, local=LocalCache(tmp_path / "c", 1 << 24)) as store:
            store.lease(units_of(store, "first")[:8]).release()
            store._on_disk().catalog.source.settle()
            return store.tier_stats()["local"]

    read()
    for file in list((tmp_path / "c").glob("??/*")):
        os.truncate(file, 1 << 33)
    assert read()["failed_damaged"] > 0
    assert all(file.stat().st_size < MOST for file in (tmp_path / "c").glob("??/*"))
    again = read()
    assert "failed" not in again and again["hits"] == 8


def test_a_directory_of_other_files_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(InvalidInput, match="is not empty"):
        LocalCache(tmp_path, MOST)
    with pytest.raises(InvalidInput, match="cannot be used"):
        LocalCache(tmp_path / "note.txt" / "c", MOST)
