"""Passages that a reader has computed, as the records that they would have been published in."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from memstore.block import RecordKey
from memstore.disk.read.batch import Wanted
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.passage_table import Digest
from memstore.tiers.raw_bits import raw_view


class Computed(NamedTuple):
    """Keys and values of a passage: k and v [memory layers, Hkv, n, D] in the KV dtype, k without
    position.
    """

    digest: Digest  # of a codec
    codec: str
    k: Tensor
    v: Tensor


def encode(
    table: BlockTable, layers: Sequence[int], passages: Sequence[Computed]
) -> Iterator[tuple[Wanted, bytes]]:
    """The records of passages, and by what each is known."""
    heads, size, dim = table.geometry.shape
    for digest, codec, *halves in passages:
        length = halves[0].shape[2]
        k, v = (
            np.zeros((len(layers), heads, size, dim), f"<i{table.geometry.itemsize}")
            for _ in halves
        )
        k[:, :, :length], v[:, :, :length] = map(raw_view, halves)
        for at, layer in enumerate(layers):
            (record,) = table.encode_passages(
                layer, k[at : at + 1], v[at : at + 1], [length], [digest], codec
            )
            yield (b"", RecordKey(0, 0, layer), digest, ()), record
