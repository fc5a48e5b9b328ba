"""Passages that a reader has computed, as the records that they would have been published in."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
    for digest, codec, k, v in passages:
        records = table.encode_passage(layers, raw_view(k), raw_view(v), digest, codec)
        for layer, record in records.items():
            yield (b"", RecordKey(0, 0, layer), digest, ()), record
