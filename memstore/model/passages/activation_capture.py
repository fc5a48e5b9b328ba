"""Capturing the activations that a selector looks at: text is read without memory, up to its
layers. The dialogue buffer of a session holds ids of its local text, and what its selector sees of
them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.model.adapter import Enter
from memstore.model.passages.passage_protocol import PassageModel
from memstore.model.passages.repositioned_attention import RepositionedAttention, read_prefix
from memstore.model.passages.selector import Captured, Captures

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


_FURTHER = 64  # tokens that are looked through for the end of a sentence


class DialogueBuffer:
    """Ids behind the prefix; the selector reads them without memory when that is first needed,
    every token once.
    """

    def __init__(self, reader: PassageModel, most: int) -> None:
        """most: tokens that are held at most."""
        self.ids: list[int] = []  # that have not left, oldest first
        self.tokens = 0  # read so far, with those that left
        self._reader = reader
        self._forward = CapturingForward(reader, most)
        self._seen = 0  # of `ids`, how many that has read
        self._ahead: tuple[list[int], CapturingForward] | None = None

    def look_ahead(self, ids: Sequence[int], words: range) -> Captured:
        """What the words of a turn show that is about to be read."""
        if self._seen < len(self.ids):
            self._forward.read(self.ids[self._seen :])
            self._seen = len(self.ids)
        forward = self._forward.fork()
        shown = forward.read(ids)
        self._ahead = list(ids), forward
        return shown.part(words)

    def extend(self, ids: Sequence[int]) -> None:
        """These ids are read."""
        ahead, self._ahead = self._ahead, None
        self.ids.extend(ids)
        self.tokens += len(ids)
        if ahead is not None and ahead[0] == list(ids):
            self._forward, self._seen = ahead[1], len(self.ids)

    def sentences(self, least: int) -> int:
        """How many of the oldest tokens, at least so many, are whole sentences; `least` where no
        sentence ends soon behind it.
        """
        decode = self._reader.tokenizer.decode
        for end in range(least, min(len(self.ids), least + _FURTHER) + 1):
            if (
                decode(self.ids[end - 1 : end])
                .rstrip("\"'\u2019\u201d)*_ ")
                .endswith((".", "!", "?", "\n"))
            ):
                return end
        return least

    def let_go(self, tokens: int) -> list[int]:
        """Take the oldest tokens away; their ids."""
        gone, self.ids = self.ids[:tokens], self.ids[tokens:]
        self._seen = max(0, self._seen - tokens)
        return gone
