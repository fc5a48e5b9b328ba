"""Long runs: budgets that are never exceeded, memory that does not grow, readers that never see a
wrong block.

MEMSTORE_SOAK_LOOKUPS (600) and MEMSTORE_SOAK_SECONDS (1) set how long; `make soak` sets more.
MEMSTORE_SEED makes other choices.
"""

import ctypes
import gc
import os
import random
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from memstore.block import BlockKey
from memstore.disk.format.document import Document
from memstore.store.memory_store import MemoryStore
from memstore.tiers.policy import POLICIES
from support.fork_server import RIGHT, ForkServer
from support.synthetic_documents import BLOCK, CHUNK, DIM, HEADS, SIGNATURE, block, ingest

LOOKUPS = int(os.environ.get("MEMSTORE_SOAK_LOOKUPS", "600"))
SECONDS = int(os.environ.get("MEMSTORE_SOAK_SECONDS", "1"))
SEED = int(os.environ.get("MEMSTORE_SEED", "0"))
READERS = 8 if SECONDS > 1 else 4
UNIT_BYTES = 2 * BLOCK * DIM * 2
# bytes by which what is resident at the end may exceed what was after the warm-up
GROWTH = 16 << 20

pytestmark = pytest.mark.timeout(7200 if LOOKUPS > 1200 or SECONDS > 1 else 900)


def resident() -> int:
    """Bytes of main memory that this process has, without what its allocator has but nobody
    uses.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # of glibc
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_budgets(store: MemoryStore) -> None:
    for name, counts in store.tier_stats().items():
        assert counts.get("held", 0) <= counts.get("budget", 0), name


class Library:
    """Documents that come and go; each one's text has its number."""

    def __init__(self, store: MemoryStore, chance: random.Random, first: int) -> None:
        self.store, self.chance, self.next = store, chance, first

    def change(self) -> None:
        """Read a new document, and forget the oldest of many."""
        name, size = (
            str(self.next),
            self.chance.randint(2, 12) * CHUNK + self.chance.randrange(CHUNK),
        )
        ingest(self.store, name, size, text=self.next, commit_bytes=self.chance.choice([1, 20_000]))
        self.next += 1
        documents = self.store.documents()
        if len(documents) > 5:
            self.store.forget(documents[0].name)

    def check_lookup(self, document: Document, *, thoroughly: bool) -> None:
        """One lookup of several units, announced or not."""
        chance, layer = self.chance, self.chance.choice((1, 2))
        numbers = [
            min(int(chance.paretovariate(0.4)), document.blocks) - 1
            for _ in range(chance.randint(1, self.most()))
        ]
        units = [
            BlockKey(document.id, layer, number, chance.randrange(HEADS)) for number in numbers
        ]
        if chance.random() < 0.5:
            self.store.retrieval.expect(
                [*units[::2], *(unit._replace(layer=3 - layer) for unit in units[:4])]
            )
        with self.store.lease(units) as lease:
            if thoroughly:
                for place, unit in enumerate(units):
                    length = min(BLOCK, document.tokens - unit.block * BLOCK)
                    k, v, _ = block(int(document.name), layer, unit.block, length)
                    slot = lease.slots[place]
                    assert torch.equal(lease.k[slot], k[unit.head]) and torch.equal(
                        lease.v[slot], v[unit.head]
                    ), unit

    def most(self) -> int:
        return min(16, self.store.tiers.top.capacity)


def test_budgets_hold_and_memory_stays_flat_over_random_lookups(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    gc.freeze()  # what was there before is not looked at each time that memory is
    request.addfinalizer(gc.unfreeze)
    chance = random.Random(SEED)
    MemoryStore.create(tmp_path / "m", SIGNATURE).close()
    sizes: list[int] = []
    first, rounds = 0, max(8, LOOKUPS // 10_000)
    change_every = max(150, LOOKUPS // 1000)
    for _ in range(rounds):
        least = 4 * 3 * HEADS * 3  # what a writer pins: the latest chunk and what it continues from
        budget = chance.randint(least, 6 * least) * UNIT_BYTES + chance.randrange(UNIT_BYTES)
        options = {"host_budget": budget, "policy": chance.choice(sorted(POLICIES))}
        if chance.random() < 0.5:
            options |= {
                "device": "cpu",
                "device_budget": chance.randint(16, 8 * least) * UNIT_BYTES,
            }
        with MemoryStore.open(tmp_path / "m", SIGNATURE, **options) as store:
            library = Library(store, chance, first)
            for lookup in range(LOOKUPS // rounds):
                if lookup % change_every == 0:
                    library.change()
                    documents = store.documents()
                library.check_lookup(chance.choice(documents), thoroughly=lookup % 25 == 0)
                check_budgets(store)
            store.tiers.settle()
            first = library.next
            check_budgets(store)
        sizes.append(resident())
    warm = max(sizes[: max(2, rounds // 4)])
    assert sizes[-1] - warm < GROWTH


# One process writes, others read

JOB = """
import os, random, signal, struct, sys, time, traceback
import torch
from memstore.block import BlockKey

path, outcomes, seconds, readers, seed = arguments[0], arguments[1], *map(int, arguments[2:])
signal.alarm(seconds + 200)
until = time.monotonic() + seconds
# (documents that are whole, documents that may be forgotten), told by the writer
told = os.open(outcomes + "/told", os.O_RDWR | os.O_CREAT)
os.pwrite(told, struct.pack("QQ", 0, 0), 0)


def heard():
    return struct.unpack("QQ", os.pread(told, 16, 0))


def write():
    whole = 0
    with MemoryStore.open(path, host_budget=1 << 20) as store:
        while time.monotonic() < until:
            chance = random.Random(seed * 1000 + whole)
            tokens = chance.randint(1, 14) * CHUNK + chance.randrange(CHUNK)
            ingest(store, str(whole), tokens, text=whole, commit_bytes=chance.choice([1, 1 << 16]))
            whole += 1
            gone = max(0, whole - 5)
            os.pwrite(told, struct.pack("QQ", whole, gone), 0)
            for document in store.documents():
                if int(document.name) < gone:
                    store.forget(document.name)
            time.sleep(chance.random() * 0.05)


def read(number):
    chance = random.Random(seed * 77 + number)
    while time.monotonic() < until:
        policy = chance.choice(["lru", "arc"])
        options = {"host_budget": chance.randint(40, 600) * 128, "policy": policy}
        if chance.random() < 0.3:
            options |= {"device": "cpu", "device_budget": chance.randint(40, 600) * 128}
        with MemoryStore.open(path, read_only=chance.random() < 0.5, **options) as store:
            for _ in range(chance.randint(1, 12)):
                whole, _ = heard()
                documents = {document.name: document for document in store.documents()}
                _, gone = heard()
                for name in range(gone, whole):
                    assert documents[str(name)].state == "ready", (name, gone, whole)
                ready = [document for document in documents.values() if document.state == "ready"]
                if not ready:
                    time.sleep(0.05)
                for _ in range(60 if ready else 0):
                    document = chance.choice(ready)
                    layer = chance.choice((1, 2))
                    draw = chance.randrange
                    units = [BlockKey(document.id, layer, draw(document.blocks), draw(HEADS))
                             for _ in range(chance.randint(1, 12))]
                    there = [unit._replace(layer=3 - layer) for unit in units]
                    store.retrieval.expect([*units, *there])
                    try:
                        with store.lease(units) as lease:
                            unit, slot = units[0], lease.slots[0]
                            length = min(BLOCK, document.tokens - unit.block * BLOCK)
                            k, v, _ = block(int(document.name), layer, unit.block, length)
                            assert torch.equal(lease.k[slot], k[unit.head]), unit
                            assert torch.equal(lease.v[slot], v[unit.head]), unit
                    except DocumentNotFound:
                        assert int(document.name) < heard()[1]
                        break
                for counts in store.tier_stats().values():
                    assert counts.get("held", 0) <= counts.get("budget", 0)
            store.tiers.prefetcher.drain()


children = []
for number in range(readers + 1):
    child = os.fork()
    if not child:
        code = 1
        try:
            write() if number == readers else read(number)
            code = 0
        except BaseException:
            with open(f"{outcomes}/{number}", "w") as file:
                file.write(traceback.format_exc())
        os._exit(code)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def test_readers_see_right_blocks_while_another_process_writes(
    children: ForkServer, tmp_path: Path
) -> None:
    MemoryStore.create(tmp_path / "m", SIGNATURE).close()
    (tmp_path / "outcomes").mkdir()
    arguments = (tmp_path / "m", tmp_path / "outcomes", SECONDS, READERS, SEED)
    assert (
        children.run("python_job", tmp_path / "printed", textwrap.dedent(JOB), *arguments) == RIGHT
    )
    failures = [
        file.read_text() for file in (tmp_path / "outcomes").iterdir() if file.name != "told"
    ]
    printed = (tmp_path / "printed").read_text()
    assert printed == f"{[0] * (READERS + 1)}\n" and not failures, "\n".join(failures)
