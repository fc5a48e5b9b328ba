"""A process that reads a published memory by several threads and compares every block. It prints
the failures by name as JSON.
"""

import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch

from memstore.errors import CorruptMemory, DocumentNotFound, MemoryNotFound, StoreUnavailable
from memstore.share import valkey as valkey_cache
from memstore.store.memory_store import MemoryStore
from support.published import TEXTS, truth, units_of

NAMED = (StoreUnavailable, CorruptMemory, DocumentNotFound, MemoryNotFound)
THREADS = 4


def main(url: str, valkey: str, seed: int, reads: int) -> None:
    """Open, as often as it takes, and read so often by each thread."""
    valkey_cache._SKIPPED = 0.05  # seconds: else nearly every read would be turned away unasked
    told, wrong = Counter[str](), list[str]()
    until = time.monotonic() + 120
    while True:
        try:
            store = MemoryStore.open(
                url, valkey=valkey, deadline=1.0, refresh=0.2, host_budget=4096
            )
            break
        except NAMED as error:
            told[f"open: {type(error).__name__}"] += 1
            if time.monotonic() > until:
                raise

    def read(number: int) -> None:
        rng = random.Random(1000 * seed + number)
        for _ in range(reads):
            units = rng.sample(every, rng.randint(1, 12))
            try:
                with store.lease(units) as lease:
                    for unit, slot in zip(units, lease.held):
                        k, v = of(unit)
                        if not (torch.equal(lease.k[slot], k) and torch.equal(lease.v[slot], v)):
                            wrong.append(f"wrong block {unit}")
                told["answered"] += 1
            except NAMED as error:
                told[type(error).__name__] += 1
                if "\n" in str(error):
                    wrong.append(repr(error))
            except BaseException as error:
                wrong.append(f"no name: {error!r}")
                raise

    with store:
        of = truth(store)
        every = [unit for name in TEXTS for unit in units_of(store, name)]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, range(THREADS)))
        stats = store.tier_stats()
    print(json.dumps({"told": told, "wrong": wrong, "stats": stats}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
