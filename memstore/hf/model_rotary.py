"""A model's own rotary positions, applied from outside: layer by layer, or as one Rope."""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from memstore.errors import InvalidWeights
from memstore.hf.attention_seam import takes_layer_type
from memstore.model.rotary import Positions, Rope

_UNSTEADY = {
    "dynamic": "its frequencies change with the length of the text (dynamic RoPE)",
    "longrope": "its frequencies change with the length of the text (LongRoPE)",
}
_TABLE = 4096  # positions to begin with


class ModelRotary:
    """Rotates queries and keys [.., T, D] of a layer as the model's own code does, attention
    scaling included, by tables of its cosines and sines.
    """

    def __init__(self, decoder: nn.Module, config: Any, turned: Sequence[bool]) -> None:
        """decoder: attached (memstore.hf.attention_seam); turned: which layers have positions.

        Raises InvalidWeights for frequencies that change with the length.
        """
        rotary = cast(Any, decoder.rotary_emb).original
        for kind in _kinds(rotary):
            if kind in _UNSTEADY:
                raise InvalidWeights(
                    f"{config.model_type}: {_UNSTEADY[kind]}; what was stored under one length "
                    "would be wrong under another, so it cannot be given a memory"
                )
        self._rotary = rotary
        self._apply: Callable[..., tuple[Tensor, Tensor]] = sys.modules[
            type(decoder).__module__
        ].apply_rotary_pos_emb
        layers = len(cast(nn.ModuleList, decoder.layers))
        self._types: list[str | None] = (
            list(config.layer_types) if takes_layer_type(rotary) else [None] * layers
        )
        self._turned, self._name = turned, config.model_type
        self._half_split = _is_half_split(self._apply)
        self._tables: dict[tuple[str | None, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        self._outgrown: list[tuple[Tensor, Tensor]] = []  # which a CUDA graph may still read
        self._growing = threading.Lock()

    def rotate(self, layer: int, x: Tensor, positions: Tensor | range | Positions) -> Tensor:
        """x [.., T, D] to positions [T] (0 and above)."""
        if not self._turned[layer] or not x.numel():
            return x
        shape = x.shape
        x = x.reshape(1, -1, *shape[-2:])
        cos, sin = self._angles(self._types[layer], positions, x)
        turned = cos.shape[-1]
        part = x[..., :turned]
        if self._half_split:
            rotated = _half_split(part, cos, sin)
        else:
            rotated = self._apply(part, part[:, :0], cos, sin)[0].to(x.dtype)
        if turned < shape[-1]:
            rotated = torch.cat((rotated, x[..., turned:]), -1)
        return rotated.view(shape)

    def _angles(
        self, kind: str | None, positions: Tensor | range | Positions, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The model's cosines and sines [1, T, d] of positions [T]."""
        if isinstance(positions, range):
            cos, sin = self._table(kind, positions.stop, x)
            at = slice(positions.start, positions.stop)
            return cos[:, at], sin[:, at]
        if not isinstance(positions, Positions):
            positions = Positions(positions, int(positions.max()) + 1)
        found = positions.angles.get((kind, x.dtype))
        if found is None:
            cos, sin = self._table(kind, positions.reach, x)
            found = cos[:, positions.at], sin[:, positions.at]
            positions.angles[kind, x.dtype] = found
        return found

    def _table(self, kind: str | None, reach: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """The model's cosines and sines [1, n, d] of positions 0 .. n - 1, n >= reach."""
        key = (kind, x.dtype, x.device)
        table = self._tables.get(key)
        if table is None or table[0].shape[1] < reach:
            with self._growing:
                table = self._tables.get(key)
                if table is None or table[0].shape[1] < reach:
                    self._outgrown += [] if table is None else [table]
                    table = self._tables[key] = self._grown(kind, reach, x)
        return table

    def _grown(self, kind: str | None, reach: int, x: Tensor) -> tuple[Tensor, Tensor]:
        size = max(_TABLE, 1 << (reach - 1).bit_length())
        positions = torch.arange(size, device=x.device)[None]
        given = (x.new_zeros(1), positions) if kind is None else (x.new_zeros(1), positions, kind)
        with torch.no_grad():
            cos, sin = self._rotary(*given)
        return cos, sin

    def rope(self, head_dim: int) -> "ModelRope":
        """The same of every layer and every position, negative ones too.

        Raises InvalidWeights where layers differ, or what is turned together are no pairs.
        """
        if len(set(self._types)) > 1 or not all(self._turned):
            raise InvalidWeights(
                f"{self._name}: its layers have different positions, or some have none; one lookup "
                "cannot serve them all"
            )

        def turned(x: Tensor, positions: Tensor | None) -> Tensor:
            """x [n, d] at positions [n]; None: with cosines of 0 and sines of 1."""
            at = torch.zeros(len(x)) if positions is None else positions
            given = (x.new_zeros(1), at[None].to(x.device))
            kind = self._types[0]
            cos, sin = self._rotary(*given) if kind is None else self._rotary(*given, kind)
            if positions is None:
                cos, sin = torch.zeros_like(cos), torch.ones_like(sin)
            x = x[None, None, :, : cos.shape[-1]]
            return self._apply(x, x, cos, sin)[0][0, 0]

        return ModelRope(self._name, head_dim, turned)


def _half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What most models' code computes, in half as many operations: x [1, H, T, D] by cosines and
    sines [1, T, D], dimension i together with i + D/2.
    """
    first, second = x.chunk(2, -1)
    return (x * cos).add_(torch.cat((-second, first), -1).mul_(sin))


def _is_half_split(apply: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Is that what a model's code computes?"""
    draw = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(1, 3, 5, 8, generator=draw) for _ in range(3))
    cos, sin = cos[:, 0], sin[:, 0]
    try:
        theirs = apply(x, x[:, :0], cos, sin)[0]
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False
    return theirs.shape == x.shape and torch.equal(theirs, _half_split(x, cos, sin))


class ModelRope(Rope):
    """The rotary positions of a model whose layers all have the same; dimensions that it does not
    turn stay as they are.
    """

    def __init__(
        self, name: str, head_dim: int, turned: Callable[[Tensor, Tensor | None], Tensor]
    ) -> None:
        """turned: see ModelRotary.rope; it may be narrower than head_dim. Raises InvalidWeights."""
        self._turn = turned
        self._tables = {}
        with torch.no_grad():
            # row j: what dimension j adds to each of them
            gives = turned(torch.eye(head_dim), None)
        width = gives.shape[-1]
        partners = gives[:width].abs().argmax(0)
        pairs = torch.arange(width)
        exchanged = torch.zeros_like(gives).index_put_(
            (partners, pairs), gives[partners, pairs].sign()
        )
        if not (torch.equal(gives, exchanged) and torch.equal(partners[partners], pairs)):
            raise InvalidWeights(
                f"{name} rotates keys and queries in a way of its own; it cannot be trained"
            )
        self._order = torch.cat([partners, torch.arange(width, head_dim)])
        self._firsts = (pairs < partners).float()
        whole = torch.arange(head_dim)
        self._half_split = torch.equal(self._order, whole.roll(head_dim // 2))
        self.interleaved = torch.equal(self._order, whole.view(-1, 2).flip(-1).flatten())

    def _table(self, reach: int, x: Tensor) -> tuple[Tensor, Tensor, int]:
        key = (torch.float64 if x.dtype == torch.float64 else torch.float32, x.device)
        table = self._tables.get(key)
        if table is None or table[2] < reach:
            zero = max(1024, 1 << reach.bit_length())
            grid = torch.arange(-zero, zero + 1)
            rest = (0, len(self._order) - len(self._firsts))
            ones = self._firsts.expand(len(grid), -1)
            with torch.no_grad():
                first, second = (self._turn(pad(part, rest), grid) for part in (ones, 1 - ones))
            cos, sin = (
                pad(torch.where(ones > 0, *order), rest, value=still)
                for order, still in (((first, second), 1.0), ((second, first), 0.0))
            )
            table = self._tables[key] = (cos.to(*key[::-1]), sin.to(*key[::-1]), zero)
        return table

    def _partners(self, x: Tensor) -> Tensor:
        if self._half_split or self.interleaved:
            return super()._partners(x)
        return x[..., self._order.to(x.device)]


def _kinds(rotary: Any) -> list[str]:
    kinds = getattr(rotary, "rope_type", "default")
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]
