"""Names and sizes of blocks: the units that tiers cache, and the records on disk."""

from dataclasses import dataclass
from typing import NamedTuple

# KV dtypes that are stored, and the bytes of a value.
KV_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
# Codecs, and their numbers in headers of records, which never change.
CODEC_NUMBERS = {"raw": 0, "zstd": 1, "int8": 2}


class BlockKey(NamedTuple):
    """Key of a unit that tiers cache, lease and count: one block of one KV head of one layer."""

    document: int  # id of a stored document; negative for a session's own blocks
    layer: int
    block: int
    head: int


class RecordKey(NamedTuple):
    """Key of a record on disk: one block of one layer, with all its KV heads."""

    document: int
    block: int
    layer: int

    def __str__(self) -> str:
        return f"document {self.document}, block {self.block}, layer {self.layer}"


@dataclass(frozen=True)
class Geometry:
    """The sizes of a memory's blocks."""

    num_kv_heads: int
    block_size: int  # content tokens
    head_dim: int
    dtype: str  # a name of KV_DTYPES

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a record's K, and of its V: [num_kv_heads, block_size, head_dim]."""
        return self.num_kv_heads, self.block_size, self.head_dim

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return KV_DTYPES[self.dtype]

    @property
    def unit_bytes(self) -> int:
        """Bytes of K and V of one head."""
        return 2 * self.block_size * self.head_dim * self.itemsize

    @property
    def record_bytes(self) -> int:
        """Bytes of K and V of all heads."""
        return self.num_kv_heads * self.unit_bytes
