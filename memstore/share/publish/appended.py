"""Whether a document of a memory is what is published under its name, or what became of it by
appends.
"""

import numpy as np

from memstore.disk.format.document import Document
from memstore.disk.format.text_parts import Passage, PassagePart, decode_part
from memstore.disk.tables.catalog import Catalog
from memstore.errors import CorruptMemory, ObjectNotFound
from memstore.share.format.document_pages import Entry
from memstore.share.format.read_pieces import read_values
from memstore.share.objects.object_store import ObjectStore


class Appended:
    """Compares documents of a memory with what is published; remembers what was found to be
    appended to.
    """

    def __init__(self, catalog: Catalog, objects: ObjectStore, *, damaged: bool) -> None:
        """damaged: what is damaged there, or away, is another document, and no error."""
        self._catalog, self._objects, self._damaged = catalog, objects, damaged
        self._found: dict[str, Entry] = {}

    def continues(self, document: Document, published: Entry) -> bool:
        """Is a document what is published under its name, or what became of it by appends?"""
        row = published.row
        if document.writes[: len(row.writes)] == row.writes:
            return True
        if document.appended_to < row.tokens:
            return False
        # An append takes the place of the last write, or of all, where that had no whole chunk.
        if self._found.get(row.name) == published:
            return True
        if row.of_passages != document.of_passages:
            return False
        begins = self._begins_passages if row.of_passages else self._begins_tokens
        try:
            same = begins(document, published)
        except (CorruptMemory, ObjectNotFound):
            if not self._damaged:
                raise
            return False
        if same:
            self._found[row.name] = published
        return same

    def _begins_tokens(self, document: Document, published: Entry) -> bool:
        """Does a document begin with what is published, token by token?"""
        there = b"".join(value[8:] for _, value in self._values(published))
        with self._catalog.database.read() as txn:
            parts = self._catalog.texts.token_parts(txn, document.id, 0, published.row.tokens)
            ids = b"".join(part.ids.astype("<u4").tobytes() for part in parts)
        return ids[: len(there)] == there

    def _begins_passages(self, document: Document, published: Entry) -> bool:
        """The same of passages, the last of which an append read again, with more behind it."""
        size = self._catalog.signature.block_size
        there: list[Passage] = []
        for number, value in self._values(published):
            there += self._decoded(published, number, value, size).passages
        here: list[Passage] = []
        with self._catalog.database.read() as txn:
            for part in self._catalog.texts.passage_parts(txn, document.id, 0, len(there)):
                here += part.passages
        if not there or len(here) < len(there):
            return not there
        *whole, (ids, lead, gap, start, _) = there
        same = all(
            old[1:] == new[1:] and np.array_equal(old.ids, new.ids) for old, new in zip(whole, here)
        )
        last = here[len(whole)]
        begins = (gap, start, ids[lead]) == (last.gap, last.start, last.ids[last.lead])
        return bool(same and begins)

    def _decoded(self, published: Entry, number: int, value: bytes, size: int) -> PassagePart:
        try:
            return decode_part(number, value, size)
        except ValueError as error:
            raise CorruptMemory(
                f"passages of {published.row.name!r}, published at {self._objects.url}, are "
                f"damaged ({error}); run memstore verify"
            ) from error

    def _values(self, published: Entry) -> list[tuple[int, bytes]]:
        """What is published of a document's tokens, part by part."""
        pieces = [piece for piece in published.pieces if piece.kind == "tokens"]
        return [(v.first, v.value) for piece in pieces for v in read_values(self._objects, piece)]
