"""Text as a selector sees it: read without memory, through the layers that it looks at."""

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.model.adapter import Attend, Enter
from memstore.model.passages.passage_protocol import ChoosingReader
from memstore.model.passages.repositioned_attention import CompactAttention, read_prefix
from memstore.model.passages.selectors.captured_activations import Tapped, Taps

STEP = 256  # tokens of a longer text that are read at once


class TapWalk:
    """A text behind the reader's prefix that is read on, token by token; of what was read long ago
    no more is held than `most` tokens.
    """

    def __init__(self, reader: ChoosingReader, most: int | None = None) -> None:
        """most: None for the whole text."""
        self._reader, self._most = reader, most
        self._attention = CompactAttention(reader, read_prefix(reader))

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Tapped:
        """Read tokens; what they show."""
        if not self._reader.selector.taps.layers or not ids:
            return Tapped(list(ids))
        if self._most is None:
            return self._read(ids)
        parts = []
        for piece in pieces(ids, self._attention.local, self._most):
            held = self._attention.local
            self._attention.let_go(min(held, max(0, held + len(piece) - self._most)))
            parts.append(self._read(piece))
        return Tapped.joined(parts)

    def fork(self) -> "TapWalk":
        """Another walk, that has read the same."""
        other = TapWalk(self._reader, self._most)
        other._attention = self._attention.fork()
        return other

    def _read(self, ids: Sequence[int]) -> Tapped:
        taps = self._reader.selector.taps
        tapped, attend, enter = tapping(ids, taps, self._attention.attend)
        given = torch.tensor([list(ids)], device=self._reader.device)
        states = self._reader.hidden(given, attend, layers=taps.layers, enter=enter)
        enter(taps.layers, states)
        return tapped


def pieces(ids: Sequence[int], held: int, most: int) -> list[Sequence[int]]:
    """Ids that follow `held` tokens, as they are read where `most` are held: at once where nothing
    has to leave.
    """
    if held + len(ids) <= most:
        return [ids]
    step = min(STEP, most)
    return [ids[at : at + step] for at in range(0, len(ids), step)]


def tap(reader: ChoosingReader, ids: Sequence[int]) -> Tapped:
    """What the reader's selector needs to see of ids that stand behind the prefix."""
    return TapWalk(reader).read(ids)


def tapping(ids: Sequence[int], taps: Taps, attend: Attend) -> tuple[Tapped, Attend, Enter]:
    """What a walk of these ids will have shown, and the `attend` and `enter` that show it."""
    tapped = Tapped(list(ids))

    def attending(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tapped.keep_heads(taps, layer_idx, q, k)
        return attend(layer_idx, q, k, v)

    def enter(layer_idx: int, states: Tensor) -> None:
        tapped.keep_states(taps, layer_idx, states)

    return tapped, attending, enter
