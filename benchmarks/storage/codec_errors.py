"""What attention makes of keys and values that a codec has rounded."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.text import Books
from memstore import LandmarkModel, MemoryStore
from memstore.block import RecordKey
from memstore.disk.tables.block_table import BlockTable
from memstore.kernels import api
from memstore.kernels import reference_memory_attention as reference
from memstore.kernels.types import LocalAttention
from memstore.tiers.raw_bits import from_raw, raw_view


class Call(NamedTuple):
    """One memory attention of a session, its slots renumbered to the units it read."""

    q: Tensor
    keys: Tensor  # [U, block_size, D]
    values: Tensor
    lengths: Tensor  # [U]
    slots: Tensor
    rotations: Tensor
    landmark_scores: Tensor

    def output(self, keys: Tensor, values: Tensor) -> Tensor:
        """What the memory contributes [H, T, D] if its share of every row is 1, in float64."""
        q = self.q.double()
        nothing = LocalAttention(
            torch.zeros_like(q[0]), torch.ones_like(q[0, ..., 0]), torch.zeros_like(q[0, ..., 0])
        )
        scores = self.landmark_scores.double()
        out, _ = reference.memory_attention(
            q,
            keys.double(),
            values.double(),
            self.lengths,
            self.slots,
            self.rotations,
            scores,
            nothing,
            gated=True,
        )
        return out[0]


@contextmanager
def recording() -> Iterator[list[Call]]:
    """The memory attentions computed meanwhile."""
    calls: list[Call] = []
    compute = api.memory_attention

    def record(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        slots: Tensor,
        rotations: Tensor,
        landmark_scores: Tensor,
        local: LocalAttention,
        *,
        gated: bool,
        return_mass: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        units, inverse = slots.unique(return_inverse=True)
        absent = int(units[0] < 0)
        taken = units[absent:]
        read = keys[taken], values[taken], lengths[taken], inverse - absent
        calls.append(Call(q.clone(), *read, rotations.clone(), landmark_scores.clone()))
        return compute(
            q, keys, values, lengths, slots, rotations, landmark_scores, local,
            gated=gated, return_mass=return_mass,
        )  # fmt: skip

    api.memory_attention = record
    try:
        yield calls
    finally:
        api.memory_attention = compute


def attention(
    model: LandmarkModel, store: MemoryStore, books: Books, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Errors of memory attention, over the lookups of a session that reads another place of the
    books.
    """
    ids = books.place(Random(f"codecs queries {options.seed}"), options.queries).tolist()
    with recording() as calls, model.session(store, ["book"]) as session:
        session.feed(ids)
    calls = [call for call in calls if len(call.keys)]
    dtype, write = model.signature.kv_dtype, bytes(16)
    # a unit is stored as a record of one head
    one_head, key = replace(model.signature, num_kv_heads=1), RecordKey(1, 0, 0)

    def stored(call: Call, codec: str) -> tuple[Tensor, Tensor]:
        keys, values = torch.empty_like(call.keys), torch.empty_like(call.values)
        table = BlockTable(one_head, codec)
        for unit, length in enumerate(call.lengths.tolist()):
            k, v = raw_view(call.keys[unit])[None, None], raw_view(call.values[unit])[None, None]
            (record,) = table.encode(key, k, v, [length], write)
            k, v, _ = table.decode(record, key, write)
            keys[unit], values[unit] = from_raw(k[0], dtype), from_raw(v[0], dtype)
        return keys, values

    wanted = [call.output(call.keys, call.values) for call in calls]
    found = {}
    for codec in options.codecs:
        squares, total, ratios = 0.0, 0.0, []
        for call, want in zip(calls, wanted):
            error = (call.output(*stored(call, codec)) - want).norm(dim=-1)
            size = want.norm(dim=-1)
            squares, total = squares + float((error**2).sum()), total + float((size**2).sum())
            ratios.append((error / size)[size > 0].numpy())
        every = np.concatenate(ratios)
        found[codec] = {
            "attention_error": (squares / total) ** 0.5,
            "attention_error_median": float(np.median(every)),
            "attention_error_p99": float(np.quantile(every, 0.99)),
            "attention_rows": len(every),
        }
        print(
            f"  {codec}: relative error of attention {found[codec]['attention_error']:.4f}",
            flush=True,
        )
    return found
