"""Do many readers of one published memory stay right, up to date and small, while somebody adds,
replaces and removes documents, and requests to the object store fail?

--processes processes of --each threads open the memory by its URL, with one local cache for all,
and ask without end, by a tiny model of random weights; beside every ask a passage's keys and values
are compared with what the model computes of its tokens. One more process adds documents, edits
them, appends to them and removes them, a change every two seconds, and merges and prunes now and
then. A share --faults of all requests of all of them fails: late, refused, cut short, flipped,
missing, or done and not answered.

wrong    Passages told as sources that are not the text that their document had there in any
         manifest which was the reader's from before the question to after the answer; and of the
         other passages, those whose keys and values are another's.
behind   Seconds by which a question came later than the manifest that its reader had not read yet
         (0 for one that had read the newest).
MB, descriptors, threads
         Of the reading processes, resident and open; medians of the first and of the last quarter
         of the time, of samples every ten seconds.
failed   By the error's name: asks, looks at a passage, and changes, which were done again.

    python -m benchmarks.share.updates --minutes 30
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks.common.main_memory import status_bytes
from benchmarks.common.memories import workplace
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table
from memstore import MemoryStore
from memstore.block import BlockKey
from memstore.errors import DocumentNotFound, MemstoreError, ObjectNotFound, StoreUnavailable
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.adaptation import Adaptation
from memstore.model.passages.passage_encoding import encode
from memstore.model.passages.selector import Selector
from memstore.model.texts.source_text import Text
from memstore.share.caches.local_cache import LocalCache
from memstore.share.format.published import Published
from memstore.share.objects.object_store import ObjectStore
from memstore.share.objects.open_object_store import open_object_store
from memstore.share.objects.sizes import OBJECT_BYTES
from memstore.share.publish.garbage_collection import prune
from memstore.share.publish.merge import merge
from memstore.share.publish.publish import PublishOptions, publish, unpublish

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # what fails there fails here
published = import_module("support.published")
tiny_decoder = import_module("support.tiny_decoder")

T = TypeVar("T")

EVERY = 10.0  # seconds between two samples
CHANGE = 2.0  # and between two changes
GRACE = 120.0
REFRESH = 5.0
ROUNDING = 0.01  # keys and values of another passage are some hundred times as far away
PARAGRAPHS = 12
POOL = """
mill fox river copper anchor orchard kettle ladder harbour night wind bridge door barn mare lantern
quarry ferry garden tower meadow chapel bakery saddle
""".split()  # noqa: SIM905 (it is read)

Edition = tuple[tuple[int, int], ...]
"""A document: of each of its paragraphs its number, and how often it was edited."""


@lru_cache(1 << 16)
def paragraph(name: str, number: int, edits: int) -> str:
    """No two have the same text."""
    chance = random.Random(f"{name} {number} {edits}")
    first, second, third = chance.sample(POOL, 3)
    return (
        f"In note {number} of {name}, edition {edits}, the keeper of the {first} and the {second} "
        f"pays {chance.randrange(10, 1000)} crowns for the {third}."
    )


def text_of(name: str, edition: Edition) -> str:
    """The document's text."""
    return "\n\n".join(paragraph(name, number, edits) for number, edits in edition)


def model() -> HuggingFacePassageModel:
    """The same one every time."""
    made = tiny_decoder.decoder("llama", num_hidden_layers=3)
    return HuggingFacePassageModel(
        made, tiny_decoder.tokenizer(), Adaptation(Selector(), top_k=3), weights="random"
    )


class Faulty(ObjectStore):
    """A place of whose requests a share fails."""

    def __init__(self, place: ObjectStore, wild: Any, *kinds: str) -> None:
        """kinds: of faults of a read, beside those that every request may have."""
        self.__dict__.update(place.__dict__)
        self.wild, self._kinds = wild, kinds

    def _fail(self, name: str, *kinds: str) -> str:
        """What is still to be done of a fault."""
        kind: str = self.wild.fault(("unreachable", "5xx", "late", *kinds))
        if kind == "late":
            time.sleep(self.wild.late)
        elif kind == "unreachable":
            raise StoreUnavailable(f"{self.url}: connection reset; try again")
        elif kind == "5xx":
            raise StoreUnavailable(f"{self.url}: server error 503; try again")
        elif kind == "missing":
            raise ObjectNotFound(f"{self.url}: there is no {name}")
        return kind

    def get(self, name: str, most: int = OBJECT_BYTES) -> memoryview:
        kind = self._fail(name, *self._kinds)
        return self._spoilt(kind, super().get(name, most))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        kind = self._fail(name, *self._kinds)
        return [self._spoilt(kind, part) for part in super().get_ranges(name, ranges)]

    def _spoilt(self, kind: str, data: memoryview) -> memoryview:
        if kind == "flipped":
            return memoryview(self.wild.spoilt(bytes(data)))
        return data[: len(data) // 2] if kind == "short" else data

    def first(self, prefix: str) -> str | None:
        self._fail(prefix)
        return super().first(prefix)

    def names(self, prefix: str) -> Iterator[Any]:
        self._fail(prefix)
        return super().names(prefix)

    def create(self, name: str, data: bytes) -> bool:
        kind = self._fail(name, "lost")
        return self._unless_lost(kind, super().create(name, data))

    def put(self, name: str, data: bytes) -> None:
        kind = self._fail(name, "lost")
        self._unless_lost(kind, super().put(name, data))

    def delete(self, names: Sequence[str]) -> None:
        kind = self._fail("", "lost")
        self._unless_lost(kind, super().delete(names))

    def _unless_lost(self, kind: str, result: Any) -> Any:
        if kind == "lost":
            raise StoreUnavailable(f"{self.url}: connection reset; try again")
        return result


def faulty(directory: Path, options: argparse.Namespace, *kinds: str) -> Faulty:
    """Where the memory is published; see Faulty."""
    wild = published.Wild(options.seed, options.faults, late=0.3)
    return Faulty(open_object_store(f"file://{directory}/there"), wild, *kinds)


class Log:
    """Lines of JSON; of several threads."""

    def __init__(self, path: Path) -> None:
        self._file, self._lock = path.open("w"), threading.Lock()

    def __call__(self, **values: Any) -> None:
        with self._lock:
            print(json.dumps(values), file=self._file, flush=True)


def lines(path: Path) -> list[dict[str, Any]]:
    """What a log holds."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# Who reads


def read(directory: Path, options: argparse.Namespace) -> None:
    """A process of readers."""
    place, log = (
        faulty(directory, options, "missing", "flipped", "short"),
        Log(_log(directory, options.seed)),
    )
    models = [model() for _ in range(options.each)]
    store = again(lambda: published.open_at(
        place, deadline=20.0, refresh=REFRESH, local=LocalCache(directory / "cache", 4 << 20),
        host_budget=1 << 20,
    ))  # fmt: skip
    until = time.monotonic() + 60 * options.minutes

    def work(number: int) -> None:
        chance = random.Random(1000 * options.seed + number)
        while time.monotonic() < until:
            for what, work in (("ask", ask), ("compare", compare)):
                try:
                    work(models[number], store, chance, log)
                except MemstoreError as error:
                    said = str(error).replace(place.url, "URL")
                    log(failed=what, error=type(error).__name__, said=said)
            time.sleep(options.pause)

    with store:
        threads = [threading.Thread(target=work, args=(at,)) for at in range(options.each)]
        for thread in threads:
            thread.start()
        while time.monotonic() < until:
            log(at=time.time(), **held())
            time.sleep(EVERY)
        for thread in threads:
            thread.join()
    log(faults=place.wild.done)


def ask(
    reader: HuggingFacePassageModel, store: MemoryStore, chance: random.Random, log: Log
) -> None:
    """Ask once."""
    question = (
        f"What does the keeper of the {chance.choice(POOL)} and the {chance.choice(POOL)} pay?"
    )
    at, before = time.time(), store.manifest
    answer = reader.ask(question, store, max_new_tokens=4, until_sentence=False)
    log(
        asked=at,
        manifests=[before, store.manifest],
        sources=[(source.document, source.span, source.text) for source in answer.sources],
    )


def compare(
    reader: HuggingFacePassageModel, store: MemoryStore, chance: random.Random, log: Log
) -> None:
    """Look at one passage."""
    row = chance.choice(store.ready())
    log(passage=passage_is_right(reader, store, row.id, chance.randrange(row.blocks)))


def passage_is_right(
    reader: HuggingFacePassageModel, store: MemoryStore, document: int, block: int
) -> bool:
    """Are a passage's keys and values those of its tokens, but for rounding?"""
    (passage,) = store.passages(document, block, block + 1)
    (place,) = store.retrieval.stored_at([(document, block)])
    assert place is not None
    (made,) = encode(reader, [passage.ids.tolist()])
    layers, heads = reader.shape.memory_layers, range(reader.shape.num_kv_heads)
    units = [BlockKey(place[0], layer, place[1], head) for layer in layers for head in heads]
    with store.lease(units) as lease:
        n = len(passage.ids)
        k, v = (half[lease.slots][:, :n] for half in (lease.k, lease.v))
        near = partial(torch.allclose, rtol=ROUNDING, atol=ROUNDING)
        return near(k, made.k.flatten(0, 1)) and near(v, made.v.flatten(0, 1))


def held() -> dict[str, float]:
    """What this process holds."""
    return {
        "MB": status_bytes("VmRSS") / 1e6,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


# Who writes


class Writer:
    """Changes what is published; logs of every change the documents that it makes others, and the
    manifests between which it was done.
    """

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.reader, self.chance = model(), random.Random(options.seed)
        self.place = faulty(directory, options, "flipped", "short")
        self.log, self.failed = Log(directory / "changes"), Counter[str]()
        self.editions: dict[str, Edition] = {}
        self.names = self.documents = options.documents
        self.memory = MemoryStore.open(directory / "memory")
        self.number = 0
        first = {row.name: tuple((n, 0) for n in range(PARAGRAPHS)) for row in self.memory.ready()}
        self.change("begin", lambda: self.editions.update(first) or {**first})

    def run(self, minutes: float) -> None:
        """Until the time is over."""
        until = time.monotonic() + 60 * minutes
        works: dict[str, Callable[[], dict[str, Edition | None]]] = {
            "edit": self.edit, "append": self.append, "add": self.add, "remove": self.remove,
            "merge": self.merge, "prune": self.prune,
        }  # fmt: skip
        while time.monotonic() < until:
            (what,) = self.chance.choices(list(works), [40, 10, 20, 20, 5, 5])
            count = len(self.editions)
            if what == "add" and count > 1.5 * self.documents:
                what = "remove"
            if what == "remove" and count < self.documents / 2:
                what = "add"
            self.change(what, works[what])
            time.sleep(CHANGE)
        self.log(failed=self.failed, faults=self.place.wild.done, **held())

    def change(self, what: str, work: Callable[[], dict[str, Edition | None]]) -> None:
        """Do it, and log it."""
        before, began = self.number, time.time()
        changed = work()
        self.number = self._again(lambda: Published.open(self.place).manifest.number)
        self.log(
            what=what, after=before, number=self.number, at=time.time(),
            seconds=time.time() - began, documents=changed,
        )  # fmt: skip

    def add(self) -> dict[str, Edition | None]:
        self.names += 1
        return self.written(f"book {self.names}", tuple((n, 0) for n in range(PARAGRAPHS)))

    def edit(self) -> dict[str, Edition | None]:
        name = self.chance.choice(list(self.editions))
        edition = dict(self.editions[name])
        for number in self.chance.sample(sorted(edition), 2):
            edition[number] += 1
        if len(edition) > PARAGRAPHS // 2:  # one goes, and all behind it stand elsewhere
            del edition[self.chance.choice(sorted(edition))]
        return self.written(name, tuple(edition.items()))

    def append(self) -> dict[str, Edition | None]:
        name = self.chance.choice(list(self.editions))
        old = self.editions[name]
        new = max(number for number, _ in old) + 1, 0
        added = Text(f"\n\n{paragraph(name, *new)}", name)
        self.reader.ingest(added, self.memory, mode="append")
        return self.published(name, (*old, new))

    def written(self, name: str, edition: Edition) -> dict[str, Edition | None]:
        """Read a document in and publish it."""
        mode: Any = "replace" if self.memory.has(name) else "new"
        self.reader.ingest(Text(text_of(name, edition), name), self.memory, mode=mode)
        return self.published(name, edition)

    def published(self, name: str, edition: Edition) -> dict[str, Edition | None]:
        """Publish a document of the memory."""
        catalog, send = self.memory._on_disk().catalog, PublishOptions(replace=True, grace=GRACE)
        self._again(lambda: publish(catalog, self.memory.ready([name]), self.place, send))
        self.editions[name] = edition
        return {name: edition}

    def remove(self) -> dict[str, Edition | None]:
        name = self.chance.choice(list(self.editions))

        def take() -> None:
            with suppress(DocumentNotFound):  # it was done, and the answer lost
                unpublish(self.place, [name])

        self._again(take)
        self.memory.forget(name)
        del self.editions[name]
        return {name: None}

    def merge(self) -> dict[str, Edition | None]:
        self._again(lambda: merge(self.place, grace=GRACE))
        return {}

    def prune(self) -> dict[str, Edition | None]:
        self._again(lambda: prune(self.place, grace=GRACE))
        return {}

    def _again(self, work: Callable[[], T]) -> T:
        return again(work, self.failed)


def again(work: Callable[[], T], failed: Counter[str] | None = None) -> T:
    """The result of what is done until it succeeds."""
    while True:
        try:
            return work()
        except MemstoreError as error:
            if failed is not None:
                failed[type(error).__name__] += 1
            time.sleep(0.2)


# What came of it


class Told(NamedTuple):
    """An edition of a document: the first manifest that may have it, and the first that has it for
    sure.
    """

    first: int
    sure: int
    edition: Edition | None


class History:
    """What was published, and when."""

    def __init__(self, changes: Sequence[dict[str, Any]]) -> None:
        self.of: dict[str, list[Told]] = defaultdict(list)
        self.at: dict[
            int, float
        ] = {}  # seconds since 1970, of each manifest that has others' place
        for change in changes:
            after, number = change["after"], change["number"]
            for each in range(after + 1, number + 1):
                self.at[each] = change["at"]
            for name, edition in change["documents"].items():
                told = None if edition is None else tuple((n, edits) for n, edits in edition)
                self.of[name].append(Told(after + 1, number, told))

    def is_right(self, source: Sequence[Any], first: int, last: int) -> bool:
        """Is this what a document said in a manifest from `first` to `last`?"""
        name, (begin, end), text = source
        editions = self.of[name]
        for told, following in zip(editions, [*editions[1:], None]):
            over = following is not None and following.sure <= first
            if told.edition is None or over or told.first > last:
                continue
            if text_of(name, told.edition)[begin:end].strip() == text.strip():
                return True
        return False

    def behind(self, number: int, at: float) -> float:
        """Seconds by which a reader of this manifest was behind at a time."""
        return max(0.0, at - self.at.get(number + 1, at))


def evaluate(logs: Sequence[list[dict[str, Any]]], changes: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written down."""
    history = History([change for change in changes if "documents" in change])
    asked = [line for log in logs for line in log if "asked" in line]
    passages = [line["passage"] for log in logs for line in log if "passage" in line]
    failed = [line for log in logs for line in log if "failed" in line]
    errors: dict[str, Counter[str]] = defaultdict(Counter)
    for line in failed:
        errors[line["failed"]][line["error"]] += 1
    faults = sum((Counter(line["faults"]) for log in logs for line in log if "faults" in line),
                 Counter())  # fmt: skip
    sources = [(source, *line["manifests"]) for line in asked for source in line["sources"]]
    behind = [history.behind(line["manifests"][0], line["asked"]) for line in asked]
    ended = changes[-1]
    return {
        "asks": len(asked),
        "asks a second": len(asked) / (asked[-1]["asked"] - asked[0]["asked"]),
        "passages told": len(sources),
        "wrong": sum(not history.is_right(*source) for source in sources),
        "passages compared": len(passages),
        "wrong keys or values": passages.count(False),
        "asks that failed": dict(errors["ask"]),
        "comparisons that failed": dict(errors["compare"]),
        "failed": sorted({line["said"] for line in failed})[:20],
        "faults": {"readers": dict(faults), "writer": ended["faults"]},
        "manifests": changes[-2]["number"],
        "changes": dict(Counter(change["what"] for change in changes[:-1])),
        "changes done again": ended["failed"],
        "behind": {
            "share of asks": sum(each > 0 for each in behind) / len(behind),
            "median": statistics.median(behind),
            "95%": statistics.quantiles(behind, n=20)[-1],
            "most": max(behind),
        },
        **{name: quarters(logs, name) for name in ("MB", "descriptors", "threads")},
    }


def quarters(logs: Sequence[list[dict[str, Any]]], name: str) -> dict[str, float]:
    """Medians over all processes of the first and of the last quarter of the samples."""
    samples = [[line[name] for line in log if name in line and "at" in line] for log in logs]
    least = min(map(len, samples))
    part = max(1, least // 4)
    return {
        "tenths": [
            round(statistics.median(some[(least - 1) * at // 10] for some in samples), 1)
            for at in range(1, 11)
        ],
        "first": statistics.median(each for some in samples for each in some[:part]),
        "last": statistics.median(each for some in samples for each in some[-part:]),
        "most": max(each for some in samples for each in some),
    }


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make the memory, run everything, and look at what was logged."""
    reader = model()
    made = MemoryStore.create(directory / "memory", reader.signature, selector=reader.keeps)
    with made as memory:
        for number in range(options.documents):
            edition = tuple((n, 0) for n in range(PARAGRAPHS))
            name = f"book {number + 1}"
            reader.ingest(Text(text_of(name, edition), name), memory)
        memory.publish(f"file://{directory}/there")
    processes = [
        start(options, directory, part, seed)
        for seed, part in enumerate(["write", *["read"] * options.processes])
    ]
    for process in processes:
        process.wait()
    assert not any(process.returncode for process in processes), "a process failed"
    logs = [lines(_log(directory, seed + 1)) for seed in range(options.processes)]
    return evaluate(logs, lines(directory / "changes"))


def start(
    options: argparse.Namespace, directory: Path, part: str, seed: int
) -> "subprocess.Popen[bytes]":
    """One of the processes."""
    command = [sys.executable, "-m", "benchmarks.share.updates", "--part", part, "--seed", seed]
    command += ["--work", directory]
    for name in ("minutes", "each", "faults", "pause", "documents"):
        command += [f"--{name}", getattr(options, name)]
    return subprocess.Popen(
        [str(each) for each in command], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def _log(directory: Path, seed: int) -> Path:
    return directory / f"reader-{seed}"


def rows(found: dict[str, Any]) -> list[list[Any]]:
    """Of the table that is printed."""
    named = [[name, value] for name, value in found.items() if not isinstance(value, dict)]
    named = [[name, value] for name, value in named if name != "failed"]
    parts = [
        [f"{name}, {part}", value]
        for name, of in found.items()
        if isinstance(of, dict)
        for part, value in of.items()
    ]
    return [
        [name, f"{value:.3g}" if isinstance(value, float) else value]
        for name, value in [*named, *parts]
    ]


def main() -> None:
    """Measure, print and write; or be one of the processes."""
    arguments = plain_parser(__doc__)
    add(arguments, "--minutes", 30.0)
    add(arguments, "--processes", 4, "that read")
    add(arguments, "--each", 4, "readers of each, threads")
    add(arguments, "--documents", 40, "about")
    add(arguments, "--faults", 0.05, "share of requests that fail")
    add(arguments, "--pause", 0.5, "seconds of a reader between two asks")
    add(arguments, "--work", None, "where memories are made (default: temporary)", type=Path)
    arguments.add_argument("--part", help=argparse.SUPPRESS)  # of the processes that it starts
    options = arguments.parse_args()
    prepare(1)
    if options.part == "read":
        read(options.work, options)
    elif options.part == "write":
        Writer(options.work, options).run(options.minutes)
    else:
        with workplace(options) as directory:
            found = measure(directory, options)
        print(table("what | found", rows(found)))
        for line in found["failed"]:
            print(line)
        write(options, {"found": found})


if __name__ == "__main__":
    main()
