"""A session: a text that is read on beside a memory, the blocks that it may read, what it has read
of them, and the tokens that it generates, one by one.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstore.closing import Closing
from memstore.errors import InvalidConfig
from memstore.model.adapter import ModelAdapter
from memstore.store.memory_store import MemoryStore

Run = tuple[int, int, int]
"""Blocks first .. end of a document: (document, first, end)."""


@dataclass
class SessionBlocks:
    """What a session remembers, oldest first: attached documents, then its own blocks, under an id
    of the store.
    """

    # (document id, blocks); others are attached by `attach`
    documents: list[tuple[int, int]] = field(default_factory=list)
    own_document: int | None = None
    own_first: int = 0  # own blocks before this one were let go
    own_end: int = 0

    @property
    def own(self) -> int:
        """How many blocks of its own the session has."""
        return self.own_end - self.own_first

    @property
    def count(self) -> int:
        """How many blocks there are in all."""
        return self.attached + self.own

    def __post_init__(self) -> None:
        self._count()

    def attach(self, documents: Sequence[tuple[int, int]]) -> None:
        """Remember these documents in the place of those that were attached."""
        self.documents = [*documents]
        self._count()

    def _count(self) -> None:
        """Note the attached documents that have blocks: their runs, the numbers of their first
        blocks, and how many blocks there are.
        """
        self._runs = tuple((document, 0, blocks) for document, blocks in self.documents if blocks)
        *self.starts, self.attached = [0, *accumulate(end for _, _, end in self._runs)]

    def runs(self, end: int) -> tuple[Run, ...]:
        """The `end` oldest blocks, which are those of the documents at least."""
        runs, own = self._runs, min(self.own, end - self.attached)
        if self.own_document is not None and own > 0:
            runs = (*runs, (self.own_document, self.own_first, self.own_first + own))
        return runs


class OwnBlocks:
    """Own blocks of a session beside attached documents: half of the host tier's budget at most;
    beyond that the oldest are let go, and length is never an error.
    """

    def __init__(
        self,
        store: MemoryStore,
        documents: list[tuple[int, int]],
        per_block: int,
        *,
        least: int = 0,
        bound: int | None = None,
    ) -> None:
        """documents: attached ones, as (id, blocks). per_block: KV blocks of heads of a block;
        least: blocks that are held whatever the budget says; bound: LookupSettings.own_blocks.
        """
        self.scratch = store.retrieval.session_document()
        self.blocks = SessionBlocks(documents, own_document=self.scratch.document)
        self._per_block = per_block
        self.most = max(least, store.tiers.host.capacity // (2 * per_block))
        if bound is not None:
            self.most = min(self.most, bound)

    @property
    def document(self) -> int:
        """The number under which they are read and searched."""
        return self.scratch.document

    @property
    def pinned(self) -> int:
        """KV blocks of heads that are held."""
        return self.blocks.own * self._per_block

    def make_room(self, count: int) -> None:
        """Let the oldest go, for so many more."""
        surplus = self.blocks.own + count - self.most
        if surplus > 0:
            self.blocks.own_first += surplus
            self.scratch.trim(self.blocks.own_first)

    def close(self) -> None:
        """Let them all go."""
        self.scratch.close()


class ReadUnit(NamedTuple):
    """What a query head of a layer reads of a block, and the tier that had it."""

    layer: int
    head: int
    document: int
    block: int
    tier: str


class StepReads(NamedTuple):
    """What a row of a step reads: units of one layer, or of all memory layers, and its attention
    mass to each [units].

    units: the same object in every step, as long as a session goes on reading the same.
    """

    units: Sequence[ReadUnit]
    masses: NDArray[np.float64]


OnRead = Callable[[StepReads], None]
"""Told what a row of a step has read, where that is anything."""


@dataclass
class Lookups:
    """Lookups done, and skipped: of (token, head, layer) because the gate was below the cutoff; of
    questions, by a model that chooses once for each.
    """

    done: int = 0
    skipped: int = 0


Around = Callable[[], AbstractContextManager[None]]
"""Entered for what a forward pass that sessions share does for one of them alone."""


class Continuation(Iterator[int]):
    """The tokens that follow a state, each read back into its session once the next one is asked
    for: by `next`, or before it together with those of other sessions (batched_forward.py).
    """

    def __init__(
        self,
        session: "AskSession",
        state: Tensor,
        max_new_tokens: int,
        draw: Callable[[Tensor], int],
        *,
        stop: Callable[[int], bool] | None = None,
        end: Callable[[int], bool] | None = None,
    ) -> None:
        """state: [hidden_size]. draw: a token of logits [vocabulary]. stop(token) ends after that
        token, end(token) before it.
        """
        self.session = session
        self.around: Around = nullcontext
        self._last: int | None = None  # the token that was given and is not read yet
        self._state = state
        self._logits: Tensor | None = None  # of that state, where they are known
        self._failed: Exception | None = None
        self._left = max_new_tokens
        self._draw_token = draw
        self._stop, self._end = stop, end
        self.stopped = False

    def stop(self) -> None:
        """Give no more tokens."""
        self._left, self.stopped = 0, True

    @property
    def pending(self) -> int | None:
        """The token that has to be read before the next one; None for the first and behind the last
        one. `stop` is asked here, when the token has been taken.
        """
        if self._last is not None and self._stop is not None and self._stop(self._last):
            self._left = 0
        if self._left < 1:
            self._last = None
        return self._last

    def read(self, state: Tensor, logits: Tensor | None = None) -> None:
        """The pending token was read: the state [hidden_size] behind it, and the logits
        [vocabulary] of that, where they are known.
        """
        self._last, self._state, self._logits = None, state, logits

    def fail(self, error: Exception) -> None:
        """The pending token could not be read: the next token raises this."""
        self._last, self._failed = None, error

    def __next__(self) -> int:
        if self._failed is not None:
            raise self._failed
        pending = self.pending
        if self._left < 1:
            raise StopIteration
        if pending is not None:
            self.read(self.session.read_token(pending))
        token = self._draw()
        if self._end is not None and self._end(token):
            self._left = 0
            raise StopIteration
        self._left, self._last = self._left - 1, token
        return token

    @torch.no_grad()
    def _draw(self) -> int:
        logits = self._logits
        if logits is None:
            logits = self.session.reader.logits(self._state[None], quantized=True)[0]
        return self._draw_token(logits)


class AskSession(Closing):
    """A text that is read on and generated beside a memory. Its tokens can be read in one forward
    pass with those of other sessions of its model (batched_forward.py).
    """

    reader: ModelAdapter  # whose layers they go through
    store: MemoryStore
    adapt: bool = False  # is it read with the model's reading adapter now?
    answered: bool = True  # False: nothing in the memory answers the last question
    needed: float | None = None  # the score that a passage needs to answer it; None without a gate
    doubt: float | None = None  # probability, 0 to 1, that nothing that is read answers
    first_logits: Tensor | None = None  # [vocabulary] of the answer's first token, if computed
    read_tokens: int = 0  # since it was opened
    lookups: Lookups  # how often blocks were looked for

    @property
    def same(self) -> Mapping[tuple[int, int], Sequence[tuple[int, int]]]:
        """Of blocks (document, block) that are read now, others that say the same."""
        return {}

    @property
    def closest(self) -> Sequence[tuple[int, int, float]]:
        """The best passages of a question that nothing answers, best first: document, block and
        score.
        """
        return ()

    @abstractmethod
    def attach(self, documents: Sequence[tuple[int, int]]) -> None:
        """Look up in these documents from now on, (id, blocks) each, in place of those before."""

    @abstractmethod
    def ask(self, question: str, answering: Callable[[], None]) -> Tensor:
        """Read a question as the next turn; the state [hidden_size] that its answer begins with.

        answering: called before the step that predicts the answer's first token.
        """

    @abstractmethod
    def tell(self, question: str, answer: str) -> int:
        """Read a turn that was said before, without looking up; how many tokens it has."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read content tokens -> [n, hidden_size], row i being the state that predicts what follows
        ids[i].
        """

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [n, vocabulary] of states [n, hidden_size]."""
        return self.reader.logits(states)

    @torch.no_grad()
    def read_token(self, token: int) -> Tensor:
        """Read a token that was generated -> the state [hidden_size] behind it."""
        if not self.begin_token():
            return self.feed([token])[-1]
        state = self.recorded(token)
        if state is not None:
            self.end_token(token)
            return state
        ids = torch.tensor([[token]], device=self.reader.device)
        state = self.reader.hidden(
            ids, self.attend, enter=self.enter, quantized=True, adapt=self.adapt
        )[0, -1]
        self.end_token(token)
        return state

    def recorded(self, token: int) -> Tensor | None:
        """Read a token by a forward pass that was recorded -> the state [hidden_size] behind it;
        None where there is none, and nothing was read.
        """
        return None

    @abstractmethod
    def begin_token(self) -> bool:
        """Make room for a token; False where it has to be read alone, by `feed`."""

    @abstractmethod
    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As ModelAdapter.hidden takes it, of this session's row."""

    @abstractmethod
    def enter(self, layer_idx: int, states: Tensor) -> None:
        """As ModelAdapter.hidden takes it, of this session's row."""

    @abstractmethod
    def end_token(self, token: int) -> None:
        """The token was read."""

    def ends_turn(self, token: int) -> bool:
        """Does what is generated end before this token?"""
        return False

    @abstractmethod
    def close(self) -> None:
        """Let go of the session's own blocks; the documents stay."""

    def generate(
        self,
        state: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Callable[[int], bool] | None = None,
        logits: Tensor | None = None,
    ) -> Continuation:
        """The tokens that follow `state` [hidden_size], until the turn ends: see Continuation, and
        AnswerSettings for temperature, top_p and seed. logits: [vocabulary] of the state, if
        computed.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        sample = partial(draw, temperature=temperature, generator=generator, top_p=top_p)
        tokens = Continuation(self, state, max_new_tokens, sample, stop=stop, end=self.ends_turn)
        tokens.read(state, logits)
        return tokens

    def unread(self) -> Tensor | None:
        """Read nothing of the memory any more -> the state [hidden_size] with which the answer to
        the last question begins; None where nothing was read.
        """
        return None


def ends_sentence(piece: str) -> bool:
    """Does a token of this text end a sentence or a line?"""
    return piece.rstrip(" ").endswith((".", "?", "!")) or "\n" in piece


def draw(
    logits: Tensor,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    top_p: float = 1.0,
) -> int:
    """A token by logits [vocabulary]: the likeliest at temperature 0, else one of the likeliest
    that together have a probability of top_p.
    """
    if temperature == 0:
        return int(logits.float().argmax())  # of bfloat16 it takes a CPU five times as long
    # where the generator is: the same draw on every device
    weights = (logits / temperature).softmax(-1).cpu()
    if math.isnan(weights[0]):  # by so small a number logits are divided to no finite ones
        weights = ((logits.double() - logits.max()) / temperature).softmax(-1).cpu()
    if top_p < 1:
        most = weights.sort(descending=True)
        before = most.values.cumsum(0) - most.values  # of those that are likelier
        others = before >= top_p
        others[0] = False  # as a top_p that rounds to 0 would leave nothing
        weights[most.indices[others]] = 0
    # as torch.multinomial, which takes twenty times as long for a vocabulary
    reached = weights.double().cumsum(0)
    at = torch.rand(1, generator=generator, dtype=torch.float64) * reached[-1]
    return int(torch.searchsorted(reached, at, right=True).clamp_(max=len(reached) - 1))


def attached(
    store: MemoryStore, names: Sequence[str] | None, *, retrieve: bool
) -> list[tuple[int, int]]:
    """The documents that a session is about, as (id, blocks). names: None for all; retrieve: have
    what they are found by. Raises what MemoryStore.ready and Retrieval.hold_documents raise.
    """
    rows = store.ready(names)
    if retrieve:
        store.retrieval.hold_documents(rows)
    return [(row.id, row.blocks) for row in rows]


def check_device(device: torch.device, store: MemoryStore) -> None:
    """Raises InvalidConfig where the memory's blocks are on another device than the model."""
    held_on = store.tiers.top.lengths.device.type
    if held_on != device.type:
        raise InvalidConfig(
            f"the model is on {device.type} and the memory's blocks on {held_on}; open the memory "
            f"with device={str(device)!r}, or load the model with the memory's"
        )
