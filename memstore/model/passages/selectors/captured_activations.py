"""Activations of a model's first layers, captured for a selector."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Captures(NamedTuple):
    """What a selector needs captured: the states entering some layers, and the queries and keys of
    some.
    """

    states: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        """How many layers a forward pass has to go through to show it."""
        return max([*self.states, *(layer + 1 for layer in self.heads)], default=0)


@dataclass
class Captured:
    """What was shown of consecutive tokens; filled by a forward pass that calls `enter` and
    `attend`.
    """

    ids: list[int]
    states: dict[int, Tensor] = field(default_factory=dict)  # layer -> [T, hidden_size]
    q: dict[int, Tensor] = field(default_factory=dict)  # layer -> [H, T, D], position-free
    k: dict[int, Tensor] = field(default_factory=dict)  # layer -> [Hkv, T, D], position-free

    def keep_states(self, captures: Captures, layer_idx: int, states: Tensor) -> None:
        """Keep what enters a layer, [1, T, hidden_size], if it is wanted."""
        if layer_idx in captures.states:
            self.states[layer_idx] = states[0]

    def keep_heads(self, captures: Captures, layer_idx: int, q: Tensor, k: Tensor) -> None:
        """Keep the queries [1, H, T, D] and keys [1, Hkv, T, D] of a layer, if they are wanted."""
        if layer_idx in captures.heads:
            self.q[layer_idx], self.k[layer_idx] = q[0], k[0]

    def part(self, tokens: range) -> "Captured":
        """The same of some of the tokens."""
        at = slice(tokens.start, tokens.stop)
        return Captured(
            self.ids[at],
            {layer: states[at] for layer, states in self.states.items()},
            {layer: q[:, at] for layer, q in self.q.items()},
            {layer: k[:, at] for layer, k in self.k.items()},
        )

    @classmethod
    def joined(cls, parts: "Iterable[Captured]") -> "Captured":
        """What tokens show that follow one another."""
        shown = [part for part in parts if part.ids]
        if len(shown) < 2:
            return shown[0] if shown else cls([])
        first = shown[0]
        return cls(
            [token for part in shown for token in part.ids],
            {layer: torch.cat([part.states[layer] for part in shown]) for layer in first.states},
            {layer: torch.cat([part.q[layer] for part in shown], 1) for layer in first.q},
            {layer: torch.cat([part.k[layer] for part in shown], 1) for layer in first.k},
        )
