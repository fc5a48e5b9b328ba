"""Text as a selector sees it: read without memory, through the layers that it looks at."""

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.model.compact import CompactAttention, KeysValues, Window
from memstore.model.reader import Attend, ChoosingReader, Enter
from memstore.model.tapped import Tapped, Taps


class TapWalk:
    """A text behind the reader's prefix that is read on, token by token; of what was read long ago
    no more is held than the window says.
    """

    def __init__(
        self, reader: ChoosingReader, beginning: Sequence[KeysValues], window: Window | None = None
    ) -> None:
        """beginning: as CompactAttention takes it. window: None for the whole text."""
        self._reader, self._beginning, self._window = reader, beginning, window
        self._attention = CompactAttention(reader, beginning)

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Tapped:
        """Read tokens; what they show."""
        if not self._reader.selector.taps.layers or not ids:
            return Tapped(list(ids))
        if self._window is None:
            return self._read(ids)
        parts = []
        for piece in self._window.pieces(ids, self._attention.local):
            self._attention.let_go(self._window.surplus(self._attention.local, len(piece)))
            parts.append(self._read(piece))
        return Tapped.joined(parts)

    def fork(self) -> "TapWalk":
        """Another walk, that has read the same."""
        other = TapWalk(self._reader, self._beginning, self._window)
        other._attention = self._attention.fork()
        return other

    def _read(self, ids: Sequence[int]) -> Tapped:
        taps = self._reader.selector.taps
        tapped, attend, enter = tapping(ids, taps, self._attention.attend)
        given = torch.tensor([list(ids)], device=self._reader.device)
        states = self._reader.hidden(given, attend, layers=taps.layers, enter=enter)
        enter(taps.layers, states)
        return tapped


def tap(reader: ChoosingReader, beginning: Sequence[KeysValues], ids: Sequence[int]) -> Tapped:
    """What the reader's selector needs to see of ids that stand behind the prefix."""
    return TapWalk(reader, beginning).read(ids)


def tapping(ids: Sequence[int], taps: Taps, attend: Attend) -> tuple[Tapped, Attend, Enter]:
    """What a walk of these ids will have shown, and the `attend` and `enter` that show it."""
    tapped = Tapped(list(ids))

    def attending(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tapped.keep_heads(taps, layer_idx, q, k)
        return attend(layer_idx, q, k, v)

    def enter(layer_idx: int, states: Tensor) -> None:
        tapped.keep_states(taps, layer_idx, states)

    return tapped, attending, enter
