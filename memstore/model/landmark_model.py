"""The model as its users hold it: ingest documents into a store, ask about them, search them, and
see what was read.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memstore.devices import usable_device
from memstore.disk.document import Document
from memstore.disk.signature import Signature
from memstore.errors import InvalidInput, InvalidWeights
from memstore.model.attention import Read
from memstore.model.checkpoint import SHIPPED, SHIPPED_NAME, load_checkpoint, signature_of
from memstore.model.config import GRANULARITIES, LOOKUP_SETTINGS, ModelConfig
from memstore.model.indexing import build_index
from memstore.model.ingest import IngestProgress, Mode, Text, ingest
from memstore.model.search import SHORTLIST, Match, search_blocks
from memstore.model.session import ScratchSession
from memstore.model.tokenizer import Tokenizer
from memstore.model.transformer import Transformer
from memstore.store.memory_store import MemoryStore
from memstore.tiers.stats import COUNTS

_SMALL = 20_000_000  # parameters


@dataclass(frozen=True)
class Source:
    """A block that was read: where its text stands in its document, and how strongly it was
    attended.

    span: (first, end) characters of the document. weight: attention mass summed over layers, heads
    and answer tokens; of a search, how much of the phrase was found, 0..1. reads: one entry a
    (layer, head, tier): the part read there.
    """

    document: str
    block: int
    span: tuple[int, int]
    text: str
    weight: float
    reads: list[dict[str, Any]] = field(repr=False)


@dataclass(frozen=True)
class DocumentMatch:
    """A document that a search found. weight: how much of the phrase was found in its best block,
    0..1.
    """

    document: str
    weight: float
    best: Source


@dataclass(frozen=True)
class Answer:
    """What was answered, from where, and what it cost.

    lookups: {"done", "skipped"} of (token, head, layer). tiers: {name: counts} of this answer, the
    fields of TierStats. seconds: from the question to the last token.
    """

    text: str
    tokens: list[int]
    sources: list[Source]
    lookups: dict[str, int]
    tiers: dict[str, dict[str, int | float]]
    seconds: float
    first_token_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class LandmarkModel:
    """A transformer with its tokenizer, and the verbs that work on a MemoryStore."""

    def __init__(self, transformer: Transformer, tokenizer: Tokenizer) -> None:
        self.transformer, self.tokenizer = transformer, tokenizer
        self.config: ModelConfig = transformer.config
        with torch.no_grad():
            self.cmt_keys = transformer.cmt_keys()
        self._texts = [tokenizer.decode([token]) for token in range(tokenizer.landmark_id)]

    @cached_property
    def signature(self) -> Signature:
        """What ties a memory to this model."""
        return signature_of(self.transformer, self.tokenizer)

    def ingest(
        self,
        source: Path | str,
        store: MemoryStore,
        *,
        name: str | None = None,
        mode: Mode = "new",
        retrieve: bool = False,
        progress: Callable[[IngestProgress], None] | None = None,
        **lookup: Any,
    ) -> Document:
        """Read a document (a path, or a text with a name) into the store; idempotent, and resumed
        where it was interrupted.

        mode: "new" refuses a name already used with other content; "append" continues the document;
        "replace" swaps it. retrieve: attend to retrieved blocks while reading instead of the latest
        ones (slower, for perplexity).
        """
        return ingest(
            self.transformer,
            self.tokenizer,
            self.lookup_config(**lookup),
            store,
            Text.of(source, name),
            cmt_keys=self.cmt_keys,
            mode=mode,
            retrieve=retrieve,
            progress=progress,
        )

    def build_index(
        self, store: MemoryStore, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Build and save an approximate index of every document, for the queries of this model: see
        model.indexing.
        """
        return build_index(self, store, progress)

    def session(
        self,
        store: MemoryStore,
        documents: Sequence[str] | None = None,
        *,
        retrieve: bool = True,
        on_read: Callable[[list[Read]], None] | None = None,
        read_all_rows: bool = False,
        **lookup: Any,
    ) -> ScratchSession:
        """A session that has attached documents (None = every ready one, in the order they were
        created).

        on_read: told what the last row of every step reads, or all rows if `read_all_rows`. lookup:
        top_k, score_range, recency, cmt_cutoff, granularity, chunk_blocks, where they shall differ
        from the model's.
        """
        attached = [(document.id, document.blocks) for document in store.ready(documents)]
        session = ScratchSession(
            self.transformer,
            self.lookup_config(**lookup),
            store,
            attached,
            cmt_keys=self.cmt_keys,
            retrieve=retrieve,
            on_read=on_read,
        )
        session.attention.read_all_rows = read_all_rows
        return session

    def ask(
        self,
        question: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        max_new_tokens: int = 24,
        temperature: float = 0.0,
        seed: int | None = None,
        until_sentence: bool = True,
        max_sources: int = 5,
        on_token: Callable[[str], None] | None = None,
        **lookup: Any,
    ) -> Answer:
        """Answer a question, taken as typed, from the documents of a store, in a fresh session.

        until_sentence: stop at the end of a sentence or line. on_token: called with every piece of
        text as it is generated.
        Raises InvalidInput for an empty question or no ready document, DocumentNotFound for an
        unknown one.
        """
        store.ready(documents, to="ask")
        collector = _Collector()
        with self.session(store, documents, on_read=collector, **lookup) as session:
            return self.reply(
                session,
                question,
                collector=collector,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                until_sentence=until_sentence,
                max_sources=max_sources,
                on_token=on_token,
            )

    def reply(
        self,
        session: ScratchSession,
        question: str,
        *,
        collector: "_Collector",
        max_new_tokens: int = 24,
        temperature: float = 0.0,
        seed: int | None = None,
        until_sentence: bool = True,
        max_sources: int = 5,
        on_token: Callable[[str], None] | None = None,
    ) -> Answer:
        """Continue a session with a question and generate the answer; what `ask` and `chat`
        share.
        """
        if not question.strip():
            raise InvalidInput("the question is empty")
        if max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens must be at least 1, is {max_new_tokens}")
        store, began = session.store, time.perf_counter()
        tiers = store.tier_stats()
        done, skipped = session.attention.lookups.done, session.attention.lookups.skipped
        ids = self.tokenizer.encode(question.rstrip())
        if len(ids) > 1:
            session.feed(ids[:-1])
        collector.start()  # from the row that predicts the first answer token
        state = session.feed(ids[-1:])[-1]
        tokens: list[int] = []
        first = 0.0
        stop = self._ends_answer if until_sentence else None
        for token in session.generate(
            state, max_new_tokens, temperature=temperature, seed=seed, stop=stop
        ):
            first = first or time.perf_counter() - began
            tokens.append(token)
            if on_token is not None:
                on_token(self._texts[token])
        text = self.tokenizer.decode(tokens).strip()
        if until_sentence:
            text = text.removesuffix(".")
        after = store.tier_stats()
        return Answer(
            text=text,
            tokens=tokens,
            sources=self._sources(store, collector, max_sources),
            lookups={
                "done": session.attention.lookups.done - done,
                "skipped": session.attention.lookups.skipped - skipped,
            },
            tiers={
                name: {count: after[name][count] - counts[count] for count in COUNTS}
                for name, counts in tiers.items()
            },
            seconds=time.perf_counter() - began,
            first_token_seconds=first,
        )

    @contextmanager
    def chat(
        self, store: MemoryStore, documents: Sequence[str] | None = None, **lookup: Any
    ) -> Iterator["Chat"]:
        """A session that stays warm over several questions."""
        collector = _Collector()
        with self.session(store, documents, on_read=collector, **lookup) as session:
            yield Chat(self, session, collector)

    def search(
        self,
        phrase: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        top_k: int = 5,
        shortlist: int = SHORTLIST,
    ) -> list[Source]:
        """The blocks where most of the phrase is found, best first: docs/method.md section 9.

        shortlist: blocks that the landmark keys choose to be compared with the phrase word by word;
        more is slower. Raises InvalidInput for an empty phrase, a number below 1 or no ready
        document, DocumentNotFound.
        """
        searched, matches = self._matches(phrase, store, documents, top_k, shortlist)
        return [
            self._found(store, searched[match.document], match) for match in islice(matches, top_k)
        ]

    def search_documents(
        self,
        phrase: str,
        store: MemoryStore,
        *,
        documents: Sequence[str] | None = None,
        top_k: int = 5,
        shortlist: int = SHORTLIST,
    ) -> list[DocumentMatch]:
        """The documents where most of the phrase is found in one block, best first; otherwise as
        `search`.
        """
        searched, matches = self._matches(phrase, store, documents, top_k, shortlist)
        best: dict[int, Source] = {}
        for match in matches:
            if match.document not in best:
                best[match.document] = self._found(store, searched[match.document], match)
                if len(best) == min(top_k, len(searched)):
                    break
        return [DocumentMatch(source.document, source.weight, source) for source in best.values()]

    def _matches(
        self,
        phrase: str,
        store: MemoryStore,
        documents: Sequence[str] | None,
        top_k: int,
        shortlist: int,
    ) -> tuple[dict[int, Document], Iterator[Match]]:
        if not phrase.strip():
            raise InvalidInput("the phrase is empty")
        for name, value in (("top_k", top_k), ("shortlist", shortlist)):
            if value < 1:
                raise InvalidInput(f"{name} must be at least 1, is {value}")
        searched = {document.id: document for document in store.ready(documents, to="search")}
        ids = self.tokenizer.encode(" " + phrase.strip())  # the words as they stand inside a text
        scope = [(document.id, document.blocks) for document in searched.values()]
        return searched, search_blocks(
            self.transformer, self.cmt_keys, store, scope, ids, max(shortlist, top_k)
        )

    def _found(self, store: MemoryStore, document: Document, match: Match) -> Source:
        return self._source(
            store, document, match.block, {(match.layer, match.head, match.tier): match.weight}
        )

    def score(self, session: ScratchSession, ids: Sequence[int]) -> np.ndarray:
        """Log probabilities [n - 1] of ids[1:], each after what stands before it in the session."""
        states = session.feed(list(ids[:-1]))
        logits = session.logits(states).log_softmax(-1)
        return (
            logits.gather(-1, torch.tensor(ids[1:], device=logits.device)[:, None])[:, 0]
            .double()
            .cpu()
            .numpy()
        )

    def lookup_config(self, **lookup: Any) -> ModelConfig:
        """The model's configuration with other lookup settings (None = the model's); InvalidInput
        names one out of range.
        """
        given = {name: value for name, value in lookup.items() if value is not None}
        unknown = set(given) - set(LOOKUP_SETTINGS)
        if unknown:
            raise InvalidInput(
                f"unknown setting {unknown.pop()!r}; choose one of {', '.join(LOOKUP_SETTINGS)}"
            )
        top_k, cutoff = (
            given.get("top_k", self.config.top_k),
            given.get("cmt_cutoff", self.config.cmt_cutoff),
        )
        if not 1 <= top_k <= 1024:
            raise InvalidInput(f"top_k must lie in 1..1024, is {top_k}")
        if not 0 <= given.get("score_range", 0) < math.inf:
            raise InvalidInput(
                f"score_range must be a finite number of at least 0, is {given['score_range']}"
            )
        if not 0 <= given.get("recency", 0) < math.inf:
            raise InvalidInput(
                f"recency must be a finite number of at least 0, is {given['recency']}"
            )
        if not 0 <= cutoff <= 1:
            raise InvalidInput(f"cmt_cutoff must lie in 0..1, is {cutoff}")
        if not 1 <= given.get("chunk_blocks", 1) <= 256:
            raise InvalidInput(f"chunk_blocks must lie in 1..256, is {given['chunk_blocks']}")
        if given.get("granularity", GRANULARITIES[0]) not in GRANULARITIES:
            raise InvalidInput(f"granularity must be one of {', '.join(GRANULARITIES)}")
        return replace(self.config, **given)

    def _ends_answer(self, token: int) -> bool:
        text = self._texts[token]
        return text.rstrip(" ").endswith((".", "?", "!")) or "\n" in text

    def _sources(self, store: MemoryStore, collector: "_Collector", most: int) -> list[Source]:
        names = {document.id: document for document in store.documents()}
        totals = {
            (document, block): sum(reads.values())
            for (document, block), reads in collector.mass.items()
            if document in names
        }
        best = sorted(totals, key=lambda key: (-totals[key], key))[:most]
        return [
            self._source(store, names[document], block, collector.mass[document, block])
            for document, block in best
        ]

    def _source(
        self,
        store: MemoryStore,
        document: Document,
        block: int,
        reads: dict[tuple[int, int, str], float],
    ) -> Source:
        first = block * self.config.block_size
        end = min(first + self.config.block_size, document.tokens)
        span = store.tokens(document.id, first, end)
        counts = self.tokenizer.character_counts
        start, characters = (
            span.char_start + int(counts[span.before].sum()),
            int(counts[span.ids].sum()),
        )
        return Source(
            document=document.name,
            block=block,
            span=(start, start + characters),
            text=self.tokenizer.decode(span.ids.tolist()),
            weight=round(sum(reads.values()), 4),
            reads=[
                {"layer": layer, "head": head, "tier": tier, "weight": round(mass, 4)}
                for (layer, head, tier), mass in sorted(reads.items(), key=lambda item: -item[1])
            ],
        )


class _Collector:
    """Sums what a session reads, once started."""

    def __init__(self) -> None:
        self.mass: dict[tuple[int, int], dict[tuple[int, int, str], float]] = {}
        self.active = False

    def start(self) -> None:
        self.mass.clear()
        self.active = True

    def __call__(self, reads: list[Read]) -> None:
        if self.active:
            for read in reads:
                of_block = self.mass.setdefault((read.document, read.block), {})
                key = (read.layer, read.head, read.tier)
                of_block[key] = of_block.get(key, 0.0) + read.mass


class Chat:
    """Questions and answers in one session: each sees what was said before, and the same
    documents.
    """

    def __init__(
        self, model: LandmarkModel, session: ScratchSession, collector: _Collector
    ) -> None:
        self._model, self._session, self._collector = model, session, collector

    def ask(self, question: str, **settings: Any) -> Answer:
        """As `LandmarkModel.ask`, in this session; settings: max_new_tokens, temperature, seed,
        until_sentence, max_sources, on_token.
        """
        self._collector.active = False
        return self._model.reply(self._session, question, collector=self._collector, **settings)


def load_model(
    name_or_path: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LandmarkModel:
    """The model that ships (None or its name, "books-1m"), or one from a directory written by
    `memstore train`.

    device: where it computes, such as "cuda"; its memories have to be opened with the same. dtype:
    of its weights and of what it computes; landmark scores, softmaxes and logits are float32 under
    a half-precision one as well. Weights that lose digits by it are another model, with memories of
    its own.
    Raises InvalidWeights for a directory that is no model, or whose weights do not fit its
    configuration, and InvalidConfig for a device that this machine does not have.
    """
    directory = SHIPPED if name_or_path in (None, SHIPPED_NAME) else Path(str(name_or_path))
    if not directory.is_dir():
        raise InvalidWeights(
            f"{directory} is no directory; name one written by `memstore train`, or leave the "
            "model out"
        )
    place = usable_device(device)
    transformer, tokenizer = load_checkpoint(directory, dtype)
    return LandmarkModel(transformer.to(place), tokenizer)


def load_model_for_command(name_or_path: str | Path | None = None) -> LandmarkModel:
    """`load_model` for a process of its own: a small model then runs on one thread.

    Its products are too short to share, and with several threads every one of them ends at a
    barrier: on a machine that is busy otherwise reading was 50 times slower. OMP_NUM_THREADS, where
    it is set, is obeyed.
    """
    model = load_model(name_or_path)
    if (
        "OMP_NUM_THREADS" not in os.environ
        and sum(p.numel() for p in model.transformer.parameters()) < _SMALL
    ):
        torch.set_num_threads(1)
    return model
