"""What a layer sees of a text before the current segment: the interface of the memories that
landmark attention is compared with, attention inside the segment, and the two extremes, no memory
and full attention.

A text is read in segments of n tokens. In a segment every layer calls `attend` whenever tokens
arrive; then `advance` counts them; after n tokens `end_segment` moves them into the past. Queries,
keys and values come without positions.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.model.landmark.transformer import Transformer


@dataclass
class Attended:
    """How much was attended to: rows (a token in a layer), and keys that these rows saw in all (of
    a head; the mean over heads where they differ).
    """

    rows: int = 0
    keys: int = 0

    @property
    def per_token(self) -> float:
        """Tokens that a token attends to, the mean over layers."""
        return self.keys / self.rows if self.rows else 0.0


class Past(ABC):
    """The past of a batch of texts that are read in parallel, and their open segment."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.length = 0  # tokens of the open segment
        self.attended = Attended()
        self._window = Window(model)

    def enter(self, layer_idx: int, x: Tensor) -> None:  # noqa: B027
        """Called when a layer starts, with its input states x [B, T, hidden] of the next tokens."""

    @abstractmethod
    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, T, D], k and v [B, Hkv, T, D] of the segment's next T tokens -> what they attend
        to, [B, H, T, D].
        """

    def advance(self, tokens: int) -> None:
        """Count `tokens` more tokens, which every layer has now attended with."""
        self.length += tokens

    def end_segment(self) -> None:
        """Move the open segment into the past; a new one is open and empty."""
        self._close()
        self._window.clear()
        self.length = 0

    def _close(self) -> None:  # noqa: B027
        """Take what the open segment holds into the past."""

    @property
    def bytes(self) -> int:
        """Of what is kept of the past, the open segment left out."""
        return 0

    def _count(self, rows: int, seen: int) -> None:
        """rows that see `seen` keys each, and each one more than the one before it."""
        self.attended.rows += rows
        self.attended.keys += rows * seen + rows * (rows + 1) // 2


class Window:
    """Keys (rotated to their positions in it) and values of every layer: some of before the
    segment, then the open segment; [B, Hkv, S, D] each.
    """

    def __init__(self, model: Transformer) -> None:
        self._rope, self._layers = model.rope, model.config.num_layers
        self.clear()

    def clear(self) -> None:
        """Remove everything."""
        self._keys: list[Tensor | None] = [None] * self._layers
        self._values: list[Tensor | None] = [None] * self._layers

    def append(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Add k, v [B, Hkv, T, D] of the next T positions to those of a layer."""
        start = self.size(layer_idx)
        k = self._rope.rotate(k, *self._rope.angles(start, start + k.shape[2], k))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        self._keys[layer_idx] = k if keys is None else torch.cat([keys, k], 2)
        self._values[layer_idx] = v if values is None else torch.cat([values, v], 2)

    def size(self, layer_idx: int) -> int:
        """Positions in it."""
        keys = self._keys[layer_idx]
        return 0 if keys is None else keys.shape[2]

    def held(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer that has some."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        assert keys is not None and values is not None
        return keys, values

    def turned(self, layer_idx: int, q: Tensor) -> Tensor:
        """q [B, H, T, D] rotated to the window's last T positions."""
        end = self.size(layer_idx)
        return self._rope.rotate(q, *self._rope.angles(end - q.shape[2], end, q))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of the last T of S positions, each over itself and all before it.

    q: [B, H, T, D], scaled and rotated; k, v: [B, Hkv, S, D]. Returns [B, H, T, D].
    """
    rows, positions = q.shape[2], k.shape[2]
    more: dict[str, Any] = {"is_causal": True}
    if rows != positions:
        seen = visible(rows, positions, q.device)
        more = {"attn_mask": None if rows == 1 else seen}
    if k.shape[1] != q.shape[1]:
        more["enable_gqa"] = True
    return F.scaled_dot_product_attention(q, k, v, scale=1.0, **more)


def visible(rows: int, positions: int, device: torch.device) -> Tensor:
    """[rows, positions] bool: what the last `rows` of the positions see."""
    at = torch.arange(positions - rows, positions, device=device)
    return torch.arange(positions, device=device) <= at[:, None]


class NoPast(Past):
    """A segment sees itself alone."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._count(q.shape[2], self._window.size(layer_idx))
        self._window.append(layer_idx, k, v)
        q = self._window.turned(layer_idx, q * q.shape[-1] ** -0.5)
        return causal_attention(q, *self._window.held(layer_idx))


class FullPast(NoPast):
    """Every token sees every one before it, however long ago; gradients reach all of them."""

    def end_segment(self) -> None:
        self.length = 0

    @property
    def bytes(self) -> int:
        layers = range(self.model.config.num_layers)
        held = [x for layer in layers if self._window.size(layer) for x in self._window.held(layer)]
        return sum(x[:, :, : x.shape[2] - self.length].nbytes for x in held)
