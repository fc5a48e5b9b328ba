"""Readers with a real Valkey or Redis server between them and the object store, alone and as a
cluster of three: what it loses, and its death, are never more than slower.
"""

import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("obstore")
pytest.importorskip("redis")

from memstore.block import BlockKey
from memstore.errors import StoreUnavailable
from memstore.share.caches.valkey import Valkey
from memstore.share.calls.failures import Failure
from memstore.share.objects.object_store import ObjectStore
from memstore.store.memory_store import MemoryStore
from support.published import (
    TEXTS,
    Wild,
    WildPlace,
    impatient,
    open_at,
    publish_all,
    truth,
    units_of,
    write,
)
from support.services import free_port
from support.valkey_server import Server, valkey_cluster, valkey_server

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    path = tmp_path_factory.mktemp("written")
    with write(path / "m", codec="raw") as store:
        return publish_all(store, f"memory://{path}/services")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with valkey_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


def check(store: MemoryStore, units: list[BlockKey]) -> None:
    of = truth(store)
    with store.lease(units) as lease:
        for unit, slot in zip(units, lease.held):
            k, v = of(unit)
            assert torch.equal(lease.k[slot], k) and torch.equal(lease.v[slot], v), unit


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has time to answer, however much else the machine does."""
    monkeypatch.setattr("memstore.share.caches.shared_reads._TIMEOUT", 60.0)
    monkeypatch.setattr("memstore.share.caches.valkey_connections._CONNECT", 60.0)


def every(store: MemoryStore) -> list[BlockKey]:
    return [unit for name in TEXTS for unit in units_of(store, name)]


def settled(store: MemoryStore) -> None:
    store._on_disk().catalog.source.settle()


@pytest.mark.parametrize("kind", ["one", "cluster"])
def test_readers_share_what_one_has_read(
    place: ObjectStore, server: Server, cluster: list[Server], kind: str
) -> None:
    url = server.url if kind == "one" else f"redis://127.0.0.1:{cluster[0].port}?cluster=true"
    with open_at(place, shared=Valkey(url, timeout=60.0)) as store:
        check(store, every(store))
        assert store.tier_stats()["valkey"]["misses"] == len(every(store))
        settled(store)
    counting = WildPlace(place, Wild(0, 0.0))
    with open_at(counting, shared=Valkey(url, timeout=60.0)) as store:
        check(store, every(store))
        stats = store.tier_stats()
        assert stats["valkey"]["hits"] == len(every(store)) and stats["remote"]["hits"] == 0
        assert counting.requests == 0 and "failed" not in stats["valkey"]
        records = len(every(store)) // 2
    if kind == "cluster":
        sizes = [int(one.tell("DBSIZE")[1:]) for one in cluster]
        assert min(sizes) > 0 and sum(sizes) == records
    else:
        keys = server.tell("KEYS *")
        assert "memstore:3:" in keys and "{" not in keys


def test_records_are_forgotten_after_their_time(place: ObjectStore, server: Server) -> None:
    server.tell("FLUSHALL")
    with open_at(place, shared=Valkey(server.url, ttl=500.0, timeout=60.0)) as store:
        check(store, units_of(store, "third")[:2])
        settled(store)
    key = server.tell("RANDOMKEY").split("\r\n")[1]
    assert 0 < int(server.tell(f"PTTL {key}")[1:]) <= 500_000


def test_a_server_that_evicts_at_random_is_never_wrong(place: ObjectStore, tmp_path: Path) -> None:
    options = ("--maxmemory", "2mb", "--maxmemory-policy", "allkeys-random")
    with valkey_server(tmp_path, *options) as small:
        rng = random.Random(0)
        with open_at(place, shared=Valkey(small.url, timeout=60.0), host_budget=4096) as store:
            units = every(store)
            for _ in range(60):
                check(store, rng.sample(units, 16))
            assert store.tier_stats()["valkey"]["hits"] > 0


def test_a_server_killed_in_the_middle_and_restarted_empty(
    place: ObjectStore, tmp_path: Path
) -> None:
    with valkey_server(tmp_path) as server:
        wrong: list[BaseException] = []
        stop = threading.Event()
        with open_at(place, shared=Valkey(server.url, timeout=1.0), host_budget=16384) as store:
            units = every(store)

            def read(seed: int) -> None:
                rng = random.Random(seed)
                while not stop.is_set():
                    try:
                        check(store, rng.sample(units, 16))
                    except BaseException as error:
                        wrong.append(error)
                        return

            threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
            for thread in threads:
                thread.start()
            for _ in range(3):
                stop.wait(0.3)
                server.kill()
                stop.wait(0.2)
                server.start()
            stop.set()
            for thread in threads:
                thread.join()
            assert not wrong
            failures = store._on_disk().catalog.source.counters["valkey"].failures()
            assert failures.keys() <= {"unreachable", "late", "closed", "refused"} and failures
            store._on_disk().catalog.source.shared_reads.rest.until = 0.0
            for _ in range(2):
                check(store, units[:16])
                settled(store)
                store.tiers.drop_document(1)
            hits = store.tier_stats()["valkey"]["hits"]
            check(store, units[:16])
            assert store.tier_stats()["valkey"]["hits"] > hits  # by itself


def test_a_node_of_a_cluster_goes_away(place: ObjectStore, tmp_path: Path) -> None:
    with valkey_cluster(tmp_path) as servers:
        url = f"redis://127.0.0.1:{servers[0].port}?cluster=true"
        with open_at(place, shared=Valkey(url, timeout=1.0), host_budget=4096) as store:
            check(store, every(store)[:16])
            settled(store)
            servers[2].kill()
            for at in range(0, 160, 16):
                check(store, every(store)[at : at + 16])


def test_a_cluster_of_which_nothing_is_left_costs_nothing_but_itself(
    place: ObjectStore, tmp_path: Path
) -> None:
    with valkey_cluster(tmp_path) as servers:
        url = f"redis://127.0.0.1:{servers[0].port}?cluster=true"
        with open_at(place, shared=Valkey(url, timeout=1.0), host_budget=4096) as store:
            check(store, every(store)[:16])
            settled(store)
            for server in servers:
                server.kill()
            for at in range(0, 96, 16):
                check(store, every(store)[at : at + 16])
            time.sleep(1.1)  # now it asks who has which keys
            check(store, every(store)[:16])
        with open_at(place, shared=Valkey(url, timeout=1.0), host_budget=4096) as store:
            check(store, every(store)[:16])
            settled(store)
            failures = store._on_disk().catalog.source.counters["valkey"].failures()
            assert failures.keys() <= {"unreachable", "closed"} and failures


def test_keys_of_a_cluster_that_no_server_has_are_read_from_the_place(
    place: ObjectStore, tmp_path: Path
) -> None:
    with valkey_cluster(tmp_path) as servers:
        for server in servers:
            assert server.tell("CLUSTER DELSLOTSRANGE 0 8191").startswith("+OK")
        url = f"redis://127.0.0.1:{servers[0].port}?cluster=true"
        with open_at(place, shared=Valkey(url, timeout=1.0), host_budget=4096) as store:
            units = every(store)[:64]
            for _ in range(3):
                for at in range(0, 64, 16):
                    check(store, units[at : at + 16])
                settled(store)
            stats = store.tier_stats()["valkey"]
            assert 0 < stats["hits"] < 128  # of those that have a server
            assert stats["failed_refused"] >= 1


def test_keys_of_a_cluster_that_moved_are_found_again(tmp_path: Path) -> None:
    keys = [f"key{number}" for number in range(60)]

    def read(cache: Valkey) -> list[bytes | str | None]:
        found: dict[int, bytes | str | None] = {}
        until = time.monotonic() + 5
        for run, replies in cache.receive(keys, [None] * 60, 1 << 10, until, lambda work: work()):
            for at, one in zip(run, replies):
                found[at] = one.reason if isinstance(one, Failure) else one and bytes(one)
        return [found[at] for at in range(60)]

    with valkey_cluster(tmp_path) as servers:
        url = f"redis://127.0.0.1:{servers[2].port}?cluster=true"
        cache = Valkey(url, timeout=1.0)
        try:
            values = [(key, key.encode()) for key in keys]
            cache.put(values)
            assert read(cache) == [value for _, value in values]
            for number, reason in ((1, "refused"), (2, "unreachable")):
                low, high = 16384 * number // 3, 16384 * (number + 1) // 3 - 1
                if number == 2:  # where it was first asked for the others, too
                    servers[2].kill()
                    before = read(cache)
                    assert before.count("unreachable") > 5
                for server in servers[: 2 if number == 2 else 3]:
                    server.tell(f"CLUSTER DELSLOTSRANGE {low} {high}")
                assert servers[0].tell("CLUSTER BUMPEPOCH").startswith("+")
                assert servers[0].tell(f"CLUSTER ADDSLOTSRANGE {low} {high}").startswith("+OK")
                for _ in range(200):  # until the others have heard of it
                    told = servers[1].tell("CLUSTER SLOTS")
                    if str(servers[number].port) not in told:
                        break
                    time.sleep(0.05)
                if number == 1:
                    assert read(cache).count(reason) > 5
                for _ in range(60):
                    after = read(cache)
                    if not {reason} & {*after}:
                        break
                    time.sleep(0.05)
                assert {*after} <= {None, *(value for _, value in values)}
        finally:
            cache.close()


def test_a_server_that_hangs_costs_no_more_than_its_deadline(
    place: ObjectStore, tmp_path: Path
) -> None:
    with (
        valkey_server(tmp_path) as server,
        open_at(place, shared=Valkey(server.url, timeout=0.5), deadline=20.0) as store,
    ):
        server.hang()
        check(store, units_of(store, "second")[:8])
        stats = store.tier_stats()
        assert stats["remote"]["hits"] == 8 and stats["valkey"]["misses"] == 0
        assert stats["valkey"]["failed_late"] >= 1


def test_a_password_comes_from_the_environment_and_is_never_told(
    place: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with valkey_server(tmp_path) as server:
        server.tell("CONFIG SET requirepass very-secret")
        with open_at(place, shared=Valkey(server.url, timeout=60.0)) as store:
            check(store, units_of(store, "third")[:4])
            assert store.tier_stats()["valkey"]["failed_denied"] >= 1
        monkeypatch.setenv("VALKEY_PASSWORD", "very-secret")
        with open_at(place, shared=Valkey(server.url, timeout=60.0)) as store:
            check(store, units_of(store, "third")[:4])
            assert "failed" not in store.tier_stats()["valkey"]
        shown = Valkey(f"redis://user:very-secret@127.0.0.1:{server.port}").shown
        assert "secret" not in shown and "user" not in shown


def test_a_server_is_read_by_tls(
    place: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    secured = free_port()
    with valkey_server(
        tmp_path / "server", "--tls-port", str(secured), "--tls-auth-clients", "no",
        "--tls-cert-file", str(certificate), "--tls-key-file", str(key),
    ):  # fmt: skip
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        url = f"rediss://localhost:{secured}"
        with open_at(place, shared=Valkey(url, timeout=60.0), host_budget=4096) as store:
            units = every(store)
            for at in [*range(0, len(units), 32)] * 2:  # by the same connection
                check(store, units[at : at + 32])
                settled(store)
            stats = store.tier_stats()["valkey"]
            assert stats["hits"] == stats["misses"] == len(units) and "failed" not in stats


def test_values_that_are_larger_than_a_record_are_not_received_and_replaced(
    place: ObjectStore, server: Server
) -> None:
    server.tell("FLUSHALL")
    with open_at(place, shared=Valkey(server.url, timeout=60.0), host_budget=4096) as store:
        units = units_of(store, "first")

        def read() -> None:
            for at in range(0, len(units), 16):
                check(store, units[at : at + 16])
                settled(store)

        read()
        keys = server.tell("KEYS *").split("\r\n")[2::2]
        for key in keys[::7]:
            assert server.tell(f"SETRANGE {key} 8000000 x") == ":8000001\r\n"
        for _ in range(10):  # of those that are asked for together one is found at a time
            read()
            lengths = {int(server.tell(f"STRLEN {key}")[1:]) for key in keys}
            if max(lengths) < 8_000_000:
                break
        assert max(lengths) < 8_000_000
        failed = store._on_disk().catalog.source.counters["valkey"].failures()
        assert failed.keys() == {"damaged", "closed"} and failed["damaged"] <= len(keys[::7])


def test_without_store_and_server_the_error_is_named(place: ObjectStore, tmp_path: Path) -> None:
    class Away(WildPlace):
        def get_ranges(self, name, ranges):
            raise StoreUnavailable(f"{self.url}: connection refused; try again")

    with valkey_server(tmp_path) as server:
        away = Away(place, Wild(0, 0.0))
        with open_at(place, shared=Valkey(server.url, timeout=60.0)) as store:
            check(store, every(store)[:16])
            settled(store)
        with open_at(away, shared=Valkey(server.url, timeout=60.0), host_budget=4096) as store:
            check(store, every(store)[:16])  # the server has them
            server.kill()
            with (
                impatient(store),
                pytest.raises(StoreUnavailable, match="what is cached still answers"),
            ):
                check(store, every(store)[16:32])
