"""Measuring the tiers live: a model asks about books with one setting after another."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from memstore.cli.bench_replay import Settings, run_columns
from memstore.cli.demo.planted_text import cut, python_text
from memstore.cli.terminal import console
from memstore.errors import InvalidInput
from memstore.model.document_ingest import IngestProgress
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.serve.metrics import Metrics
from memstore.store.memory_store import MemoryStore
from memstore.temporary import temporary_directory
from memstore.tiers.stats import COUNTS
from memstore.tiers.tier_options import DEFAULT_POLICY, PREDICTORS, TierOptions
from memstore.training.corpus import read_documents

_PASSAGE = 160  # tokens of a passage that is to be continued
_CONTINUED, _ANSWERED = 24, 12  # tokens generated for a passage and for a question
_TEMPERATURE = 0.8  # a greedy small model soon repeats itself, and so would its lookups
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]{2,}")  # a capital that no sentence begins with


@contextmanager
def books_memory(
    reader: LandmarkModel, texts: Sequence[Path], books: int, tokens: int
) -> Iterator[Path]:
    """A memory, removed again at the end, of the first `books` texts, up to `tokens` tokens of
    each.

    No texts: Python's own documentation and sources. Raises what reading the files and ingesting
    raise.
    """
    with temporary_directory("memstore-bench-") as directory:
        path = directory / "memory"
        found = islice(read_documents(texts) if texts else python_text(), books)
        with MemoryStore.create(path, reader.signature) as memory:
            for number, text in enumerate(found, 1):
                _ingest(reader, memory, f"book {number}", cut(reader, iter([text]), tokens))
        yield path


def _ingest(reader: LandmarkModel, memory: MemoryStore, name: str, text: str) -> None:
    with console.reading(name) as show:

        def progress(state: IngestProgress) -> None:
            show(state.characters, state.total_characters, state.tokens)

        reader.ingest(text, memory, name=name, progress=progress)


def run_live(
    reader: LandmarkModel,
    store: Path,
    settings: Settings,
    *,
    questions: int,
    seed: int = 0,
    trace: Path | None = None,
    metrics: Metrics | None = None,
    prepare: Callable[[MemoryStore], None] = lambda memory: None,
) -> dict[str, Any]:
    """Ask the same questions of a memory with every setting, each time with cold tiers; return
    plain values.

    trace: record one more run, with the smallest budget and the speculative predictor. prepare:
    called with the memory of every run, once it is open. Raises InvalidInput for a memory without a
    finished document, InvalidConfig, and what opening and asking raise.
    """
    settings.check(PREDICTORS)
    began = time.monotonic()
    with MemoryStore.open(store, reader.signature, read_only=True) as memory:
        books = [document for document in memory.documents() if document.state == "ready"]
        if not books:
            raise InvalidInput(f"{store} holds no finished document to ask; run ingest first")
        asked = draw_questions(reader, memory, questions, seed)
    live = _Live(reader, store, sum(document.blocks for document in books), asked, metrics, prepare)
    runs = []
    for share in settings.budgets:
        for policy in settings.policies:
            for prefetch in settings.prefetch:
                runs.append(live.run(share, policy, prefetch))
        console.note(f"budget {share:.1%}: {len(runs)} runs done, {time.monotonic() - began:.0f} s")
    if trace is not None:
        live.run(min(settings.budgets), DEFAULT_POLICY, "speculative", trace)
    return {
        "mode": "live",
        "books": [{"name": document.name, "tokens": document.tokens} for document in books],
        "units": live.units,
        "unit_bytes": live.unit_bytes,
        "questions": len(asked),
        "seed": seed,
        "same_answers": live.same_answers,
        "runs": runs,
        "seconds": round(time.monotonic() - began, 1),
    }


@dataclass(frozen=True)
class Asked:
    """A question, and whether it goes on in the session of the one before."""

    text: str
    kind: str  # "passage" or "fact"
    continues: bool


def draw_questions(
    reader: LandmarkModel, memory: MemoryStore, count: int, seed: int
) -> list[Asked]:
    """Passages of the documents to be continued and, after each in the same session, a question
    about a name there.
    """
    rng = Random(seed)
    documents = [document for document in memory.documents() if document.state == "ready"]
    asked: list[Asked] = []
    while len(asked) < count:
        document = rng.choice(documents)
        first = rng.randrange(max(1, document.tokens - _PASSAGE))
        passage = reader.tokenizer.decode(
            memory.tokens(document.id, first, first + _PASSAGE).ids.tolist()
        )
        if not passage.strip():
            passage = "It was"
        name = rng.choice(_NAME.findall(passage) or passage.split())
        asked.append(Asked(passage, "passage", False))
        asked.append(Asked(f" Who is {name}? {name} is", "fact", True))
    return asked[:count]


class _Live:
    """The same questions of one memory with any settings."""

    def __init__(
        self,
        reader: LandmarkModel,
        store: Path,
        blocks: int,
        asked: Sequence[Asked],
        metrics: Metrics | None,
        prepare: Callable[[MemoryStore], None],
    ) -> None:
        self._reader, self._store, self._asked, self._metrics = reader, store, asked, metrics
        self._prepare = prepare
        self.units = blocks * len(reader.signature.memory_layers) * reader.signature.num_kv_heads
        self.unit_bytes = reader.signature.geometry.unit_bytes
        self._answers: list[list[int]] | None = None
        self.same_answers = True

    def run(
        self, share: float, policy: str, prefetch: Any, trace: Path | None = None
    ) -> dict[str, Any]:
        """One run: its settings and what was counted in the top tier, with every tier's layers."""
        config = self._reader.config
        own = (config.chunk_blocks + config.top_k) * config.num_layers * config.num_kv_heads
        # A session needs room for its own blocks and for what one row reads.
        budget = (
            max(round(share * self.units), own + config.top_k * config.num_kv_heads)
            * self.unit_bytes
        )
        options: TierOptions = {
            "host_budget": budget,
            "policy": policy,
            "prefetch": prefetch,
            "trace": trace,
        }
        with MemoryStore.open(
            self._store, self._reader.signature, read_only=True, **options
        ) as memory:
            self._prepare(memory)
            if self._metrics is not None:
                self._metrics.store = memory
            began = time.perf_counter()
            answers = list(self._answer(memory))
            seconds = time.perf_counter() - began
            counts = next(iter(memory.tier_stats().values()))
            read = memory.stats()["prefetch"]["read"]
            layers = {
                tier: {layer: stats.to_dict() for layer, stats in of_tier.items()}
                for tier, of_tier in memory.tiers.layers().items()
            }
        self._answers = self._answers or answers
        self.same_answers = self.same_answers and answers == self._answers
        asked = counts["hits"] + counts["misses"]
        return {
            "share": share,
            "budget": budget,
            "policy": policy,
            "prefetch": prefetch,
            "hit_rate": round(counts["hits"] / asked, 4) if asked else 0.0,
            **{name: counts[name] for name in COUNTS},
            # those still held at the end too
            "unused": read - counts["prefetched"] - counts["late"],
            "read_ahead": read,
            "total_seconds": round(seconds, 3),
            "layers": layers,
        }

    def _answer(self, memory: MemoryStore) -> Iterator[list[int]]:
        sessions = ExitStack()
        with sessions:
            for number, asked in enumerate(self._asked):
                if not asked.continues:
                    sessions.close()
                    conversation = sessions.enter_context(self._reader.chat(memory))
                most = _CONTINUED if asked.kind == "passage" else _ANSWERED
                answer = conversation.ask(
                    asked.text,
                    max_new_tokens=most,
                    temperature=_TEMPERATURE,
                    seed=number,
                    until_sentence=False,
                )
                yield answer.tokens


def print_live(result: dict[str, Any]) -> None:
    """The table of a live bench, and what it was made of."""
    rows = [("budget", *run_columns(), "late", "waited", "all")]
    for run in result["runs"]:
        seconds = f"{run['seconds']:.3f} s", f"{run['total_seconds']:.2f} s"
        rows.append((f"{run['share']:4.0%}", *run_columns(run), run["late"], *seconds))
    tokens = sum(book["tokens"] for book in result["books"])
    size = console.size(result["units"] * result["unit_bytes"])
    console.say(console.columns(rows))
    console.say("")
    same = "the same" if result["same_answers"] else "NOT the same"
    console.say(
        f"{len(result['books'])} books, {tokens:,} tokens; a budget is a share of "
        f"{result['units']:,} blocks, {size}"
    )
    console.say(f"{result['questions']} questions, answers {same} in every run")
