"""How soon is the first token of an answer there from a published memory, by the distance of the
object store, and how many requests does that take?

A memory of --memory-tokens tokens, published to a directory (file://); every request takes
--latency milliseconds longer, as one at a distance would. Timed are opening, attaching the document
(which reads its landmarks), and a question of 16 tokens to its first answer token.

cold    nothing is cached anywhere
local   what an earlier run read is in a local cache
here    asked again in the same process

Requests and bytes are those of the object store's client; those of opening and attaching are
counted separately from those of blocks. Medians of the repeats, in turns.

    python -m benchmarks.share.first_token --text books-test.jsonl.zst
"""

import shutil
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.memories import kept_memory, long_text
from benchmarks.common.options import add, add_memory_tokens, load, parser
from benchmarks.common.results import write_part
from benchmarks.common.tables import table, tokens_text
from benchmarks.common.timing import interleaved
from memstore import LandmarkModel, MemoryStore
from memstore.share.local_cache import LocalCache
from memstore.share.object_store import ObjectStore
from memstore.share.open_object_store import open_object_store
from memstore.share.publication import PublishedDatabase
from memstore.share.publish import publish
from memstore.share.published_catalog import PublishedCatalog

QUESTION = 16  # tokens
WAYS = ("cold", "local", "here")


class Distant(ObjectStore):
    """An object store whose requests take longer, and are counted."""

    def __init__(self, place: ObjectStore, seconds: float) -> None:
        self.__dict__.update(place.__dict__)
        self.seconds, self.requests, self.read = seconds, 0, 0

    def _wait(self) -> None:
        self.requests += 1
        time.sleep(self.seconds)

    def get(self, name: str) -> memoryview:
        self._wait()
        found = super().get(name)
        self.read += len(found)
        return found

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        self._wait()
        found = super().get_range(name, offset, length)
        self.read += len(found)
        return found

    def first(self, prefix: str) -> str | None:
        self._wait()
        return super().first(prefix)


class Asking:
    """One question to one published memory, asked in every way."""

    def __init__(self, model: LandmarkModel, url: str, question: list[int], cache: Path) -> None:
        self.model, self.url, self.question, self.cache = model, url, question, cache
        self.counts: dict[str, dict[str, float]] = {}

    def once(self, way: str, seconds: float, _: int) -> float:
        """Seconds to the first token; what it took is in `counts`."""
        place = Distant(open_object_store(self.url), seconds)
        local = None
        if way == "local":
            if not self.cache.exists():
                self._ask(
                    Distant(open_object_store(self.url), 0.0), LocalCache(self.cache, 1 << 33), way
                )
            local = LocalCache(self.cache, 1 << 33)
        return self._ask(place, local, way)

    def _ask(self, place: Distant, local: LocalCache | None, way: str) -> float:
        began = time.perf_counter()
        catalog = PublishedCatalog(PublishedDatabase(place, local))
        with MemoryStore(catalog) as store:
            with self.model.session(store, ["book"]) as session:
                attached = time.perf_counter() - began
                before = place.requests, place.read
                self._first_token(session)
                took = time.perf_counter() - began
            if way == "here":
                before, began = (place.requests, place.read), time.perf_counter()
                with self.model.session(store, ["book"]) as session:
                    self._first_token(session)
                attached, took = 0.0, time.perf_counter() - began
            store.tiers.settle()
            opening = (0, 0) if way == "here" else before
            records = store.tier_stats()["host"]["misses"]
        self.counts[way] = {
            "attached": attached,
            "opening_requests": opening[0],
            "opening_bytes": opening[1],
            "requests": place.requests - before[0],
            "bytes": place.read - before[1],
            "units": records,
        }
        return took

    def _first_token(self, session: Any) -> None:
        next(session.generate(session.feed(self.question)[-1], 1))


def main() -> None:
    arguments = parser(__doc__)
    add_memory_tokens(arguments, repeats=5)
    add(arguments, "--latency", [0.0, 10.0, 50.0], "milliseconds that a request takes longer")
    options = arguments.parse_args()
    model = load(options)
    rows = []
    with long_text(options, model) as (directory, _, text):
        memory = kept_memory(model, directory, text, options)
        there = directory / "published"
        shutil.rmtree(there, ignore_errors=True)
        with MemoryStore.open(memory, model.signature) as store:
            place = open_object_store(f"file://{there}", make=True)
            publish(store._catalog, store.ready(), place)
        question = model.tokenizer.encode(
            " What is the name of the old man who lives in the house near the river? It is"
        )[-QUESTION:]
        for latency in options.latency:
            asking = Asking(model, f"file://{there}", question, directory / "cache")
            shutil.rmtree(directory / "cache", ignore_errors=True)
            runs = {way: partial(asking.once, way, latency / 1000) for way in WAYS}
            for way in ("cold", "local"):
                runs[way](0)  # warm up
            measured = interleaved(runs, options.repeats)
            for way in WAYS:
                seconds = statistics.median(measured[way])
                rows.append(
                    {
                        "latency_ms": latency,
                        "way": way,
                        "seconds": seconds,
                        "measured": measured[way],
                    }
                    | asking.counts[way]
                )
    print(f"first answer token from {tokens_text(len(text))} tokens, published\n")
    head = [
        "added latency", "", "first token", "of it opening",
        "requests to open", "bytes", "requests of blocks", "bytes",
    ]  # fmt: skip
    lines = [
        [
            f"{row['latency_ms']:g} ms",
            row["way"],
            f"{1000 * row['seconds']:.0f} ms",
            f"{1000 * row['attached']:.0f} ms",
            row["opening_requests"],
            f"{row['opening_bytes'] / 1e6:.2f} MB",
            row["requests"],
            f"{row['bytes'] / 1e6:.2f} MB",
        ]
        for row in rows
    ]
    print(table(head, lines))
    write_part(options, "first_token", rows)


if __name__ == "__main__":
    main()
