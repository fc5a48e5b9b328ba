"""What a block is called: the units that tiers cache and the records that disks keep."""

from typing import NamedTuple


class BlockKey(NamedTuple):
    """The unit that tiers cache, lease and count: one block of one KV head of one layer."""

    document: int  # id of a stored document; negative for a session's own blocks
    layer: int
    block: int
    head: int
