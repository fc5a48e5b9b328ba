"""Pages of keys, and the places that they tell, kept while the state of the file that they belong
to stays: who reads the next batch finds its places without looking into the same pages again.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from itertools import repeat
from typing import NamedTuple

from memstore.disk.lmdb.pages import BRANCH, HEADER, LEAF, NODE, OVERFLOW, Page

_MOST = 1024  # pages that are kept: of some 20 kB
_OFTEN = 2  # keys that are searched for in a leaf before it is taken apart


class Extent(NamedTuple):
    """Where a value lies in the data file, in bytes."""

    offset: int
    size: int


class KeyPage:
    """A page of keys, of one length all, that is looked into more than once."""

    def __init__(self, data: bytes) -> None:
        """Raises struct.error for what is too short for a page."""
        page = Page(data)
        self.is_branch, self.is_leaf = bool(page.flags & BRANCH), bool(page.flags & LEAF)
        self._data, self._offsets = data, page.offsets
        self._searched = 0
        self._branches: tuple[list[bytes], list[int]] | None = None

    def below(self, key_size: int) -> tuple[list[bytes], list[int]]:
        """Of a branch the least keys of its pages, and their numbers; the first stands for all keys
        before the second. Raises struct.error.
        """
        if self._branches is None:
            nodes = [NODE.unpack_from(self._data, offset) for offset in self._offsets]
            self._branches = (
                list(map(_key_at(self._data, key_size), self._offsets)),
                [low | high << 16 | more << 32 for low, high, more, _ in nodes],
            )
        return self._branches

    def extents(self, key: bytes, page_size: int) -> dict[bytes, Extent]:
        """Of a leaf by key the place of this value, if it is there and does not lie beside its key;
        of a leaf that is looked into often, of all its values. Raises struct.error.
        """
        padded = self._data + bytes(8)  # behind a value that lies beside its key
        unpack = _leaf_node(len(key)).unpack_from
        self._searched += 1
        if self._searched > _OFTEN:
            nodes = map(unpack, repeat(padded), self._offsets)
        else:
            at = bisect_left(self._offsets, key, key=_key_at(padded, len(key)))
            nodes = map(unpack, repeat(padded), self._offsets[at : at + 1])
        return {
            name: Extent(page * page_size + HEADER, low | high << 16)
            for low, high, flags, key_size, name, page in nodes
            if flags & OVERFLOW and key_size == len(key)
        }


def _key_at(data: bytes, size: int) -> Callable[[int], bytes]:
    """The key, of so many bytes, of the node at an offset."""
    begin, end = NODE.size, NODE.size + size
    return lambda offset: data[offset + begin : offset + end]


@cache
def _leaf_node(key_size: int) -> struct.Struct:
    return struct.Struct(f"<HHHH{key_size}sQ")


class Known(NamedTuple):
    """What is known of one table."""

    pages: dict[int, KeyPage]  # by number
    extents: dict[bytes, Extent]  # by key


class KeyPages:
    """The pages of keys of one file that were looked into, of its latest state alone. Safe for
    several threads.
    """

    def __init__(self) -> None:
        self._latest: tuple[int, dict[str, Known]] = -1, {}

    def of(self, transaction: int, table: str) -> Known:
        """Those of a table in the state that a transaction of this number made: while a reader sees
        it, nothing changes them.
        """
        made, tables = self._latest
        if made != transaction:
            tables = {}
            self._latest = transaction, tables
        known = tables.get(table)
        if known is None or len(known.pages) > _MOST:
            known = tables[table] = Known({}, {})
        return known
