"""Passages of published documents, under numbers of this process: the same one for the same
content, and where it stands.
"""

import threading
from collections.abc import Sequence

import msgpack

from memstore.block import RecordKey
from memstore.disk.tables.passage_rows import Digest

_FIRST = 1 << 40  # beyond all numbers of documents


class PassagePlaces:
    """Passages that were asked for. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Digest, int] = {}
        self._digests: list[Digest] = []
        self._places: list[tuple[int, int]] = []  # document and block, that was told last

    def number(self, digest: Digest, document: int, block: int) -> int:
        """The number of a passage that stands in a block of a document."""
        with self._lock:
            number = self._numbers.setdefault(digest, len(self._digests))
            if number == len(self._digests):
                self._digests.append(digest)
                self._places.append((document, block))
            self._places[number] = document, block
            return _FIRST + number

    def row(self, number: int) -> bytes | None:
        """What PassageTable reads of a passage, or None for no number of one."""
        at = number - _FIRST
        if not 0 <= at < len(self._digests):
            return None
        row: bytes = msgpack.packb([self._digests[at], 1, 1, 0, *self._places[at]])
        return row

    def in_documents(self, wanted: Sequence[tuple[int, RecordKey]]) -> list[tuple[int, RecordKey]]:
        """Records by document and key, those of passages where they stand in one."""
        found = []
        for document, key in wanted:
            if document >= _FIRST:
                document, block = self._places[document - _FIRST]
                key = RecordKey(document, block, key.layer)
            found.append((document, key))
        return found
