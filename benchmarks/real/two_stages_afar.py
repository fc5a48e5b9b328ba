"""A million passages in an object store: how soon is it known which are best, and how much is read
for that?

The memory of real.two_stages, whose --work holds it with its lists, published to a directory
(file://); every request takes --latency milliseconds longer, as one at a distance would. Of each
latency, by a reader that begins with nothing: opening, the first question, and each of the others,
which find lists that were read before; all of them again, last. "deep" counts what is asked one
after the other: requests that are on their way together are one. "same" is the share of questions
whose best --best are those that the directory's reader finds. At the end the first question by a
reader whose local cache an earlier one filled with it, at the last latency, and by one that scores
every passage, for which all landmarks are read.

    python -m benchmarks.real.two_stages_afar --text books-test.jsonl.zst books-val.jsonl.zst \\
        --model smollm2/ --work real/ --documents 16 --questions 20
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import faiss
import torch

from benchmarks.common.distant import Distant
from benchmarks.common.main_memory import status_bytes
from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.common.timing import timed
from benchmarks.real.choice_at_1m import planned, read_options
from benchmarks.real.passage_model import passage_model
from benchmarks.real.two_stages import own_options
from memstore import MemoryStore
from memstore.model.passages.activation_capture import capture
from memstore.model.passages.selector import score_blocks
from memstore.share.caches.local_cache import LocalCache
from memstore.share.objects.open_object_store import open_object_store
from memstore.share.read.open_published import PublishedCatalog
from memstore.share.read.published_tables import PublishedDatabase
from memstore.share.read.remote import Remote

_DEADLINE = 600.0  # seconds


class Reader:
    """A process's reader that begins with nothing, and what it asked for."""

    def __init__(self, url: str, latency: float, local: LocalCache | None = None) -> None:
        self.place = Distant(open_object_store(url), latency)
        self.remote = Remote(self.place, deadline=_DEADLINE)
        self.deep, began = 0, time.perf_counter()
        self._counted(self.remote.calls, "gather", lambda work: any(True for _ in work))
        self._counted(self.remote.calls, "call", lambda work: True)
        catalog = PublishedCatalog(PublishedDatabase(self.remote, local), local, None)
        self.store = MemoryStore(catalog, catalog.signature, read_only=True)
        self.opening: dict[str, Any] = {
            "seconds": time.perf_counter() - began, "deep": self.deep,
            "requests": self.place.requests, "MB": self.place.read / 1e6,
        }  # fmt: skip

    def _counted(self, calls: Any, name: str, asks: Callable[[Any], bool]) -> None:
        inner = getattr(calls, name)

        def outer(work: Any, *given: Any) -> Any:
            self.deep += asks(work)
            return inner(work, *given)

        setattr(calls, name, outer)

    @contextmanager
    def measured(self, told: dict[str, Any]) -> Iterator[None]:
        """Seconds and processor time of the block, and what was asked for in it."""
        before = self.deep, self.place.requests, self.place.read
        began, spent = time.perf_counter(), time.process_time()
        yield
        told |= {"seconds": time.perf_counter() - began, "cpu": time.process_time() - spent}
        told |= {"deep": self.deep - before[0], "requests": self.place.requests - before[1]}
        told["MB"] = (self.place.read - before[2]) / 1e6


def main() -> None:
    options = read_options(__doc__, more_options)
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    plan = planned(options, options.work)
    reader = passage_model(options.model, options.dtype)
    asked = [
        (question.text, capture(reader, ids).part(words))
        for task in options.tasks
        for question in [q for q in plan.questions if q.task == task][: options.asked]
        for ids, words in [reader.turn_ids(question.text, first=True)]
    ]
    memory = options.work / f"passages-{options.passages}"
    url = f"file://{(options.work / 'published').absolute()}"
    told: dict[str, Any] = {}
    with MemoryStore.open(memory, read_only=True) as store:
        told["seconds to publish"] = timed(lambda: store.publish(url))[0]
        expected = [best(reader, store, question, options.best) for question in asked]
    told["afar"] = {
        f"{latency:g}": afar(reader, Reader(url, latency / 1000), asked, expected)
        for latency in options.latency
    }
    told["local cache"] = cached(reader, url, options.latency[-1] / 1000, asked[0])
    told["every passage scored"] = exact(reader, Reader(url, 0.0), asked[0])
    print(report(told))
    write(options, told)


def more_options(options: argparse.ArgumentParser) -> None:
    """What is asked beside two_stages's."""
    own_options(options)
    add(options, "--latency", [0.0, 50.0], "milliseconds that a request takes longer")


def best(reader: Any, store: MemoryStore, asked: Any, n: int) -> set[tuple[str, int]]:
    """The best passages of a question, by document and block."""
    text, captured = asked
    names = {document.id: document.name for document in store.documents()}
    scope = [(document.id, 0, document.blocks) for document in store.documents()]
    found = score_blocks(reader.selector, captured, text, store, scope)
    places = [(names[d], block) for d, first, end in found.scope for block in range(first, end)]
    return {places[at] for at in found.scores.topk(n).indices.tolist()}


def afar(
    reader: Any, there: Reader, asked: list[Any], expected: list[set[tuple[str, int]]]
) -> dict[str, Any]:
    """All questions of one reader."""
    before = status_bytes("RssAnon")
    n, same = len(expected[0]), 0
    rows, again = list[dict[str, Any]](), list[dict[str, Any]]()
    for question, wanted in zip(asked, expected):
        rows.append({})
        with there.measured(rows[-1]):
            same += best(reader, there.store, question, n) == wanted
    for question in asked:
        again.append({})
        with there.measured(again[-1]):
            best(reader, there.store, question, n)
    resident = (status_bytes("RssAnon") - before) / 1e6
    there.store.close()
    return {
        "opening": there.opening, "questions": rows, "again": again, "same": same / len(asked),
        "MB resident, own": resident,
    }  # fmt: skip


def cached(reader: Any, url: str, latency: float, asked: Any) -> dict[str, Any]:
    """The first question, from a local cache."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(2):
            there = Reader(url, latency, LocalCache(directory, 1 << 34))
            with there.measured(told):
                best(reader, there.store, asked, 1)
            there.store.close()
    return told


def exact(reader: Any, there: Reader, asked: Any) -> dict[str, Any]:
    """The first question, where every passage is scored."""
    told: dict[str, Any] = {}
    text, captured = asked
    with there.measured(told):
        scope = [(document.id, 0, document.blocks) for document in there.store.documents()]
        reader.selector.scores(captured, text, there.store.retrieval, scope)
    there.store.close()
    return told


def report(told: dict[str, Any]) -> str:
    """What it took."""
    columns = ("seconds", "cpu", "deep", "requests", "MB")
    rows = []
    for latency, found in told["afar"].items():
        ways = {"opening": [found["opening"]], "first question": found["questions"][:1]}
        ways |= {"the next four": found["questions"][1:5], "the last five": found["questions"][-5:]}
        ways["again"] = found["again"]
        for way, some in ways.items():
            medians = [statistics.median(one.get(column, 0) for one in some) for column in columns]
            rows.append([f"+{latency} ms", way, *(f"{value:,.2f}" for value in medians)])
        rows.append([f"+{latency} ms", f"same {found['same']:.2f}; MB of its own",
                     f"{found['MB resident, own']:.0f}", "", "", "", ""])  # fmt: skip
    local = [f"{told['local cache'][column]:,.2f}" for column in columns]
    rows.append(["the last", "first, from a local cache", *local])
    every = [f"{told['every passage scored'][column]:,.2f}" for column in columns]
    rows.append(["+0 ms", "every passage scored", *every])
    return table(["each request", "", *columns], rows)


if __name__ == "__main__":
    main()
