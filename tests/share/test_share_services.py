"""Readers with a real Valkey or Redis server: whatever the server loses and however it fails, reads
are slower and never wrong.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("obstore")
pytest.importorskip("redis")

from memstore.block import BlockKey
from memstore.share.object_store import ObjectStore
from memstore.share.valkey import Valkey
from memstore.store.memory_store import MemoryStore
from support.hostile_proxy import KINDS, S3_ANSWERS, VALKEY_ANSWERS, proxy
from support.paths import ROOT, TESTS
from support.published import (
    TEXTS,
    Wild,
    WildPlace,
    holds_what_was_written,
    open_at,
    publish_all,
    units_of,
    write,
)
from support.services import S3_ENVIRONMENT, Server, make_bucket, s3_server, valkey_server

pytestmark = pytest.mark.services

RUNS = int(os.environ.get("MEMSTORE_HOSTILE_SERVICES", "2"))
READS = 20  # of each thread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def every(store: MemoryStore) -> list[BlockKey]:
    return [unit for name in TEXTS for unit in units_of(store, name)]


def ask_again(store: MemoryStore) -> None:
    """Lets the next request reach the server without a wait."""
    store._catalog.database.reads.caches["valkey"].skips_until = 0.0


def test_readers_share_what_one_has_read(texts: ObjectStore, server: Server) -> None:
    with open_at(texts, shared=Valkey(server.url, timeout=60.0)) as store:
        holds_what_was_written(store, every(store))
        assert store.tier_stats()["valkey"]["misses"] == len(every(store))
    counting = WildPlace(texts, Wild(0, 0.0))
    with open_at(counting, shared=Valkey(server.url, timeout=60.0)) as store:
        holds_what_was_written(store, every(store))
        stats = store.tier_stats()
        assert stats["valkey"]["hits"] == len(every(store)) and stats["remote"]["hits"] == 0
        assert counting.requests == 0 and "failed" not in stats["valkey"]
    keys = server.tell("KEYS *")
    assert "memstore:4:" in keys and "{" not in keys


def test_a_server_that_is_killed_and_restarted_empty_is_used_again(
    texts: ObjectStore, tmp_path: Path
) -> None:
    with (
        valkey_server(tmp_path) as server,
        open_at(texts, shared=Valkey(server.url, timeout=1.0), host_budget=16384) as store,
    ):
        units, rng = every(store), random.Random(0)
        for _ in range(3):
            for running in (True, False):
                for _ in range(10):
                    holds_what_was_written(store, rng.sample(units, 16))
                if running:
                    server.kill()
            server.start()
            ask_again(store)
        assert store._catalog.source.counters["valkey"].failures.keys() == {"unavailable"}
        hits = store.tier_stats()["valkey"]["hits"]
        for _ in range(2):
            holds_what_was_written(store, units[:16])
            store.tiers.drop_document(1)
        assert store.tier_stats()["valkey"]["hits"] > hits


def test_a_server_that_hangs_costs_its_timeout_once(texts: ObjectStore, tmp_path: Path) -> None:
    with (
        valkey_server(tmp_path) as server,
        open_at(texts, shared=Valkey(server.url, timeout=0.5)) as store,
    ):
        server.hang()
        holds_what_was_written(store, units_of(store, "second")[:8])
        cache = store._catalog.database.reads.caches["valkey"]
        cache.skips_until = time.monotonic() + 600
        holds_what_was_written(store, units_of(store, "second")[8:24])
        stats = store.tier_stats()
        assert stats["remote"]["hits"] == 24 and stats["valkey"]["failed_unavailable"] == 1


def test_a_password_comes_from_the_environment(
    texts: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with valkey_server(tmp_path) as server:
        server.tell("CONFIG SET requirepass very-secret")
        for failed in (True, False):
            with open_at(texts, shared=Valkey(server.url, timeout=60.0)) as store:
                holds_what_was_written(store, units_of(store, "third")[:4])
                assert ("failed_unavailable" in store.tier_stats()["valkey"]) == failed
            monkeypatch.setenv("VALKEY_PASSWORD", "very-secret")


def test_hostile_answers_under_load_give_no_wrong_block(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy cuts, delays, doubles, changes and mixes up the answers of both servers."""
    done, told = Counter[str](), Counter[str]()
    with s3_server() as endpoint:
        make_bucket(endpoint, "bucket")
        for name, value in (S3_ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
            monkeypatch.setenv(name, value)
        with write(tmp_path / "m", codec="raw") as store:
            publish_all(store, "s3://bucket/library")
        port = urlsplit(endpoint).port
        for seed in range(RUNS):
            with (
                proxy(port, S3_ANSWERS, seed, rate=0.3) as objects,
                proxy(server.port, VALKEY_ANSWERS, seed, rate=0.2) as cache,
            ):
                objects.quiet = cache.quiet = False
                environment = os.environ | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{objects.port}"}
                environment["PYTHONPATH"] = f"{TESTS}:{ROOT}"
                command = [sys.executable, TESTS / "support" / "hostile_reads.py"]
                command += ["s3://bucket/library", f"redis://127.0.0.1:{cache.port}/0"]
                run = subprocess.run(
                    [*command, str(seed), str(READS)],
                    env=environment, capture_output=True, text=True, timeout=600,
                )  # fmt: skip
                assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
                found = json.loads(run.stdout)
                assert not found["wrong"], (seed, found)
                told += Counter(found["told"])
                done += objects.done + cache.done
    print(dict(done), dict(told))  # shown by -s
    assert {*done} == {*KINDS} and told["answered"] > 0, (done, told)
