"""Batched decode: tokens of several sessions of one model, read in one forward pass.

What a decoder multiplies by its weights it multiplies once for all of them; attention and memory
stay each session's own. Sums over more rows may be rounded otherwise, so that an answer whose next
token is nearly a draw can differ from the one that is read alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from memstore.errors import MemstoreError
from memstore.model.session import Around, AskSession, Continuation


@torch.no_grad()
def feed_batch(
    sessions: Sequence[AskSession], tokens: Sequence[int], around: Sequence[Around] = ()
) -> list[Tensor | MemstoreError]:
    """Read one token into each of some sessions of one reader -> of each the state [hidden_size]
    behind it, as session.read_token(token), or what that would have raised.

    around: one each, or none: entered for what is done for a session alone.
    """
    steps = [
        _Step(session, token, *own)
        for session, token, *own in zip(sessions, tokens, *([around] if around else []))
    ]
    sharing = [step for step in steps if step.begins()]
    for adapt in (False, True):
        alike = [step for step in sharing if step.session.adapt is adapt]
        if len(alike) > 1:
            _forward(alike)
    for step in steps:
        if step.found is None:
            step.alone()
    return [step.found for step in steps if step.found is not None]


@dataclass
class _Step:
    """A token of one session. found: the state behind it, or why there is none."""

    session: AskSession
    token: int
    around: Around = nullcontext
    found: Tensor | MemstoreError | None = None

    def begins(self) -> bool:
        """Make room; whether the token may share a forward pass."""
        with self._own():
            return self.session.begin_token()
        return False

    def alone(self) -> None:
        with self._own():
            self.found = self.session.read_token(self.token)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of its row; zeros where it has failed."""
        if self.found is None:
            with self._own():
                return self.session.attend(layer_idx, q, k, v)
        return torch.zeros_like(q)

    @contextmanager
    def _own(self) -> Iterator[None]:
        try:
            with self.around():
                yield
        except MemstoreError as error:
            self.found = error


def _forward(steps: Sequence[_Step]) -> None:
    """One token of each, all with the reading adapter or all without. A session that fails goes
    along with zeros in its row, and the others do not notice.
    """
    reader, adapt = steps[0].session.reader, steps[0].session.adapt

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = zip(steps, q.split(1), k.split(1), v.split(1))
        return torch.cat([step.attend(layer_idx, *row) for step, *row in rows])

    def enter(layer_idx: int, states: Tensor) -> None:
        for step, row in zip(steps, states.split(1)):
            if step.found is None:
                step.session.enter(layer_idx, row)

    ids = torch.tensor([[step.token] for step in steps], device=reader.device)
    states = reader.hidden(ids, attend, enter=enter, quantized=True, adapt=adapt)[:, -1]
    for step, state in zip(steps, states):
        if step.found is None:
            step.session.end_token(step.token)
            step.found = state


@torch.no_grad()
def read_pending(continuations: Sequence[Continuation]) -> None:
    """Read the pending tokens of continuations of one reader's sessions, those that have one, so
    that their next tokens are there at once. What fails is raised by the `next` of its own
    continuation; what nobody expects ends them all, as each may have read its token in some layers.
    """
    ready = [(one, token) for one in continuations if (token := one.pending) is not None]
    if not ready:
        return
    sessions = [one.session for one, _ in ready]
    tokens, around = [token for _, token in ready], [one.around for one, _ in ready]
    try:
        found = feed_batch(sessions, tokens, around)
    except Exception as error:
        for one, _ in ready:
            one.fail(error)
        return
    states = [state for state in found if isinstance(state, Tensor)]
    rows = iter(sessions[0].reader.logits(torch.stack(states), quantized=True) if states else ())
    for (one, _), state in zip(ready, found):
        if isinstance(state, Tensor):
            one.read(state, next(rows))
        else:
            one.fail(state)
