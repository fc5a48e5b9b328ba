"""A session: a text that a model reads and continues, with a memory; the tokens that it generates,
alone or in one forward pass with other sessions of the model; and the trace of an answer: the
blocks that each token attended to, the attention mass on each, and the costs.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstore.closing import Closing
from memstore.errors import InvalidConfig, MemstoreError
from memstore.model.adapter import ModelAdapter
from memstore.store.memory_store import MemoryStore, Names
from memstore.tiers.slots import COUNTS


class ReadUnit(NamedTuple):
    """A block that a query head of a layer read, and the tier that had it."""

    layer: int
    head: int
    document: int
    block: int
    tier: str


class StepReads(NamedTuple):
    """What one row of a step read: units of one layer with the attention mass on each [units]; or
    passages, as units of their first layer and head, with the mass of all layers and heads.
    """

    units: Sequence[ReadUnit]
    masses: NDArray[np.float64]


OnRead = Callable[[StepReads], None]
"""Called with what a row of a step read, unless it read nothing."""


@dataclass
class Lookups:
    """Numbers of lookups done and skipped. A landmark model has one for each (token, head, layer),
    and skips it if the gate is below the cutoff; a passage model has one for each question.
    """

    done: int = 0
    skipped: int = 0


class Continuation(Iterator[int]):
    """Iterator over the tokens that follow a state. A token is read back into its session when the
    next one is requested, or earlier, together with those of other sessions (`read_pending`).
    """

    def __init__(
        self,
        session: "AskSession",
        state: Tensor,
        max_new_tokens: int,
        draw: Callable[[Tensor], int],
        *,
        logits: Tensor | None = None,
        end: Callable[[int], bool] = lambda token: False,
    ) -> None:
        """state: [hidden_size]; logits: [vocabulary] of it, if computed. draw: picks a token by
        logits. end: whether generation ends before a token.
        """
        self.session = session
        # context of this session's own work in a forward pass that sessions share
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.stopped = False
        self.last: int | None = None  # the latest token, if it was not read yet
        self.state, self.logits = state, logits
        self.failed: Exception | None = None
        self._left = max_new_tokens
        self._draw_token, self._end = draw, end

    def stop(self) -> None:
        """Generate no more tokens."""
        self._left, self.stopped = 0, True

    @property
    def pending(self) -> int | None:
        """The token to read before the next one; None before the first token and after the last."""
        return self.last if self._left > 0 else None

    def read(self, state: Tensor) -> None:
        """Take the state [hidden_size] after the pending token, which was read."""
        self.last, self.state, self.logits = None, state, None

    def fail(self, error: Exception) -> None:
        """Note that the pending token could not be read: the next token raises this error."""
        self.last, self.failed = None, error

    def __next__(self) -> int:
        if self.failed is not None:
            raise self.failed
        pending = self.pending
        if self._left < 1:
            raise StopIteration
        if pending is not None:
            self.read(self.session.read_token(pending))
        token = self._draw()
        if self._end(token):
            self._left = 0
            raise StopIteration
        self._left, self.last = self._left - 1, token
        return token

    @torch.no_grad()
    def _draw(self) -> int:
        logits = self.logits
        if logits is None:
            logits = self.session.reader.logits(self.state[None], quantized=True)[0]
        return self._draw_token(logits)

    # The pending token, read in one forward pass with those of other sessions

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context for work of this session alone; its next token raises a MemstoreError of it."""
        try:
            with self.around():
                yield
        except MemstoreError as error:
            self.fail(error)

    def begins(self) -> bool:
        """Make room for the token; return whether it may share a forward pass."""
        with self.alone():
            return self.session.begin_token()
        return False

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention output of this session's row; zeros if it has failed."""
        if self.failed is None:
            with self.alone():
                return self.session.attend(layer_idx, q, k, v)
        return torch.zeros_like(q)


@torch.no_grad()
def read_pending(continuations: Sequence[Continuation]) -> None:
    """Read the pending tokens of sessions of one model, in one forward pass if possible, so that
    their next tokens are ready. The decoder multiplies by its weights once for all sessions;
    attention and memory stay separate.

    An error is raised by `next` of the session that it belongs to. An unexpected error ends all
    sessions, because each may have read its token in some layers.
    """
    ready = [one for one in continuations if one.pending is not None]
    try:
        sharing = [one for one in ready if one.begins()]
        for adapt in (False, True):
            alike = [one for one in sharing if one.session.adapt is adapt]
            if len(alike) > 1:
                _read_together(alike)
        for one in ready:
            if one.last is not None:
                with one.alone():
                    one.read(one.session.read_token(one.last))
        going = [one for one in ready if one.failed is None]
        if going:
            states = torch.stack([one.state for one in going])
            rows = going[0].session.reader.logits(states, quantized=True)
            for one, logits in zip(going, rows):
                one.logits = logits
    except Exception as error:
        for one in ready:
            one.fail(error)


def _read_together(some: Sequence[Continuation]) -> None:
    """Read tokens of sessions that all use the reading adapter, or all do not. A session that fails
    continues with zeros in its row, and the others are not affected.
    """

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = zip(some, q.split(1), k.split(1), v.split(1))
        return torch.cat([one.attend(layer_idx, *row) for one, *row in rows])

    def enter(layer_idx: int, states: Tensor) -> None:
        for one, row in zip(some, states.split(1)):
            if one.failed is None:
                one.session.enter(layer_idx, row)

    session, tokens = some[0].session, [one.last for one in some]
    ids = torch.tensor(tokens, device=session.reader.device)[:, None]
    states = session.reader.hidden(ids, attend, enter=enter, quantized=True, adapt=session.adapt)
    for one, token, state in zip(some, tokens, states[:, -1]):
        if one.failed is None and token is not None:
            one.session.end_token(token)
            one.read(state)


class AskSession(Closing):
    """A text that a model reads and continues, with a memory. Its tokens can share a forward pass
    with those of other sessions of the model (`read_pending`).
    """

    reader: ModelAdapter  # the model
    store: MemoryStore
    adapt: bool = False  # is it read with the model's reading adapter now?
    answered: bool = True  # False: no passage of the memory answers the last question
    needed: float | None = None  # the score that a passage needs to answer it; None without a gate
    doubt: float | None = None  # probability, 0 to 1, that no passage that is read answers
    first_logits: Tensor | None = None  # [vocabulary] of the answer's first token, if computed
    read_tokens: int = 0  # since it was opened
    lookups: Lookups  # numbers of lookups

    @property
    def same(self) -> Mapping[tuple[int, int], Sequence[tuple[int, int]]]:
        """For blocks (document, block) that are read now, other blocks with the same text."""
        return {}

    @property
    def closest(self) -> Sequence[tuple[int, int, float]]:
        """The best passages for a question that none answers, best first: document, block and
        score.
        """
        return ()

    @abstractmethod
    def attach(self, documents: Sequence[tuple[int, int]]) -> None:
        """Search these documents, (id, blocks) each, from now on, instead of the earlier ones."""

    @abstractmethod
    def ask(self, question: str, answering: Callable[[], None]) -> Tensor:
        """Read a question as the next turn -> the state [hidden_size] that its answer begins with.

        answering: called before the step that predicts the answer's first token.
        """

    @abstractmethod
    def tell(self, question: str, answer: str) -> int:
        """Read an earlier turn, without lookups; return its number of tokens."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read content tokens -> states [n, hidden_size]; row i predicts the token after ids[i]."""

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [n, vocabulary] of states [n, hidden_size]."""
        return self.reader.logits(states)

    @torch.no_grad()
    def read_token(self, token: int) -> Tensor:
        """Read a generated token -> the state [hidden_size] after it."""
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
        """Read a token by a recorded forward pass (step_graph.py) -> the state [hidden_size] after
        it; None, with nothing read, if there is no recording.
        """
        return None

    @abstractmethod
    def begin_token(self) -> bool:
        """Make room for a token; return False if `feed` must read it, alone."""

    @abstractmethod
    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The `attend` of ModelAdapter.hidden, for this session's row."""

    def enter(self, layer_idx: int, states: Tensor) -> None:
        """The `enter` of ModelAdapter.hidden, for this session's row."""

    @abstractmethod
    def end_token(self, token: int) -> None:
        """Called after the token was read."""

    def ends_turn(self, token: int) -> bool:
        """Whether this token ends the generated turn; it is not part of the turn."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release the session's own blocks; documents stay."""

    def generate(
        self,
        state: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        logits: Tensor | None = None,
    ) -> Continuation:
        """Generate the tokens that follow `state` [hidden_size], until the turn ends: see
        Continuation, and AnswerSettings for temperature, top_p and seed. logits: [vocabulary] of
        the state, if computed.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        sample = partial(draw, temperature=temperature, generator=generator, top_p=top_p)
        end = self.ends_turn
        return Continuation(self, state, max_new_tokens, sample, logits=logits, end=end)

    def unread(self) -> Tensor | None:
        """Drop what was read of the memory -> the state [hidden_size] that the answer to the last
        question begins with then; None if nothing was read.
        """
        return None


# The trace of an answer

OF_TOKEN = 6  # blocks recorded for a token: those most read

BlockId = tuple[int, int]
"""(document id, block)."""


class TokenRead(NamedTuple):
    """The document blocks that one token read most, with its attention mass on each, best first."""

    token: int
    blocks: list[tuple[BlockId, float]]


class Trace:
    """Records what the last row of every step of a session reads, as its OnRead, for one session
    and one thread at a time. begin, step and tokens_of also count the costs of an answer.
    """

    def __init__(self, reader: ModelAdapter) -> None:
        self.reader = reader
        self._on = False
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[TokenRead] = []
        # blocks of documents that were read: the attention mass on each by the tier that had it
        self.blocks: dict[BlockId, dict[str, float]] = {}
        self.tiers: dict[str, dict[str, int | float]] = {}
        self.lookups = {"done": 0, "skipped": 0}
        self.seconds = 0.0  # from the question to the last token
        self.model_seconds = 0.0  # the part of them spent in steps of this answer
        self.first_token_seconds = 0.0
        self._reads: list[StepReads] = []  # of the latest forward pass

    def begin(self, session: AskSession) -> None:
        """Begin a question, and clear earlier records."""
        self._clear()
        self._session, self._on = session, False
        self._began = time.perf_counter()
        self._lookups = session.lookups.done, session.lookups.skipped

    def start(self) -> None:
        """Start recording for the answer's first token; AskSession.ask calls this."""
        self._reads, self._on = [], True

    def __call__(self, reads: StepReads) -> None:
        if not self._on:
            return
        if self._reads and reads.units[0].layer <= self._reads[-1].units[0].layer:
            self._reads = []  # a new forward pass begins, which predicts the token
        self._reads.append(reads)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step of this answer; adds its time, lookups and tier counts."""
        began, before = time.perf_counter(), self._session.store.tier_stats()
        try:
            yield
        finally:
            after = self._session.store.tier_stats()
            if not self.tiers or before != after:
                for tier, counts in after.items():
                    total = self.tiers.setdefault(tier, dict.fromkeys(COUNTS, 0))
                    earlier = before.get(tier, {})
                    for name in COUNTS:
                        total[name] += counts[name] - earlier.get(name, 0)
            lookups, (done, skipped) = self._session.lookups, self._lookups
            self.lookups = {"done": lookups.done - done, "skipped": lookups.skipped - skipped}
            now = time.perf_counter()
            self.model_seconds += now - began
            self.seconds = now - self._began

    def tokens_of(self, generated: Iterator[int]) -> Iterator[int]:
        """Yield the same tokens, and record what each of them read."""
        try:
            while True:
                with self.step():
                    token = next(generated, None)
                if token is None:
                    return
                self.first_token_seconds = self.first_token_seconds or self.seconds
                self._record(token)
                yield token
        finally:
            self._reads, self._on = [], False

    def _record(self, token: int) -> None:
        """Record a token with what the latest step read."""
        of_token: dict[BlockId, float] = {}
        for units, masses in self._reads:
            for unit, mass in zip(units, masses.tolist()):
                if unit.document < 0:  # the session's own text
                    continue
                block = unit.document, unit.block
                of_token[block] = of_token.get(block, 0.0) + mass
                tiers = self.blocks.setdefault(block, {})
                tiers[unit.tier] = tiers.get(unit.tier, 0.0) + mass
        best = sorted(of_token.items(), key=lambda item: (-item[1], item[0]))[:OF_TOKEN]
        self.tokens.append(TokenRead(token, best))
        self._reads = []

    def ranked(self, most: int) -> list[tuple[BlockId, float]]:
        """(block, mass) of the `most` blocks with the greatest attention mass, best first."""
        masses = [(block, sum(tiers.values())) for block, tiers in self.blocks.items()]
        return sorted(masses, key=lambda item: (-item[1], item[0]))[:most]


# Tokens


def draw(
    logits: Tensor,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    top_p: float = 1.0,
) -> int:
    """Pick a token by logits [vocabulary]: the most probable one at temperature 0; else one of the
    most probable ones whose probabilities add up to top_p.
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


def attached(store: MemoryStore, names: Names, *, retrieve: bool) -> list[tuple[int, int]]:
    """The documents of a session, as (id, blocks). retrieve: load their search data. Raises
    what MemoryStore.ready and Retrieval.hold_documents raise.
    """
    rows = store.ready(names)
    if retrieve:
        store.retrieval.hold_documents(rows)
    return [(row.id, row.blocks) for row in rows]


def check_device(device: torch.device, store: MemoryStore) -> None:
    """Raises InvalidConfig if the memory's blocks are on another device than the model."""
    held_on = store.tiers.top.lengths.device.type
    if held_on != device.type:
        raise InvalidConfig(
            f"the model is on {device.type} and the memory's blocks on {held_on}; open the memory "
            f"with device={str(device)!r}, or load the model with the memory's"
        )
