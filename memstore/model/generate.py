"""The next tokens of a session, one by one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from memstore.errors import InvalidInput


class Continued(Protocol):
    """A text that can be read on."""

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read tokens -> [n, hidden_size]."""

    def logits(self, states: Tensor) -> Tensor:
        """Next-token logits [n, vocabulary] of states [n, hidden_size]."""


def generate(
    session: Continued,
    state: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int | None = None,
    stop: Callable[[int], bool] | None = None,
    end: Callable[[int], bool] | None = None,
) -> Iterator[int]:
    """Yield tokens that follow `state` [hidden_size], each read back into the session once the next
    one is asked for.

    temperature 0 is greedy; otherwise samples, repeatably under `seed`. stop(token) ends after that
    token, end(token) before it.
    """
    if temperature < 0:
        raise InvalidInput(f"temperature must not be negative, is {temperature}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for step in range(max_new_tokens):
        token = next_token(session, state, temperature, generator)
        if end is not None and end(token):
            return
        yield token
        if stop is not None and stop(token):
            return
        if step + 1 < max_new_tokens:
            state = session.feed([token])[-1]


@torch.no_grad()
def next_token(
    session: Continued, state: Tensor, temperature: float, generator: torch.Generator | None
) -> int:
    """The next token after `state` [hidden_size]."""
    logits = session.logits(state[None])[0]
    if temperature == 0:
        return int(logits.argmax())
    # where the generator is: the same draw on every device
    weights = (logits / temperature).softmax(-1).cpu()
    return int(torch.multinomial(weights, 1, generator=generator))
