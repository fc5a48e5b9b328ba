"""What a session reads for each token of an answer, gathered while it answers."""

import math
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from memstore.model.adapter import ModelAdapter
from memstore.model.ask_session import AskSession
from memstore.model.reads import Read
from memstore.tiers.stats import COUNTS

OF_TOKEN = 6  # blocks that are told of a token, the ones most read
BLOCKS = 4096  # that are kept of an answer, the ones most read
SKIPPED = math.nan  # in the place of a head's mass

BlockId = tuple[int, int]
"""(document id, block)."""
BlockOfHead = tuple[BlockId, int, int]
"""What is read of a block at once: (block, layer, KV head)."""
Counts = Mapping[str, Mapping[str, int | float]]
"""The fields of TierStats by tier."""


@dataclass(slots=True)
class TokenRead:
    """What was read for one token. heads: attention mass to memory of each head of each memory
    layer, [layers * heads], SKIPPED where its lookup was; blocks: the most read ones of documents
    with their mass, best first; own: mass of the session's own blocks.
    """

    token: int
    heads: "array[float]"
    blocks: list[tuple[BlockId, float]]
    own: float


@dataclass(slots=True)
class BlockRead:
    """What was read of one block: mass of each head of each memory layer, [layers * heads], and how
    many units came from each tier (a unit that several heads share is read once a step, by a reader
    that chooses once for a question, once for all of it).
    """

    heads: "array[float]"
    units: dict[str, int] = field(default_factory=dict)

    @property
    def mass(self) -> float:
        """Of all heads."""
        return sum(self.heads)


class Trace:
    """What the last row of every step reads (an OnRead), token by token of an answer; one for a
    session, used by one thread at a time.
    """

    def __init__(self, reader: ModelAdapter) -> None:
        shape = reader.shape
        self.reader = reader
        self.layers: tuple[int, ...] = shape.memory_layers
        self.num_heads = shape.num_heads
        self.once = reader.keeps is not None  # it chooses once for a question
        self._row = {layer: index * shape.num_heads for index, layer in enumerate(self.layers)}
        self._group = shape.group
        self._on = False
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[TokenRead] = []
        self.blocks: dict[BlockId, BlockRead] = {}
        self.tiers: dict[str, dict[str, int | float]] = {}
        self.lookups = {"done": 0, "skipped": 0}
        self.seconds = 0.0  # from the question to the last token
        self.model_seconds = 0.0  # of them, those that the model and the memory worked for it
        self.first_token_seconds = 0.0
        self._choice: object = None
        self._fetched: set[BlockOfHead] = set()  # told already: once for a choice
        self._forget_step()

    def _forget_step(self) -> None:
        self._reads: list[Read] = []
        self._layer = -1

    def begin(self, session: AskSession) -> None:
        """A question begins; what the one before it read is forgotten."""
        self._clear()
        self._session, self._on = session, False
        self._began = time.perf_counter()
        self._lookups = session.lookups.done, session.lookups.skipped

    def start(self) -> None:
        """What is read from now on is read for the answer's first token: what AskSession.ask
        calls.
        """
        self._forget_step()
        self._on = True

    def stop(self) -> None:
        """What is read from now on is read for no token."""
        self._on = False
        self._forget_step()

    def __call__(self, reads: Sequence[Read]) -> None:
        if not self._on or not reads:
            return
        if reads[0].layer <= self._layer:  # another forward pass: this one predicts
            self._forget_step()
        self._layer = reads[0].layer
        self._reads.extend(reads)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of this answer: its time, lookups and tiers count for it."""
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
        for tier, counts in after.items():
            told = self.tiers.setdefault(tier, dict.fromkeys(COUNTS, 0))
            earlier = before.get(tier, {})
            for name in COUNTS:
                told[name] += counts[name] - earlier.get(name, 0)

    def tokens_of(self, generated: Iterable[int]) -> Iterator[int]:
        """The same tokens, each with what was read for it; closing this closes `generated`."""
        tokens = iter(generated)
        try:
            while True:
                with self.step():
                    token = next(tokens, None)
                if token is None:
                    return
                self.first_token_seconds = self.first_token_seconds or self.seconds
                self._told(token)
                yield token
        finally:
            close = getattr(tokens, "close", None)
            if close is not None:
                close()
            self.stop()

    def _told(self, token: int) -> None:
        """Sum up what was read for a token; what is read next is for the one after it."""
        chosen = getattr(self._session, "chosen", None)
        if chosen is not self._choice:
            self._choice = chosen
            self._fetched.clear()
        skips = not self.once
        size = len(self.layers) * self.num_heads
        heads = array("f", [SKIPPED if skips else 0.0]) * size
        masses: dict[BlockId, float] = {}
        own, blocks_of_heads = 0.0, set[BlockOfHead]()
        for read in self._reads:
            row = self._row.get(read.layer)
            if row is None:  # a layer that sees the session's latest blocks, and looks nothing up
                continue
            block_id, at = (read.document, read.block), row + read.head
            heads[at] = read.mass if math.isnan(heads[at]) else heads[at] + read.mass
            if read.document < 0:
                own += read.mass
                continue
            masses[block_id] = masses.get(block_id, 0.0) + read.mass
            block = self.blocks.get(block_id)
            if block is None:
                block = self.blocks[block_id] = BlockRead(array("f", [0.0]) * size)
            block.heads[at] += read.mass
            of_head = (block_id, read.layer, read.head // self._group)
            if of_head not in blocks_of_heads and of_head not in self._fetched:
                blocks_of_heads.add(of_head)
                block.units[read.tier] = block.units.get(read.tier, 0) + 1
        if self.once:
            self._fetched |= blocks_of_heads
        best = sorted(masses.items(), key=lambda item: (-item[1], item[0]))[:OF_TOKEN]
        self.tokens.append(TokenRead(token, heads, best, own))
        if len(self.blocks) > 2 * BLOCKS:
            self.blocks = dict(self.ranked(BLOCKS))
        self._forget_step()

    def ranked(self, most: int) -> list[tuple[BlockId, BlockRead]]:
        """The blocks of documents that were read most, at most so many, best first."""
        return sorted(self.blocks.items(), key=lambda item: (-item[1].mass, item[0]))[:most]
