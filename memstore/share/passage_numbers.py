"""Numbers by which a reader of a publication names its passages."""

import threading
from collections import OrderedDict
from typing import NamedTuple

from memstore.disk.tables.passage_table import Digest
from memstore.errors import DocumentNotFound

_FIRST_PASSAGE = 1 << 40  # number of the first passage, above all numbers of documents
_PASSAGES = 1 << 17  # that are remembered, those that were asked for last


class KnownPassage(NamedTuple):
    """A passage, and the document and block where it was asked for last."""

    digest: Digest
    document: int
    block: int


class PassageNumbers:
    """Numbers for passages in this process, one for equal content. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Digest, int] = {}
        self._known: OrderedDict[int, KnownPassage] = OrderedDict()
        self._next = _FIRST_PASSAGE

    def number(self, digest: Digest, document: int, block: int) -> int:
        """The number of a passage that is in a block of a document."""
        with self._lock:
            number = self._numbers.get(digest)
            if number is None:
                number = self._numbers[digest] = self._next
                self._next += 1
            self._known[number] = KnownPassage(digest, document, block)
            self._known.move_to_end(number)
            if len(self._known) > _PASSAGES:
                _, gone = self._known.popitem(last=False)
                del self._numbers[gone.digest]
            return number

    def passage(self, number: int) -> KnownPassage:
        """The passage of a number. Raises DocumentNotFound: it was asked for too long ago."""
        known = self._known.get(number)
        if known is None:
            raise DocumentNotFound(f"passage {number} is not known any more; ask again")
        return known

    def has(self, number: int) -> bool:
        """Is this the number of a passage, and not of a document?"""
        return number >= _FIRST_PASSAGE
