"""Activations of a model's first layers, captured for a selector."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Captures(NamedTuple):
    """What a selector needs captured: the states that enter some layers."""

    states: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        """How many layers a forward pass has to go through to capture it."""
        return max(self.states, default=0)


@dataclass
class Captured:
    """What was captured of consecutive tokens; a forward pass fills it by `keep_states`."""

    ids: list[int]
    states: dict[int, Tensor] = field(default_factory=dict)  # layer -> [T, hidden_size]

    def keep_states(self, captures: Captures, layer_idx: int, states: Tensor) -> None:
        """Keep the states that enter a layer, [1, T, hidden_size], if they are wanted."""
        if layer_idx in captures.states:
            self.states[layer_idx] = states[0]

    def part(self, tokens: range) -> "Captured":
        """The same of some of the tokens."""
        at = slice(tokens.start, tokens.stop)
        return Captured(self.ids[at], {layer: states[at] for layer, states in self.states.items()})

    @classmethod
    def joined(cls, parts: "Iterable[Captured]") -> "Captured":
        """The same of parts that follow one another."""
        some = [part for part in parts if part.ids]
        if len(some) < 2:
            return some[0] if some else cls([])
        return cls(
            [token for part in some for token in part.ids],
            {layer: torch.cat([part.states[layer] for part in some]) for layer in some[0].states},
        )
