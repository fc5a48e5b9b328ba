"""Results of `ask` and `search`, and the trace of an answer: which stored blocks each of its tokens
attended to, how strongly, and what the answer cost.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from textwrap import shorten
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memstore.disk.format.document import Document
from memstore.errors import DocumentNotFound
from memstore.model.adapter import ModelAdapter
from memstore.model.document_text import shown_text
from memstore.model.session import AskSession, ReadUnit, StepReads
from memstore.store.memory_store import MemoryStore
from memstore.tiers.stats import COUNTS

Reads = Mapping[tuple[int, int, str], float]
"""What was read of a block: by (layer, head, tier), how much."""


@dataclass(frozen=True)
class Source:
    """A block that was read: what is shown of it, where that stands in its document, and how
    strongly the block was attended.

    span: (first, end) characters of the document, those of the whole sentences that the block is
    part of (memstore.model.document_text); text: they.
    weight: attention mass summed over layers, heads and answer tokens; of a search, how like the
    phrase it is (docs/appendix/method.md section 9); of a refusal, its score for the question.
    reads: one entry a (layer, head, tier): the part read there. place: "page 12", or the headings
    that it stands under; None where the document has none. also: where the same text stands
    besides, each a document and its characters.
    """

    document: str
    block: int
    span: tuple[int, int]
    text: str
    weight: float
    reads: list[dict[str, Any]] = field(repr=False)
    place: str | None = None
    also: list[tuple[str, tuple[int, int]]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        reader: ModelAdapter,
        store: MemoryStore,
        document: Document,
        block: int,
        reads: Reads,
        weight: float | None = None,
    ) -> "Source":
        """A block of a document; weight: None for the sum of what was read. Raises
        DocumentNotFound, CorruptMemory.
        """
        shown = shown_text(reader.tokenizer, store, document, block)
        blank, words = len(shown.text) - len(shown.text.lstrip()), len(shown.text.strip())
        return cls(
            document=document.name,
            block=block,
            span=(shown.start, shown.end),
            text=shown.text,
            place=document.places.at(shown.start + blank, shown.start + blank + words),
            weight=round(sum(reads.values()) if weight is None else weight, 4),
            reads=[
                {"layer": layer, "head": head, "tier": tier, "weight": round(mass, 4)}
                for (layer, head, tier), mass in sorted(reads.items(), key=lambda item: -item[1])
            ],
        )

    @property
    def citation(self) -> dict[str, Any]:
        """What a reply shows of it, as JSON values."""
        return {
            "document": self.document,
            "block": self.block,
            "span": list(self.span),
            "place": self.place,
            "text": self.text,
            "weight": self.weight,
        }


class Found(NamedTuple):
    """A block that a search found, how like the phrase it is, and what was read of it."""

    document: int
    block: int
    weight: float
    reads: Reads


class Ranking(NamedTuple):
    """Blocks ranked by similarity to a phrase, best first; answered: as in Matches."""

    found: Iterator[Found]
    answered: bool = True


class Matches(list[Source]):
    """What a search found, best first. answered: False where the gate would refuse the phrase as a
    question: none of the passages seems to answer it.
    """

    def __init__(self, found: Iterable[Source] = (), answered: bool = True) -> None:
        super().__init__(found)
        self.answered = answered

    def _repr_html_(self) -> str:
        """The passages, as a notebook shows them."""
        return _listed(self)


@dataclass(frozen=True)
class Answer:
    """What was answered, from where, and what it cost.

    answered: False where the gate found no answer in the memory. The text is then empty and the
    sources are the closest passages, with their scores as weights; with from_memory=False
    (AnswerSettings) the text is the model's own. finish_reason: "length" if max_new_tokens or a
    time limit ended it. needed: the score that the gate wanted of a passage; None for a model
    without a gate. doubt: the probability, 0 to 1, that nothing that was read answers; None
    if it has not learned to say so. `str` of an answer is what to show a person. lookups: {"done",
    "skipped"}, see Lookups. tiers: {name: counts} of this answer, the fields of TierStats. seconds:
    from the question to the last token.
    """

    text: str
    tokens: list[int]
    sources: list[Source]
    lookups: dict[str, int]
    tiers: dict[str, dict[str, int | float]]
    seconds: float
    first_token_seconds: float
    answered: bool = True
    needed: float | None = None
    doubt: float | None = None
    finish_reason: Literal["stop", "length"] = "stop"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @property
    def refused(self) -> bool:
        """Whether nothing was answered because the memory holds no answer."""
        return not self.answered and not self.text

    def __str__(self) -> str:
        return refusal(self.sources, self.needed) if self.refused else self.text

    def _repr_html_(self) -> str:
        """The answer and its passages, as a notebook shows them."""
        said = NOT_SURE if self.refused else self.text
        return f"<p><b>{escape(said)}</b></p>{_listed(self.sources)}"


NOT_SURE = "Not sure: the memory does not seem to hold an answer."
_SHOWN = 160  # characters of a passage in a refusal


def refusal(sources: Sequence[Source], needed: float | None = None) -> str:
    """What a person reads where the memory holds no answer: the closest passages, a line each with
    its score, and the score that was needed.
    """
    if not sources:
        return NOT_SURE
    lines = [f"{NOT_SURE} Closest passages{_needed(needed)}:"]
    for number, source in enumerate(sources, 1):
        place = "" if source.place is None else f", {source.place}"
        text = shorten(source.text, _SHOWN, placeholder="...")
        lines.append(f"{number}. {source.weight:.2f} {source.document}{place}: {text}")
    return "\n".join(lines)


def _needed(needed: float | None) -> str:
    return "" if needed is None else f" ({needed:.2f} needed)"


def closest_sources(reader: ModelAdapter, session: AskSession, most: int) -> list[Source]:
    """The closest passages of a question that a session's gate refused, best first, at most so
    many; their weights are their scores.
    """
    store = session.store
    known = store.readable()
    return [
        Source.of(reader, store, known[document], block, {}, score)
        for document, block, score in session.closest
        if document in known
    ][:most]


def _listed(sources: Iterable[Source]) -> str:
    items = "".join(f"<li>{_html(source)}</li>" for source in sources)
    return f"<ol>{items}</ol>"


def _html(source: Source) -> str:
    place = "" if source.place is None else f", {escape(source.place)}"
    return f"<i>{escape(source.document)}{place}</i>: {escape(source.text.strip())}"


# The trace of an answer

OF_TOKEN = 6  # blocks recorded for a token: those most read
BLOCKS = 4096  # blocks recorded for an answer: those most read
SKIPPED = math.nan  # mass of a head whose lookup was skipped

BlockId = tuple[int, int]
"""(document id, block)."""
BlockOfHead = tuple[BlockId, int, int]
"""A unit of a block: (block, layer, KV head)."""
Counts = Mapping[str, Mapping[str, int | float]]
"""The fields of TierStats by tier."""


@dataclass(slots=True)
class TokenRead:
    """What one token read. heads: attention mass on memory by head of each memory layer,
    [layers * heads], or SKIPPED; blocks: the document blocks most read, with their mass, best
    first; own: mass on the session's own blocks.
    """

    token: int
    heads: NDArray[np.float32]
    blocks: list[tuple[BlockId, float]]
    own: float


@dataclass(slots=True)
class BlockRead:
    """What was read of one block. heads: mass by head of each memory layer, [layers * heads];
    units: how many came from each tier. A unit that several heads share counts once a step, or once
    a question for a model that chooses once. tiers: by index of a head, where its unit was last.
    """

    heads: NDArray[np.float32]
    units: dict[str, int] = field(default_factory=dict)
    tiers: dict[int, str] = field(default_factory=dict)

    @property
    def mass(self) -> float:
        """The sum over all heads."""
        return float(self.heads.sum(dtype=np.float64))


class Trace:
    """Records, as the OnRead of a session, what the last row of every step reads. For one session
    and one thread at a time. begin, step and tokens_of count the costs of an answer, too.
    """

    def __init__(self, reader: ModelAdapter) -> None:
        shape = reader.shape
        self.reader = reader
        self.layers: tuple[int, ...] = shape.memory_layers
        self.num_heads = shape.num_heads
        self.once = reader.keeps is not None  # passages are chosen once for a question
        self._row = {layer: index * shape.num_heads for index, layer in enumerate(self.layers)}
        self._size, self._group = len(self.layers) * shape.num_heads, shape.group
        self._on = False
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[TokenRead] = []
        self._blocks: dict[BlockId, BlockRead] = {}
        self.tiers: dict[str, dict[str, int | float]] = {}
        self.lookups = {"done": 0, "skipped": 0}
        self.seconds = 0.0  # from the question to the last token
        self.model_seconds = 0.0  # the part of them spent in steps of this answer
        self.first_token_seconds = 0.0
        self._units = _Units((), self._row, self._size)  # of the latest step
        self._forget_step()

    def _forget_step(self) -> None:
        self._reads: list[StepReads] = []
        self._layer = -1

    def begin(self, session: AskSession) -> None:
        """Begin with a question, and clear what was recorded before."""
        self._clear()
        self._session, self._on = session, False
        self._began = time.perf_counter()
        self._lookups = session.lookups.done, session.lookups.skipped

    def start(self) -> None:
        """Record from now on, for the answer's first token. AskSession.ask calls this."""
        self._forget_step()
        self._on = True

    def stop(self) -> None:
        """Record nothing from now on."""
        self._on = False
        self._forget_step()

    def __call__(self, reads: StepReads) -> None:
        if not self._on:
            return
        first = reads.units[0].layer
        if first <= self._layer:  # a new forward pass begins, which predicts the token
            self._forget_step()
        self._layer = first
        if first in self._row:  # other layers look nothing up
            self._reads.append(reads)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of this answer, to which its time, lookups and tier counts are added."""
        began, before = time.perf_counter(), self._session.store.tier_stats()
        try:
            yield
        finally:
            after = self._session.store.tier_stats()
            self._add_tiers(before, after)
            lookups, (done, skipped) = self._session.lookups, self._lookups
            self.lookups = {"done": lookups.done - done, "skipped": lookups.skipped - skipped}
            now = time.perf_counter()
            self.model_seconds += now - began
            self.seconds = now - self._began

    def _add_tiers(self, before: Counts, after: Counts) -> None:
        if self.tiers and before == after:
            return
        for tier, counts in after.items():
            total = self.tiers.setdefault(tier, dict.fromkeys(COUNTS, 0))
            earlier = before.get(tier, {})
            for name in COUNTS:
                total[name] += counts[name] - earlier.get(name, 0)

    def tokens_of(self, generated: Iterable[int]) -> Iterator[int]:
        """The same tokens, each recorded with what it read; closing this closes `generated`."""
        tokens = iter(generated)
        try:
            while True:
                with self.step():
                    token = next(tokens, None)
                if token is None:
                    return
                self.first_token_seconds = self.first_token_seconds or self.seconds
                self._record(token)
                yield token
        finally:
            close = getattr(tokens, "close", None)
            if close is not None:
                close()
            self.stop()

    def _record(self, token: int) -> None:
        """Record a token with what the latest step read."""
        units, masses = self._step_reads()
        if units is not self._units.units:
            self._add()
            self._units = _Units(units, self._row, self._size)
        read = self._units
        read.sums += masses
        heads = np.bincount(read.at, masses, self._size).astype(np.float32)
        if not self.once:
            heads[read.unread] = SKIPPED
        of_blocks = np.bincount(read.of_block, masses, len(read.blocks)).tolist()
        stored = [(one, mass) for one, mass in zip(read.blocks, of_blocks) if one[0] >= 0]
        own = sum(mass for one, mass in zip(read.blocks, of_blocks) if one[0] < 0)
        best = sorted(stored, key=lambda item: (-item[1], item[0]))[:OF_TOKEN]
        self.tokens.append(TokenRead(token, heads, best, own))
        self._forget_step()

    def _step_reads(self) -> tuple[Sequence[ReadUnit], NDArray[np.float64]]:
        """The units that the latest step read, and the mass of each."""
        if len(self._reads) == 1:
            return self._reads[0]
        units = [unit for reads in self._reads for unit in reads.units]
        masses = [reads.masses for reads in self._reads]
        return units, np.concatenate([np.zeros(0), *masses])

    def _add(self) -> None:
        """Add the sums of the latest units to their blocks."""
        read, counted = self._units, set[BlockOfHead]()
        for unit, at, mass in zip(read.units, read.at.tolist(), read.sums.tolist()):
            block_id = (unit.document, unit.block)
            if unit.document < 0:
                continue
            block = self._blocks.get(block_id)
            if block is None:
                block = self._blocks[block_id] = BlockRead(np.zeros(self._size, np.float32))
            block.heads[at] += mass
            block.tiers[at] = unit.tier
            of_head = (block_id, unit.layer, unit.head // self._group)
            if not read.counted and of_head not in counted:
                counted.add(of_head)
                block.units[unit.tier] = block.units.get(unit.tier, 0) + 1
        read.sums[:], read.counted = 0, True
        if len(self._blocks) > 2 * BLOCKS:
            self._blocks = dict(_ranked(self._blocks, BLOCKS))

    @property
    def blocks(self) -> dict[BlockId, BlockRead]:
        """The blocks of documents that were read."""
        self._add()
        return self._blocks

    def ranked(self, most: int) -> list[tuple[BlockId, BlockRead]]:
        """The document blocks most read, at most so many, best first."""
        return _ranked(self.blocks, most)

    def sources(
        self, store: MemoryStore, most: int, same: Mapping[BlockId, Sequence[BlockId]] | None = None
    ) -> list[Source]:
        """The document blocks most read, at most so many, best first. same: of blocks, others with
        the same text. Documents that were deleted since are left out.
        """
        known, tokenizer = store.readable(), self.reader.tokenizer
        there = {block_id: read for block_id, read in self.blocks.items() if block_id[0] in known}
        found = []
        for (document, block), read in _ranked(there, most):
            reads = {}
            for at, tier in read.tiers.items():
                layer, head = divmod(at, self.num_heads)
                reads[self.layers[layer], head, tier] = float(read.heads[at])
            try:
                source = Source.of(self.reader, store, known[document], block, reads)
                for other, number in (same or {}).get((document, block), ()):
                    if other in known:
                        text = shown_text(tokenizer, store, known[other], number)
                        source.also.append((known[other].name, (text.start, text.end)))
            except DocumentNotFound:
                continue
            found.append(source)
        return found


class _Units:
    """The units that steps read, with indices for summing, and their sums over the steps."""

    def __init__(self, units: Sequence[ReadUnit], row: Mapping[int, int], size: int) -> None:
        """row: by layer, the index of its first head among the `size` of all."""
        self.units = units
        blocks: dict[BlockId, int] = {}
        self.at = np.array([row[unit.layer] + unit.head for unit in units], np.int64)
        self.of_block = np.array(
            [blocks.setdefault((unit.document, unit.block), len(blocks)) for unit in units],
            np.int64,
        )
        self.blocks = list(blocks)
        self.unread = np.bincount(self.at, minlength=size) == 0  # heads
        self.sums = np.zeros(len(units))
        self.counted = False  # in BlockRead.units


def _ranked(blocks: Mapping[BlockId, BlockRead], most: int) -> list[tuple[BlockId, BlockRead]]:
    return sorted(blocks.items(), key=lambda item: (-item[1].mass, item[0]))[:most]
