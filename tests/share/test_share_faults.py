"""Reading a published memory while everything fails in turn: no wrong block, every failure named,
and readers that recover by themselves.
"""

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

pytest.importorskip("obstore")

from memstore.block import BlockKey, RecordKey
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import (
    BlocksUnavailable,
    CorruptBlock,
    CorruptMemory,
    DocumentNotFound,
    InvalidInput,
    MemstoreError,
    StoreUnavailable,
)
from memstore.share.caches.answers import Answers
from memstore.share.caches.local_cache import LocalCache
from memstore.share.caches.shared_reads import SharedReads
from memstore.share.calls.deadlines import Calls
from memstore.share.calls.failures import Failure, Reason
from memstore.share.calls.rest import Rest
from memstore.share.objects.object_store import ObjectStore
from memstore.share.objects.open_object_store import open_object_store
from memstore.share.publish.publish import unpublish
from memstore.share.read.published_states import LEAVING
from memstore.store.memory_store import MemoryStore
from memstore.tiers.stats import TierCounter
from support.published import (
    TEXTS,
    Wild,
    WildPlace,
    WildServer,
    impatient,
    open_at,
    publish_all,
    truth,
    units_of,
    write,
)
from support.synthetic_documents import SIGNATURE

NAMED = (StoreUnavailable, CorruptMemory, DocumentNotFound)
RUNS, ROUND = int(os.environ.get("MEMSTORE_SHARE_FAULTS", "600")), 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    path = tmp_path_factory.mktemp("written")
    with write(path / "m", codec="raw") as store:
        return publish_all(store, f"memory://{path}")


def holds_what_was_written(store: MemoryStore, units: list[BlockKey], of: Any = None) -> None:
    of = of or truth(store)
    with store.lease(units) as lease:
        for unit, slot in zip(units, lease.held):
            k, v = of(unit)
            assert torch.equal(lease.k[slot], k) and torch.equal(lease.v[slot], v), unit


@pytest.mark.parametrize("rate", [0.1, 0.35, 0.8])
def test_no_fault_gives_a_wrong_block(
    place: ObjectStore, tmp_path: Path, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of all reads of the store and of both caches fails, in every way; the host tier is so
    small that every lease reads anew, and nothing is left alone after a failure.
    """
    monkeypatch.setattr("memstore.share.calls.rest._SECONDS", 0.0)
    monkeypatch.setattr("memstore.share.calls.deadlines._FIRST_PAUSE", 0.002)
    told: Counter[str] = Counter()
    wilds: list[Wild] = []
    rng = random.Random(rate)
    for round_ in range(RUNS // 3 // ROUND):
        wild, server = Wild(round_, rate, late=0.08), Wild(-round_, rate, late=0.08)
        wilds += [wild, server]
        local = LocalCache(tmp_path / f"{round_}", 60 << 10) if round_ % 2 else None
        shared = WildServer(server) if round_ % 3 else None
        wild.quiet = True  # opening has its own test
        store = open_at(WildPlace(place, wild), local=local, shared=shared, host_budget=4096)
        # where nearly everything fails much is late, too
        store._on_disk().catalog.source.remote.deadline = 10.0 if rate < 0.5 else 0.03
        with store:
            of = truth(store)
            every = [unit for name in TEXTS for unit in units_of(store, name)]
            wild.quiet = False
            for _ in range(ROUND):
                units = rng.sample(every, rng.randint(1, 16))
                if local is not None and rng.random() < 0.1:  # someone deletes, or a disk forgets
                    store._on_disk().catalog.source.settle()
                    for file in list(local.path.glob("??/*"))[::2]:
                        file.write_bytes(wild.spoilt(file.read_bytes()))
                try:
                    with store.lease(units) as lease:
                        told["answered"] += 1
                        for unit, slot in zip(units, lease.held):
                            k, v = of(unit)
                            assert torch.equal(lease.k[slot], k), (unit, wild.done)
                            assert torch.equal(lease.v[slot], v), (unit, wild.done)
                except NAMED as error:
                    told[type(error).__name__] += 1
                    assert str(error).count("\n") == 0 and len(str(error)) < 600
                    if isinstance(error, BlocksUnavailable):
                        assert error.units <= {*units}
            wild.quiet = server.quiet = True
            store._on_disk().catalog.source.remote.deadline = 600.0
            holds_what_was_written(store, every[:16])
            for counter in store.retrieval.tiers.disk.counters.values():
                assert counter.failures().keys() <= {*get_args(Reason)}
    assert sum(told.values()) == RUNS // 3
    assert told["answered"] > (RUNS // 3 * 0.5 if rate < 0.5 else 0)
    assert sum(sum(wild.done.values()) for wild in wilds) > RUNS // 3 * rate * 0.5


def test_failures_are_counted_by_reason_and_are_no_misses(place: ObjectStore) -> None:
    class Broken(WildServer):
        def receive(self, keys, *_):
            yield range(len(keys)), [Failure("late", "no answer")] * len(keys)

    with open_at(place, shared=Broken(Wild(0, 0.0))) as store:
        holds_what_was_written(store, units_of(store, "first")[:8])
        valkey, remote = store.tier_stats()["valkey"], store.tier_stats()["remote"]
        assert valkey["failed_late"] and valkey["failed"] == valkey["failed_late"]
        assert valkey["hits"] == valkey["misses"] == 0 and remote["hits"] == 8


def test_another_keys_value_is_refused_and_replaced(place: ObjectStore) -> None:
    server = WildServer(Wild(0, 0.0))
    with open_at(place, shared=server, host_budget=4096) as store:
        units = units_of(store, "first")[:8]
        holds_what_was_written(store, units)
        store._on_disk().catalog.source.settle()
        keys = list(server.held)
        assert len(keys) == 4 and all(key.startswith("memstore:3:") for key in keys)
        server.held = dict(zip(keys, [server.held[key] for key in keys[1:] + keys[:1]]))
        store.lease(units_of(store, "third")[:32]).release()  # the host tier forgets
        holds_what_was_written(store, units)
        assert store.tier_stats()["valkey"]["failed_other"] == 4
        store._on_disk().catalog.source.settle()
        store.lease(units_of(store, "third")[:32]).release()
        hits = store.tier_stats()["valkey"]["hits"]
        holds_what_was_written(store, units)
        assert store.tier_stats()["valkey"]["hits"] == hits + 8


def test_a_record_that_is_damaged_where_it_lies_is_named(place: ObjectStore) -> None:
    class Damaged(WildPlace):
        def get_ranges(self, name, ranges):
            parts = super().get_ranges(name, ranges)
            return [memoryview(bytes(part[:-1]) + bytes([part[-1] ^ 1])) for part in parts]

    damaged = Damaged(place, Wild(0, 0.0))
    with open_at(damaged) as store, pytest.raises(CorruptMemory, match=r"damaged .*publish"):
        store.lease(units_of(store, "first")[:2])
    real = WildPlace(place, Wild(0, 0.0))
    with open_at(real) as store:
        store.lease(units_of(store, "first")[:2]).release()  # the index is held
        store._on_disk().catalog.source.remote.objects = damaged
        with pytest.raises(CorruptBlock, match="document 1, block 5, layer 1"):
            store.lease([BlockKey(1, 1, 5, 0), BlockKey(1, 1, 5, 1)])


class Away(WildPlace):
    """A place that can go away: every read fails at once, or hangs."""

    away, hangs = False, False

    def get_ranges(self, name, ranges):
        if self.away:
            if self.hangs:
                time.sleep(0.4)
            raise StoreUnavailable(f"{self.url}: connection refused; try again")
        return super().get_ranges(name, ranges)


@pytest.mark.parametrize("hangs", [False, True])
def test_when_the_store_is_away_what_is_cached_answers(
    place: ObjectStore, tmp_path: Path, hangs: bool
) -> None:
    away = Away(place, Wild(0, 0.0))
    local = LocalCache(tmp_path / "cache", 1 << 20)
    with open_at(away, local=local) as store:
        known = units_of(store, "first")[:20]
        holds_what_was_written(store, known)
        away.away, away.hangs = True, hangs
        holds_what_was_written(store, known)
        began = time.monotonic()
        with (
            impatient(store),
            pytest.raises(StoreUnavailable, match="what is cached still answers"),
        ):
            store.lease(units_of(store, "second")[:4])
        assert time.monotonic() - began < 30  # the deadline and no hang, on a busy machine
        away.away = False
        store._on_disk().catalog.source.remote.calls.rest.until = time.monotonic()
        holds_what_was_written(store, units_of(store, "second")[:4])
    away.away = False
    with open_at(away, local=local) as store:  # another process
        away.away = True
        holds_what_was_written(store, known)


def test_ten_reads_of_a_store_that_is_away_cost_one_deadline(
    place: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstore.share.calls.rest._SECONDS", 600.0)
    away = Away(place, Wild(0, 0.0))
    with open_at(away) as store:
        holds_what_was_written(store, units_of(store, "first")[:4])
        remote, units = store._on_disk().catalog.source.remote, units_of(store, "second")[:4]
        away.away = True
        with impatient(store), pytest.raises(StoreUnavailable, match="unreachable"):
            store.lease(units)
        tried = remote.requests
        for _ in range(9):
            with pytest.raises(StoreUnavailable, match=r"closed.*what is cached still answers"):
                store.lease(units)
        holds_what_was_written(store, units_of(store, "first")[:4])
        away.away = False
        with pytest.raises(StoreUnavailable):
            store.lease(units)
        assert remote.requests == tried  # nobody asked it again
        remote.calls.rest.until = time.monotonic()
        holds_what_was_written(store, units)


def test_opening_survives_a_storm(place: ObjectStore) -> None:
    opened = 0
    for seed in range(16):
        wild = WildPlace(place, Wild(seed, 0.4, late=0.05))
        try:
            with open_at(wild, deadline=60.0) as store:
                q = torch.ones(2, 1, 8)
                store.retrieval.search_landmarks(1, q, [(1, 0, 51)], 4)
                opened += 1
        except NAMED:
            pass
    assert opened > 8


def test_a_reader_survives_an_unpublish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with write(tmp_path / "m") as store:
        place = publish_all(store, f"memory://{tmp_path}")
    with open_at(place) as store:
        units, of = {name: units_of(store, name)[:4] for name in TEXTS}, truth(store)
        unpublish(place, ["second"])
        holds_what_was_written(store, units["second"])  # of the manifest that was opened
        store._on_disk().catalog.database.refresh()
        assert [row.name for row in store.ready()] == ["first", "third"]
        holds_what_was_written(store, units["second"], of)  # who began goes on
        past = time.monotonic() + LEAVING
        monkeypatch.setattr(
            "memstore.share.read.published_states.time", SimpleNamespace(monotonic=lambda: past)
        )
        store._on_disk().catalog.database.refresh()
        assert [row.name for row in store.ready()] == ["first", "third"]
        with pytest.raises(DocumentNotFound):
            store.lease(units["second"])
        holds_what_was_written(store, units["third"])


def test_an_object_that_went_with_its_document_is_told_as_that(tmp_path: Path) -> None:
    with write(tmp_path / "m") as store:
        place = publish_all(store, f"memory://{tmp_path}")
    with open_at(place) as store:
        units = units_of(store, "second")
        entry = store._on_disk().catalog.database.state.entries[units[0].document]
        unpublish(place, ["second"])
        place.delete(sorted({piece.segment for piece in entry.pieces}))
        with pytest.raises(DocumentNotFound):
            store.lease(units[:4])


# What is below the tiers


class OddServer:
    """A cache of readers that fails in a way that nobody expects, or has no threads to connect."""

    def __init__(self, threads: bool) -> None:
        self.threads = threads

    def receive(self, keys, wanted, size, until, connecting):
        if self.threads:
            raise ValueError("odd")
        try:
            connecting(lambda: None)
        except Failure as failure:
            yield range(len(keys)), [failure]


@pytest.mark.parametrize("threads", [True, False])
def test_what_nobody_expects_does_not_keep_a_cache_closed(
    threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = BlockTable(SIGNATURE, "raw")
    reads = SharedReads(OddServer(threads), TierCounter(), table, 20.0)  # type: ignore[arg-type]

    def read() -> Answers:
        key = RecordKey(1, 0, 0)
        record = b"", key, None, [0]
        batch = SimpleNamespace(heads_of=lambda record: None)
        return reads.read(
            batch,  # type: ignore[arg-type]
            [record], ["key"], time.monotonic() + 20, lambda found: ([], []),
        )  # fmt: skip

    if threads:
        with pytest.raises(ValueError, match="odd"):
            read()
    else:
        monkeypatch.setattr("threading.Thread.start", no_threads)
        assert len(read().unread) == 1
    assert reads.rest.over


def no_threads(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_server_that_did_not_answer_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memstore.share.calls.rest._SECONDS", 600.0)
    rest = Rest()
    rest.told("denied")
    rest.told("full")
    assert rest.over
    rest.told("late")
    assert not rest.over
    rest.until = time.monotonic()
    assert rest.over


@pytest.mark.parametrize("what", ["an interrupt", "no threads", "an error"])
def test_whatever_ends_a_call_the_store_is_asked_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(TierCounter())
    until = time.monotonic() + 60

    def fail(*_: object) -> None:
        raise {"an interrupt": KeyboardInterrupt}.get(what, ValueError)

    with monkeypatch.context() as patch:
        if what == "no threads":
            patch.setattr("threading.Thread.start", no_threads)
            (found,) = calls.gather([lambda left: 1], until)
            assert isinstance(found, Failure)
        else:
            if what == "an interrupt":  # while it waits for the answer
                patch.setattr("memstore.share.calls.deadlines.wait_for", fail)
            with pytest.raises((KeyboardInterrupt, ValueError)):
                calls.gather([fail], until)
    assert calls.call(lambda left: 7, until) == 7


def test_calls_are_tried_again_and_never_later_than_the_deadline() -> None:
    counter = TierCounter()
    calls = Calls(counter)
    tries = []

    def work(left: float) -> int:
        tries.append(left)
        if len(tries) < 3:
            raise Failure("unreachable", "reset")
        return 7

    assert calls.call(work, time.monotonic() + 30) == 7
    assert counter.failures() == {"unreachable": 2}
    go = threading.Event()
    began = time.monotonic()
    found = calls.gather([lambda left: go.wait(60), lambda left: 5], began + 0.1)
    go.set()
    assert isinstance(found[0], Failure) and found[0].reason == "late" and found[1] == 5
    assert time.monotonic() - began < 20
    calls.close()


def test_a_call_that_is_late_is_counted_once() -> None:
    counter, go, failed = TierCounter(), threading.Event(), threading.Event()

    def work(left: float) -> None:
        go.wait(60)
        failed.set()
        raise Failure("late", "no answer")

    (found,) = Calls(counter, name="late").gather([work], time.monotonic() + 0.1)
    go.set()
    assert failed.wait(60)
    for thread in threading.enumerate():
        if thread.name.startswith("late-"):
            thread.join()
    assert isinstance(found, Failure) and counter.failures() == {"late": 1}


def test_calls_that_wait_for_a_thread_end_when_all_is_closed() -> None:
    calls = Calls(TierCounter(), threads=1)
    began, go = threading.Event(), threading.Event()

    def work(left: float) -> bool:
        began.set()
        return go.wait(60)

    def close() -> None:
        assert began.wait(60)
        time.sleep(0.1)  # until the second waits
        calls.close()
        go.set()

    closing = threading.Thread(target=close)
    closing.start()
    first, second = calls.gather([work, lambda left: True], time.monotonic() + 60)
    closing.join()
    assert first is True and isinstance(second, Failure) and second.reason == "closed"


def test_what_fails_is_tried_again_with_growing_pauses() -> None:
    calls = Calls(TierCounter())
    tried = []

    def work(left: float) -> None:
        tried.append(1)
        raise Failure("refused", "503")

    with pytest.raises(Failure, match="503"):
        calls.call(work, time.monotonic() + 0.3)
    assert len(tried) <= 6  # pauses of 0.01, 0.02, 0.04, 0.08 and 0.16 seconds at least


# The local cache


def test_a_local_cache_keeps_its_budget_and_what_was_used_last(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "c", 20 * 4096)
    for number in range(100):
        cache.put([(f"k{number}", bytes([number]) * 4000)])
        assert cache.used <= cache.budget
        assert sum(file.stat().st_size for file in cache.path.glob("??/*")) <= cache.budget
    assert cache.get("k99", 1 << 20) == bytes([99]) * 4000 and cache.get("k1", 1 << 20) is None
    assert cache.evicted >= 80
    again = LocalCache(tmp_path / "c", 20 * 4096)
    assert again.get("k99", 1 << 20) == bytes([99]) * 4000 and again.used == cache.used
    cache.put([("large", bytes(30 * 4096))])
    assert cache.get("large", 1 << 20) is None and cache.used <= cache.budget
    cache.drop("k99")
    assert cache.get("k99", 1 << 20) is None


def test_what_is_larger_than_the_budget_takes_no_others_place(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "c", 20 * 4096)
    cache.put([(f"k{number}", bytes(4096)) for number in range(19)])
    cache.put([("large", bytes(30 * 4096))])
    assert all(cache.has(f"k{number}") for number in range(19)) and cache.evicted == 0
    cache.put([("large", bytes(30 * 4096)), ("small", bytes(100))])
    assert cache.has("small") and not cache.has("large") and cache.evicted == 0
    cache.put([("half", bytes(12 * 4096)), ("more", bytes(12 * 4096)), ("little", bytes(1))])
    assert [cache.has(key) for key in ("half", "more", "little")] == [True, False, True]
    assert cache.used == 4096 * len([*cache.path.glob("??/*")]) + 11 * 4096 <= cache.budget


@pytest.mark.parametrize("first", [True, False])
def test_two_that_make_a_cache_at_once_both_have_it(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other is faster, before or after this one has looked what is in the directory."""
    listdir, others = os.listdir, list[LocalCache]()

    def overtaken(path: Path) -> list[str]:
        monkeypatch.setattr("os.listdir", listdir)
        found = [] if first else listdir(path)
        others.append(LocalCache(path, 1 << 20))
        others[0].put([("key", bytes(5000))])
        return listdir(path) if first else found

    monkeypatch.setattr("os.listdir", overtaken)
    cache = LocalCache(tmp_path / "c", 1 << 20)
    assert cache.get("key", 1 << 20) == bytes(5000) and cache.used == others[0].used == 8192


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


def test_a_full_disk_keeps_nothing_and_is_counted(place: ObjectStore, tmp_path: Path) -> None:
    """A cache whose every write meets a limit of the file system."""
    import resource

    local = LocalCache(tmp_path / "c", 1 << 24)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        with open_at(place, local=local) as store:
            holds_what_was_written(store, units_of(store, "first")[:8])
            store._on_disk().catalog.source.settle()
            counter = store._on_disk().catalog.source.counters["local"]
            assert counter.failures() == {"full": 1}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert local.used == 0 and not list(local.path.glob("??/*"))


def test_a_directory_of_other_files_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(InvalidInput, match="is not empty"):
        LocalCache(tmp_path, 1 << 20)
    with pytest.raises(InvalidInput, match="cannot be used"):
        LocalCache(tmp_path / "note.txt" / "c", 1 << 20)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"valkey": "http://localhost"}, "unknown scheme"),
        ({"valkey": "redis://user:secret@localhost?ttl=4"}, "unknown setting"),
        ({"valkey": "http://user:a/secret@localhost"}, "localhost: it is no URL of a Valkey"),
        ({"valkey": "redis://user:a/secret@localhost"}, "localhost: it is no URL of a Valkey"),
        ({"valkey": "redis://[::1/0"}, "it is no URL of a Valkey"),
        ({"deadline": float("inf")}, "at most 1,000,000,000 seconds"),
        ({"deadline": float("nan")}, "must be above 0"),
        ({"valkey": "redis://localhost", "valkey_ttl": float("inf")}, "at most"),
        ({"deadline": -1}, "must be above 0"),
        ({"local_budget": 0}, "must be above 0"),
    ],
)
def test_bad_options_are_one_line(
    place: ObjectStore, options: dict[str, object], text: str
) -> None:
    with pytest.raises(MemstoreError, match=text) as raised:
        MemoryStore.open(place.url, **options)
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_options_of_published_memories_are_not_for_directories(tmp_path: Path) -> None:
    write(tmp_path / "m").close()
    with pytest.raises(MemstoreError, match="is of published memories"):
        MemoryStore.open(tmp_path / "m", deadline=3.0)


def test_url_of_nothing(tmp_path: Path) -> None:
    for url in (f"memory://{tmp_path}/none", f"file://{tmp_path}/none"):
        with pytest.raises(MemstoreError):
            MemoryStore.open(url)
    assert open_object_store(f"memory://{tmp_path}/none") is not None
