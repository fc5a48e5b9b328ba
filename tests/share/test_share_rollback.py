"""An older manifest in place of a newer one is noticed by a process or a local cache that has read
the newer one.
"""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from memstore.errors import StaleMemory
from memstore.share import manifest as manifests
from memstore.share.manifest import manifest_name, read_manifest
from memstore.share.open_object_store import open_object_store
from memstore.store.memory_store import MemoryStore
from support.places import WatchedPlace
from support.published import open_at
from support.synthetic_documents import SIGNATURE, ingest


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A published memory with two manifests."""
    url = f"file://{tmp_path}/library"
    with MemoryStore.create(tmp_path / "memory", SIGNATURE) as store:
        for name in "ab":
            ingest(store, name, 40)
            store.publish(url)
    return url


def put_back(url: str) -> None:
    """The newest manifest is gone."""
    open_object_store(url).delete([manifest_name(2)])


def forget_manifests(patch: pytest.MonkeyPatch) -> None:
    """As a new process has."""
    patch.setattr(manifests, "_newest", {})


def number_of(url: str, **options: object) -> int | None:
    with MemoryStore.open(url, **options) as store:  # type: ignore[arg-type]
        assert store.stats()["manifest"] == store.manifest
        return store.manifest


def test_a_process_remembers_the_newest_manifest(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert number_of(url) == 2
    put_back(url)
    with MemoryStore.open(tmp_path / "memory") as store:
        assert store.manifest is None
        for use in (
            lambda: number_of(url),
            lambda: store.publish(url),
            lambda: store.pull("a", url),
        ):
            with pytest.raises(
                StaleMemory, match="newest is manifest 1, but manifest 2 was"
            ) as said:
                use()
            assert "\n" not in str(said.value)
        forget_manifests(monkeypatch)
        assert number_of(url) == 1  # a process that has read no other accepts it
        assert store.publish(url).number == 2
        assert number_of(url) == 2


def test_a_local_cache_remembers_the_newest_manifest(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = {"local_cache": tmp_path / "cache"}
    assert number_of(url, **local) == 2
    put_back(url)
    forget_manifests(monkeypatch)
    with pytest.raises(StaleMemory, match="manifest 2 was read before") as said:
        number_of(url, **local)
    (file,) = (tmp_path / "cache").glob("newest-*")
    assert f"delete {file} to accept it" in str(said.value)
    file.write_bytes(b"half")
    assert number_of(url, **local) == 1
    forget_manifests(monkeypatch)
    assert number_of(url, **local) == 1


def test_another_manifest_of_the_same_number_is_refused(url: str) -> None:
    place = open_object_store(url)
    older = replace(read_manifest(place, 1), number=2)
    place.put(manifest_name(2), older.encode())
    with pytest.raises(StaleMemory, match="another manifest 2"):
        number_of(url)


def test_an_open_reader_keeps_its_state_and_logs_it_once(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_at(WatchedPlace(open_object_store(url))) as store:
        database = store._catalog.database
        put_back(url)
        with caplog.at_level(logging.WARNING, logger="memstore"):
            for _ in range(2):
                database._looking.acquire()
                database._look()
        (said,) = caplog.messages
        assert "newest is manifest 1, but manifest 2 was read before" in said and "\n" not in said
        assert store.has("b") and store.manifest == 2
