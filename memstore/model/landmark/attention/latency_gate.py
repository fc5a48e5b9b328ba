"""The latency-aware gate, of blocks that a row does not wait for: those in tiers that its gate is
too low for, and those that cannot be had (docs/sharing.md). What is left is attended to.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.kernels.api import LocalAttention
from memstore.model.landmark.attention.block_requests import BlockRequest, Locate
from memstore.model.lookup_settings import cutoff_of

Nearest = Callable[[Sequence[BlockKey]], list[str]]
"""The name of the fastest tier that has each of some units."""

GIVEN_BACK = 0.1  # of attention mass, by a row that skips its lookup


def close_rows(local: LocalAttention, kept: Tensor, values: Tensor | None = None) -> LocalAttention:
    """Attention whose rows other than `kept` [H, T] read no memory. With values [H, D] of the
    context miss token they take these in its place; without, what they would have given to memory,
    up to GIVEN_BACK, goes to what they have seen.
    """
    closed = local.gate.masked_fill(kept, 0.0)
    if values is not None:
        given = (closed[..., None] * values[:, None]).to(local.output.dtype)
        return LocalAttention(local.output + given, local.gate - closed, local.lse)
    seen = (1 - closed.clamp(max=GIVEN_BACK))[..., None].to(local.output.dtype)
    return LocalAttention(local.output / seen, local.gate - closed, local.lse)


def within_reach(
    wanted: BlockRequest,
    gate: Tensor,
    cutoffs: Mapping[str, float],
    locate: Locate,
    nearest: Nearest,
) -> tuple[BlockRequest, int]:
    """Of what rows chose, what is in a tier that the gate of one of them is not too low for; and
    how many units are not waited for. gate: [H, T].

    A choice that rows share has the greatest gate among them. A unit that one row waits for is
    there for all.
    """
    candidates, group = wanted.candidates, wanted.group
    heads, rows, _ = candidates.shape
    if rows == 1:
        gate = gate.amax(1, keepdim=True)
    head = torch.arange(heads, device=candidates.device)[:, None, None] + wanted.first_head
    kv_heads = (wanted.first_head + heads - 1) // group + 1
    present = candidates >= 0
    units, inverse = torch.where(present, candidates * kv_heads + head // group, -1).unique(
        return_inverse=True
    )
    keys = [
        None if unit < 0 else BlockKey(*_at(wanted.layer, locate, unit, kv_heads))
        for unit in units.tolist()
    ]
    asked = [key for key in keys if key is not None and key.document >= 0]
    tiers = dict(zip(asked, nearest(asked)))
    least = torch.tensor(
        [0.0 if key is None else cutoff_of(cutoffs, tiers.get(key, "host")) for key in keys],
        device=gate.device,
        dtype=gate.dtype,
    )
    brought = torch.zeros(len(keys), dtype=torch.bool, device=gate.device)
    brought[inverse[present & (gate[..., None] >= least[inverse])]] = True
    kept = present & brought[inverse]
    left = len(asked) - int(brought[[key is not None and key.document >= 0 for key in keys]].sum())
    return _without(wanted, kept), left


def without_units(
    wanted: BlockRequest, units: Collection[tuple[int, int, int, int]], locate: Locate
) -> BlockRequest:
    """What rows chose, without some units."""
    group, first = wanted.group, wanted.first_head
    kept = torch.tensor(
        [
            [
                [
                    candidate >= 0
                    and BlockKey(*_place(wanted.layer, locate, candidate, (first + at) // group))
                    not in units
                    for candidate in of_row
                ]
                for of_row in of_head
            ]
            for at, of_head in enumerate(wanted.candidates.tolist())
        ],
        device=wanted.candidates.device,
    )
    return _without(wanted, kept)


def _without(wanted: BlockRequest, kept: Tensor) -> BlockRequest:
    return BlockRequest(
        wanted.layer, wanted.candidates.masked_fill(~kept, -1), wanted.first_head, wanted.group
    )


def _at(layer: int, locate: Locate, unit: int, kv_heads: int) -> tuple[int, int, int, int]:
    return _place(layer, locate, unit // kv_heads, unit % kv_heads)


def _place(layer: int, locate: Locate, candidate: int, head: int) -> tuple[int, int, int, int]:
    document, block = locate(candidate)
    return document, layer, block, head
