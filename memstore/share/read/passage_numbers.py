"""Passages of published documents, under numbers of this process: the same one for the same
content, and where it stands.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from memstore.block import RecordKey
from memstore.disk.tables.passage_table import Digest
from memstore.errors import DocumentNotFound

_FIRST = 1 << 40  # beyond all numbers of documents
_MOST = 1 << 17  # passages that are known, those that were asked for last


class _Known(NamedTuple):
    digest: Digest
    document: int  # and block, that was told last
    block: int


class PassagePlaces:
    """Passages that were asked for. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Digest, int] = {}
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._next = _FIRST

    def number(self, digest: Digest, document: int, block: int) -> int:
        """The number of a passage that stands in a block of a document."""
        with self._lock:
            number = self._numbers.setdefault(digest, self._next)
            if number == self._next:
                self._next += 1
            self._known[number] = _Known(digest, document, block)
            self._known.move_to_end(number)
            if len(self._known) > _MOST:
                _, gone = self._known.popitem(last=False)
                del self._numbers[gone.digest]
            return number

    def row(self, number: int) -> bytes | None:
        """What PassageTable reads of a passage, or None for no number of one."""
        known = self._known.get(number)
        if known is None:
            return None
        row: bytes = msgpack.packb([known.digest, 1, 1, known.document, known.block])
        return row

    def in_documents(self, wanted: Sequence[tuple[int, RecordKey]]) -> list[tuple[int, RecordKey]]:
        """Records by document and key, those of passages where they stand in one. Raises
        DocumentNotFound for a passage that was asked for too long ago.
        """
        found = []
        for document, key in wanted:
            if document >= _FIRST:
                known = self._known.get(document)
                if known is None:
                    raise DocumentNotFound(f"passage {document} is not known any more; ask again")
                document, key = known.document, RecordKey(known.document, known.block, key.layer)
            found.append((document, key))
        return found
