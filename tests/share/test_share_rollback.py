"""Rollback of a publication: an older manifest is refused if the local cache knows a newer one, and
an open reader never goes back, nor to another model's memory.
"""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from memstore.errors import StaleMemory
from memstore.share.local_cache import LocalCache
from memstore.share.manifest import Manifest, manifest_name, read_manifest
from memstore.share.object_store import ObjectStore
from memstore.share.open_object_store import open_object_store
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import publish_memory
from support.published import open_at
from support.synthetic_documents import OTHER_MODEL, SIGNATURE, ingest


@pytest.fixture
def place(tmp_path: Path) -> ObjectStore:
    """A published memory with two manifests."""
    url = f"file://{tmp_path}/library"
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        for name in "ab":
            ingest(store, name, 40)
            publish_memory(store, url)
    return open_object_store(url)


def number_of(place: ObjectStore, cache: Path) -> int | None:
    with MemoryStore.open(place.url, local_cache=cache) as store:
        assert store.stats()["manifest"] == store.manifest
        return store.manifest


def test_a_local_cache_remembers_the_newest_manifest(place: ObjectStore, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert number_of(place, cache) == 2
    newest = read_manifest(place, 2)
    place.delete([manifest_name(2)])
    with pytest.raises(StaleMemory, match="manifest 2 was read before") as said:
        number_of(place, cache)
    (file,) = cache.glob("newest-*")
    assert f"delete {file} to accept it" in str(said.value) and "\n" not in str(said.value)
    place.put(manifest_name(2), replace(newest, id=bytes(16)).encode())
    with pytest.raises(StaleMemory, match="another manifest 2"):
        number_of(place, cache)
    file.write_bytes(b"half")
    assert number_of(place, cache) == 2


def change(place: ObjectStore, to: str, newest: bytes) -> None:
    """Publish an older state, another model's memory, or damage; or the newest manifest again."""
    other = replace(Manifest.decode(newest, ""), number=3, signature=OTHER_MODEL).encode()
    place.delete([manifest_name(2), manifest_name(3)])
    if to != "older":
        place.put(manifest_name(2), newest)
    if to in ("other", "damage"):
        place.put(manifest_name(3), other if to == "other" else b"half")


@pytest.mark.parametrize(
    "case",
    [
        ("older", True, "newest manifest is 1, but manifest 2 was read before"),
        ("older", False, "an older manifest, 1, was restored; open it again"),
        ("other", False, "with other weights; open it again"),
        ("damage", False, "is damaged"),
    ],
)
def test_an_open_reader_keeps_its_state_and_logs_it_once(
    place: ObjectStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    case: tuple[str, bool, str],
) -> None:
    to, cached, log = case
    local = LocalCache(tmp_path / "cache", 1 << 20) if cached else None
    newest = bytes(place.get(manifest_name(2)))
    with open_at(place, local=local) as store, caplog.at_level(logging.WARNING, logger="memstore"):
        database = store._catalog.database
        for now in (to, to, "newest", to):
            change(place, now, newest)
            database._looking.acquire()
            database._look()
        first, second = caplog.messages  # after it was mended, again
        assert first == second and log in first and "\n" not in first
        assert store.has("b") and store.manifest == 2
