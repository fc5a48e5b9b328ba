"""Capturing the activations that a selector looks at: text is read without memory, up to its
layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.model.adapter import Enter
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.repositioned_attention import RepositionedAttention, read_prefix
from memstore.model.passages.selectors.captured_activations import Captured, Captures

STEP = 256  # tokens of a longer text that are read at once


class CapturingForward:
    """A text behind the reader's prefix that is read on, token by token; of what was read long ago
    no more is held than `most` tokens.
    """

    def __init__(self, reader: PassageModel, most: int | None = None) -> None:
        """most: None for the whole text."""
        self._reader, self._most = reader, most
        self._attention = RepositionedAttention(reader, read_prefix(reader))

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Captured:
        """Read tokens; what they show."""
        if not self._reader.selector.captures.layers or not ids:
            return Captured(list(ids))
        if self._most is None:
            return self._read(ids)
        parts = []
        for piece in pieces(ids, self._attention.local, self._most):
            held = self._attention.local
            self._attention.let_go(min(held, max(0, held + len(piece) - self._most)))
            parts.append(self._read(piece))
        return Captured.joined(parts)

    def fork(self) -> "CapturingForward":
        """Another forward pass, that has read the same."""
        other = CapturingForward(self._reader, self._most)
        other._attention = self._attention.fork()
        return other

    def _read(self, ids: Sequence[int]) -> Captured:
        captures = self._reader.selector.captures
        captured, enter = capturing(ids, captures)
        given = torch.tensor([list(ids)], device=self._reader.device)
        attend = self._attention.attend
        states = self._reader.hidden(given, attend, layers=captures.layers, enter=enter)
        enter(captures.layers, states)
        return captured


def pieces(ids: Sequence[int], held: int, most: int) -> list[Sequence[int]]:
    """Ids that follow `held` tokens, as they are read where `most` are held: at once where nothing
    has to leave.
    """
    if held + len(ids) <= most:
        return [ids]
    step = min(STEP, most)
    return [ids[at : at + step] for at in range(0, len(ids), step)]


def capture(reader: PassageModel, ids: Sequence[int]) -> Captured:
    """What the reader's selector needs to see of ids that stand behind the prefix."""
    return CapturingForward(reader).read(ids)


def capturing(ids: Sequence[int], captures: Captures) -> tuple[Captured, Enter]:
    """What a forward pass of these ids shows, and the `enter` that captures it."""
    captured = Captured(list(ids))

    def enter(layer_idx: int, states: Tensor) -> None:
        captured.keep_states(captures, layer_idx, states)

    return captured, enter
