"""Reading a publication while store and caches fail: no wrong block, every failure named, readers
recover.

MEMSTORE_SHARE_FAULTS sets the number of reads.
"""

import os
import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from memstore.errors import (
    BlocksUnavailable,
    CorruptMemory,
    DocumentNotFound,
    MemstoreError,
    StoreUnavailable,
)
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import ObjectStore
from memstore.store.memory_store import MemoryStore
from support.published import (
    TEXTS,
    Wild,
    WildPlace,
    WildServer,
    holds_what_was_written,
    open_at,
    truth,
    units_of,
)

NAMED = (StoreUnavailable, CorruptMemory, DocumentNotFound)
REASONS = {"missing", "damaged", "unavailable"}
RUNS, ROUND = int(os.environ.get("MEMSTORE_SHARE_FAULTS", "480")), 40
EACH = RUNS // 3 // ROUND * ROUND  # reads with each rate of faults


@pytest.mark.parametrize("rate", [0.1, 0.35, 0.8])
def test_no_fault_gives_a_wrong_block(texts: ObjectStore, tmp_path: Path, rate: float) -> None:
    """A share of all reads of the store and of both caches fails, in every way. The host tier is so
    small that every lease reads again.
    """
    told: Counter[str] = Counter()
    wilds: list[Wild] = []
    rng = random.Random(rate)
    for round_ in range(EACH // ROUND):
        wild, server = Wild(round_, rate, late=0.08), Wild(-round_, rate, late=0.08)
        wilds += [wild, server]
        local = LocalCache(tmp_path / f"{round_}", 60 << 10) if round_ % 2 else None
        shared = WildServer(server) if round_ % 3 else None
        wild.quiet = True  # one reader is opened
        store = open_at(WildPlace(texts, wild), local=local, shared=shared, host_budget=4096)
        with store:
            of = truth(store)
            every = [unit for name in TEXTS for unit in units_of(store, name)]
            wild.quiet = False
            for _ in range(ROUND):
                units = rng.sample(every, rng.randint(1, 16))
                if local is not None and rng.random() < 0.1:  # someone deletes, or a disk forgets
                    for file in list(local.path.glob("??/*"))[::2]:
                        file.write_bytes(wild.spoilt(file.read_bytes()))
                try:
                    holds_what_was_written(store, units, of)
                    told["answered"] += 1
                except NAMED as error:
                    told[type(error).__name__] += 1
                    assert str(error).count("\n") == 0 and len(str(error)) < 600
                    if isinstance(error, BlocksUnavailable):
                        assert error.units <= {*units}
            wild.quiet = server.quiet = True
            holds_what_was_written(store, every[:16])
            for counter in store.retrieval.tiers.disk.counters.values():
                assert counter.failures.keys() <= REASONS
    assert sum(told.values()) == EACH
    assert told["answered"] > (EACH * 0.5 if rate < 0.5 else 0)
    assert sum(sum(wild.done.values()) for wild in wilds) > EACH * rate * 0.5


# The store is unavailable


def test_cached_blocks_answer_while_the_store_is_unavailable(
    texts: ObjectStore, tmp_path: Path
) -> None:
    away = WildPlace(texts, Wild(0, 0.0))
    local = LocalCache(tmp_path / "cache", 1 << 20)
    with open_at(away, local=local) as store:
        known = units_of(store, "first")[:20]
        holds_what_was_written(store, known)
        away.unreachable = True
        holds_what_was_written(store, known)
        units = units_of(store, "second")[:4]
        with pytest.raises(BlocksUnavailable, match="cached blocks can still be read") as caught:
            store.lease([*known[:2], *units])
        assert caught.value.units == {*units}
        away.unreachable = False
        holds_what_was_written(store, units_of(store, "second")[:4])
    with open_at(away, local=local) as store:  # another process
        away.unreachable = True
        holds_what_was_written(store, known)


# Options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"valkey": "http://localhost"}, "localhost: not the URL of a Valkey"),
        ({"valkey": "redis://user:secret@localhost?ttl=4"}, "localhost: not the URL of a Valkey"),
        ({"valkey": "redis://user:a/secret@localhost"}, "localhost: not the URL of a Valkey"),
        ({"deadline": float("nan")}, "must be above 0"),
        ({"local_budget": 0}, "must be above 0"),
    ],
)
def test_bad_options_are_one_line(
    texts: ObjectStore, options: dict[str, object], text: str
) -> None:
    with pytest.raises(MemstoreError, match=text) as raised:
        MemoryStore.open(texts.url, **options)
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)
