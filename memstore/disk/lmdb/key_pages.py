"""Pages of keys that are kept while the state of the file that they belong to stays: who reads the
next batch finds its places without reading and taking apart the same pages again.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from itertools import repeat

from memstore.disk.lmdb.pages import BRANCH, LEAF, NODE, OVERFLOW, Page

_MOST = 1024  # pages that are kept: of some 20 kB
_OFTEN = 2  # keys that are searched for in a leaf before it is taken apart

# Halves of the value's size, flags, the key's size, the key, and the value's first page.
_Node = tuple[int, int, int, int, bytes, int]


class KeyPage:
    """A page of keys, of one length all, that is looked into more than once."""

    def __init__(self, data: bytes) -> None:
        """Raises struct.error for what is too short for a page."""
        page = Page(data)
        self.is_branch, self.is_leaf = bool(page.flags & BRANCH), bool(page.flags & LEAF)
        self._data, self._offsets = data, page.offsets
        self._searched = 0
        self._branches: tuple[list[bytes], list[int]] | None = None
        self._nodes: dict[bytes, _Node] | None = None  # of a leaf

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

    def value(self, key: bytes) -> tuple[int, int] | None:
        """The first page and the bytes of a value in a leaf; None for one that is not there, or
        lies beside its key. Raises struct.error.
        """
        node = self._search(key) if self._nodes is None else self._nodes.get(key)
        if node is None or not node[2] & OVERFLOW or node[3] != len(key):
            return None
        return node[5], node[0] | node[1] << 16

    def _search(self, key: bytes) -> _Node | None:
        padded = self._data + bytes(8)  # behind a value that lies beside its key
        unpack = _leaf_node(len(key)).unpack_from
        self._searched += 1
        if self._searched > _OFTEN:
            self._nodes = {node[4]: node for node in map(unpack, repeat(padded), self._offsets)}
            return self._nodes.get(key)
        at = bisect_left(self._offsets, key, key=_key_at(padded, len(key)))
        node = unpack(padded, self._offsets[at]) if at < len(self._offsets) else None
        return node if node is not None and node[4] == key else None


def _key_at(data: bytes, size: int) -> Callable[[int], bytes]:
    """The key, of so many bytes, of the node at an offset."""
    begin, end = NODE.size, NODE.size + size
    return lambda offset: data[offset + begin : offset + end]


@cache
def _leaf_node(key_size: int) -> struct.Struct:
    return struct.Struct(f"<HHHH{key_size}sQ")


class KeyPages:
    """The pages of keys of one file that were looked into, of its latest state alone. Safe for
    several threads.
    """

    def __init__(self) -> None:
        self._latest: tuple[int, dict[int, KeyPage]] = -1, {}

    def of(self, transaction: int) -> dict[int, KeyPage]:
        """By number, those of the state that a transaction of this number made: while a reader sees
        it, nothing changes them.
        """
        made, pages = self._latest
        if made != transaction or len(pages) > _MOST:
            pages = {}
            self._latest = transaction, pages
        return pages
