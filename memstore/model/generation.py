"""Generation: the next tokens of a session, one by one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from memstore.errors import InvalidInput
from memstore.model.adapter import ModelAdapter
from memstore.model.lookup_settings import check_sampling

Around = Callable[[], AbstractContextManager[None]]
"""Entered for what a forward pass that sessions share does for one of them alone."""


class Sampler:
    """Draws tokens: at temperature 0 the likeliest; otherwise samples, repeatably under `seed`,
    from the likeliest that together have a probability of top_p. Raises InvalidInput for what is
    out of range.
    """

    def __init__(
        self, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None
    ) -> None:
        check_sampling(temperature, seed)
        if not 0 < top_p <= 1:
            raise InvalidInput(f"top_p must lie above 0 and up to 1, is {top_p}")
        self._temperature, self._top_p = temperature, top_p
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def draw(self, logits: Tensor) -> int:
        """A token by its logits [vocabulary]."""
        return draw(logits, self._temperature, self._generator, self._top_p)


class Continuation(Iterator[int]):
    """The tokens that follow a state, each read back into its session once the next one is asked
    for: by `next`, or before it together with those of other sessions (batched_forward.py).
    """

    def __init__(
        self,
        session: "GeneratingSession",
        state: Tensor,
        max_new_tokens: int,
        sampler: Sampler,
        *,
        stop: Callable[[int], bool] | None = None,
        end: Callable[[int], bool] | None = None,
    ) -> None:
        """state: [hidden_size]. stop(token) ends after that token, end(token) before it."""
        self.session = session
        self.around: Around = nullcontext
        self._last: int | None = None  # the token that was given and is not read yet
        self._state = state
        self._logits: Tensor | None = None  # of that state, where they are known
        self._failed: Exception | None = None
        self._left = max_new_tokens
        self._sampler = sampler
        self._stop, self._end = stop, end

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
        return self._sampler.draw(logits)


class GeneratingSession(ABC):
    """A text that is read on and generated; its tokens can be read in a forward pass with those of
    other sessions of its model (batched_forward.py).
    """

    reader: ModelAdapter  # whose layers they go through

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read tokens -> [n, hidden_size]."""

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
        state = self.reader.hidden(ids, self.attend, enter=self.enter, quantized=True)[0, -1]
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

    def generate(
        self,
        state: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Callable[[int], bool] | None = None,
    ) -> Continuation:
        """The tokens that follow `state` [hidden_size], until the turn ends: see Continuation, and
        Sampler for temperature, top_p and seed.
        """
        sampler = Sampler(temperature, top_p, seed)
        return Continuation(self, state, max_new_tokens, sampler, stop=stop, end=self.ends_turn)


def ends_sentence(piece: str) -> bool:
    """Does a token of this text end a sentence or a line?"""
    return piece.rstrip(" ").endswith((".", "?", "!")) or "\n" in piece


def draw(
    logits: Tensor, temperature: float, generator: torch.Generator | None, top_p: float = 1.0
) -> int:
    """A token by logits [vocabulary]; temperature 0 takes the likeliest."""
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
