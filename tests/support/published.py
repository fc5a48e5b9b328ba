"""Published memories for tests, and object stores and caches that fail in every way."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memstore.block import BlockKey
from memstore.errors import ObjectNotFound, StoreUnavailable
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import ObjectStore
from memstore.share.open_object_store import open_object_store
from memstore.share.publication import PublishedDatabase
from memstore.share.publication_options import REFRESH
from memstore.share.published_catalog import PublishedCatalog
from memstore.store.memory_store import MemoryStore
from memstore.tiers.slots import TierCounter
from support import synthetic_documents as synthetic
from support.publishing import send

TEXTS = {"first": (1, 203), "second": (2, 118), "third": (3, 64)}  # name: text, tokens


def write(path: Path, **options: Any) -> MemoryStore:
    """A memory in a directory with the documents of TEXTS."""
    store = MemoryStore.create(path, synthetic.SIGNATURE, **options)
    for name, (text, tokens) in TEXTS.items():
        synthetic.ingest(store, name, tokens, text=text, commit_bytes=1 << 20)
    return store


def publish_all(store: MemoryStore, url: str, segment_bytes: int = 16 << 10) -> ObjectStore:
    """Publish all of a memory at a URL; a document is in several of so small segments."""
    place = open_object_store(url, make=True)
    send(store, place, segment_bytes=segment_bytes)
    return place


def open_at(
    place: ObjectStore,
    *,
    local: LocalCache | None = None,
    shared: Any = None,
    refresh: float = REFRESH,
    **options: Any,
) -> MemoryStore:
    """The published memory of a place that is no URL's."""
    catalog = PublishedCatalog(PublishedDatabase(place, local, shared, refresh=refresh))
    return MemoryStore(catalog, **options)


def units_of(store: MemoryStore, name: str) -> list[BlockKey]:
    """All units of a document in the layers with memory."""
    row = store.document(name)
    places = store.retrieval.stored_at([(row.id, block) for block in range(row.blocks)])
    return [
        BlockKey(*at, head)
        for layer in store.signature.memory_layers
        for number, block in filter(None, places)
        for at in [(number, layer, block)]
        for head in range(store.signature.num_kv_heads)
    ]


def holds_what_was_written(store: MemoryStore, units: list[BlockKey], of: Any = None) -> None:
    """Lease units and compare them. of: their truth, where the documents may be gone."""
    of = of or truth(store)
    with store.lease(units) as lease:
        for unit, slot in zip(units, lease.held):
            k, v = of(unit)
            assert torch.equal(lease.k[slot], k) and torch.equal(lease.v[slot], v), unit


class Wild:
    """Calls that fail now and then; `quiet` makes them all succeed."""

    def __init__(self, seed: int, rate: float, late: float = 0.2) -> None:
        """late: seconds that a late answer takes."""
        self._random, self._lock = random.Random(seed), threading.Lock()
        self.rate, self.late = rate, late
        self.quiet = False
        self.done: dict[str, int] = {}

    def fault(self, kinds: Sequence[str]) -> str:
        """What happens at this call; "" for nothing."""
        with self._lock:
            if self.quiet or self._random.random() >= self.rate:
                return ""
            kind = self._random.choice(kinds)
            if kind == "late" and self._random.random() < 0.8:
                kind = kinds[0]  # they take real time
            self.done[kind] = self.done.get(kind, 0) + 1
            return kind

    def spoilt(self, data: bytes) -> bytes:
        """With one byte changed."""
        with self._lock:
            at = self._random.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]


class WildPlace:
    """A place whose reads fail in every way that a network and a store have."""

    KINDS = ("flipped", "short", "unreachable", "5xx", "missing", "other", "late")

    def __init__(self, place: ObjectStore, wild: Wild) -> None:
        self.place, self.wild = place, wild
        self.url, self.identity = place.url, place.identity
        self.requests = 0
        self.unreachable = False  # until it is set back

    def __getattr__(self, name: str) -> Any:
        return getattr(self.place, name)  # all but reads

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        self.requests += 1
        if self.unreachable:
            raise StoreUnavailable(f"{self.url}: connection refused; try again")
        for _ in range(4):  # obstore repeats a request that fails
            kind = self.wild.fault(self.KINDS)
            if kind not in ("unreachable", "5xx"):
                break
        if kind == "late":
            time.sleep(self.wild.late)
        elif kind == "unreachable":
            raise StoreUnavailable(f"{self.url}: connection reset; try again")
        elif kind == "5xx":
            raise StoreUnavailable(f"{self.url}: server error 503; try again")
        elif kind == "missing":
            raise ObjectNotFound(f"{self.url}: there is no {name}")
        if kind == "other":  # bytes of another place in the object
            offset = max(0, offset - 64)
        part = self.place.get_range(name, offset, length)
        if kind == "flipped":
            return memoryview(self.wild.spoilt(bytes(part)))
        if kind == "short":
            return part[: len(part) // 2]
        return part


class WildServer:
    """A cache server for readers that loses, mixes up and spoils what it was given."""

    KINDS = ("unavailable", "flipped", "short", "other", "lost", "emptied", "late")

    def __init__(self, wild: Wild) -> None:
        self.wild, self.held = wild, dict[str, bytes]()
        self.counter = TierCounter()

    def get_many(self, keys: Sequence[str], most: int) -> list[bytes | None]:
        kind = self.wild.fault(self.KINDS)
        if kind == "unavailable":
            self.counter.failed(kind)
            return [None] * len(keys)
        if kind == "late":
            time.sleep(self.wild.late)
        if kind == "emptied":
            self.held.clear()
        values = [self.held.get(key) for key in keys]
        if kind == "other":  # what another key has
            values = values[-1:] + values[:-1]
        if kind == "lost":
            values = [None] * len(keys)
        if kind == "flipped":
            return [value and self.wild.spoilt(value) for value in values]
        if kind == "short":
            return [value and value[:-7] for value in values]
        return values

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        kind = self.wild.fault(("unavailable", "lost"))
        if kind == "unavailable":
            self.counter.failed(kind)
        elif kind != "lost":
            self.held.update(items)

    def drop(self, key: str) -> None:
        self.held.pop(key, None)

    def close(self) -> None:
        pass


def truth(store: MemoryStore) -> Callable[[BlockKey], tuple[Any, Any]]:
    """K and V of every unit of TEXTS, as they were written."""
    held = {
        (store.document(name).id, layer): synthetic.blocks(text, layer, 0, tokens)[:2]
        for name, (text, tokens) in TEXTS.items()
        if store.has(name)
        for layer in store.signature.memory_layers
    }

    def of(unit: BlockKey) -> tuple[Any, Any]:
        k, v = held[unit.document, unit.layer]
        return k[unit.block, unit.head], v[unit.block, unit.head]

    return of
