"""Pieces of published documents as a reader has them: from the local cache or from afar, each
checked, and those that are asked for again and again held in main memory.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from memstore.block import RecordKey
from memstore.errors import CorruptMemory, DocumentNotFound, StoreUnavailable
from memstore.share.caches.local_cache import LocalCache
from memstore.share.calls.failures import Failure
from memstore.share.format.document_pages import Entry
from memstore.share.format.pieces import Piece, RecordIndex, Value, piece_of, row_of
from memstore.share.format.read_pieces import Extent, check_piece, index_of, values_of
from memstore.share.read.remote import Remote, as_failure

_INDEXES, _TOKENS = 4096, 64  # indexes of records, and pieces of tokens, that are held


class HeldPieces:
    """The pieces of an object store that were asked for last. May be used by several threads."""

    def __init__(self, remote: Remote, local: LocalCache | None) -> None:
        self._remote, self._local = remote, local
        self._lock = threading.Lock()
        self._indexes: OrderedDict[tuple[str, int], RecordIndex] = OrderedDict()
        self._tokens: OrderedDict[Piece, list[Value]] = OrderedDict()

    def values(self, pieces: Sequence[Piece]) -> list[list[Value]]:
        """The values of pieces, all that are missing read at the same time. Raises CorruptMemory,
        StoreUnavailable.
        """
        held: dict[Piece, list[Value]] = {}
        with self._lock:
            for piece in pieces:
                if piece in self._tokens:
                    held[piece] = self._tokens[piece]
                    self._tokens.move_to_end(piece)
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in held]
        for piece, data in zip(missing, self._data(missing, self._remote.until())):
            held[piece] = values_of(self._remote.objects, piece, data)
        with self._lock:
            for piece in missing:
                if piece.kind == "tokens":
                    self._tokens[piece] = held[piece]
            while len(self._tokens) > _TOKENS:
                self._tokens.popitem(last=False)
        return [held[piece] for piece in pieces]

    def _data(self, pieces: Sequence[Piece], until: float) -> list[bytes | memoryview]:
        """The bytes of pieces, checked, all that are missing read at the same time."""
        found: list[bytes | memoryview | None] = [None] * len(pieces)
        objects = self._remote.objects
        names = [_piece_name(objects.identity, piece) for piece in pieces]
        if self._local is not None:
            for at, kept in enumerate(
                self._local.get_many(names, [piece.length for piece in pieces])
            ):
                if isinstance(kept, bytes):
                    try:
                        check_piece(objects, pieces[at], kept)
                        found[at] = kept
                    except CorruptMemory:
                        self._local.drop(names[at])
        missing = [at for at, data in enumerate(found) if data is None]
        needed = [pieces[at] for at in missing]

        def check(number: int, data: memoryview) -> None:
            try:
                check_piece(objects, needed[number], data)
            except CorruptMemory as error:
                raise Failure("damaged", str(error)) from error

        extents = [Extent(piece.segment, piece.offset, piece.length) for piece in needed]
        answers = self._remote.read(extents, check, until)
        for at, answer in zip(missing, answers):
            if isinstance(answer, Failure):
                if answer.reason == "damaged":
                    raise CorruptMemory(str(answer))
                raise self._remote.error(answer) from answer
            found[at] = answer
        if self._local is not None and missing:
            with suppress(Failure):  # it is read again
                self._local.put([(names[at], bytes(found[at] or b"")) for at in missing])
        return [data for data in found if data is not None]

    def find(
        self, entries: Mapping[int, Entry], wanted: Sequence[tuple[int, RecordKey]], until: float
    ) -> list[Extent | Failure | None]:
        """Where the records of documents lie; None for one that its document has not, a Failure for
        one whose extent could not be read. Raises DocumentNotFound, CorruptMemory.
        """
        pieces = [self._piece(entries, document, key.block) for document, key in wanted]
        needed = {
            (piece.segment, piece.offset): (entries[document], piece)
            for (document, _), piece in zip(wanted, pieces)
            if piece is not None
        }
        indexes = self._indexes_of(needed, until)
        places: list[Extent | Failure | None] = []
        for (_, key), piece in zip(wanted, pieces):
            if piece is None:
                places.append(None)
                continue
            index = indexes[piece.segment, piece.offset]
            if isinstance(index, Failure):
                places.append(index)
                continue
            extent = index.find(key.layer, row_of(piece, key.block))
            places.append(None if extent is None else Extent(piece.segment, *extent))
        return places

    def _piece(self, entries: Mapping[int, Entry], document: int, block: int) -> Piece | None:
        """The piece that holds a document's records of a block."""
        if document not in entries:
            raise DocumentNotFound(
                f"document {document} is not in {self._remote.objects.url}: it was unpublished"
            )
        return piece_of(entries[document].pieces, block)

    def _indexes_of(
        self, wanted: Mapping[tuple[str, int], tuple[Entry, Piece]], until: float
    ) -> dict[tuple[str, int], RecordIndex | Failure]:
        """Indexes of records by segment and offset, each a piece of a document."""
        indexes: dict[tuple[str, int], RecordIndex | Failure] = {}
        with self._lock:
            for which in wanted:
                if which in self._indexes:
                    self._indexes.move_to_end(which)
                    indexes[which] = self._indexes[which]
        missing = [which for which in wanted if which not in indexes]
        try:
            parts = self._data([wanted[which][1] for which in missing], until)
            for which, data in zip(missing, parts):
                index = index_of(self._remote.objects, *wanted[which], data)
                indexes[which] = index
                with self._lock:
                    self._indexes[which] = index
                    while len(self._indexes) > _INDEXES:
                        self._indexes.popitem(last=False)
        except (StoreUnavailable, CorruptMemory) as error:
            # of several it is told of all: who can do without one asks for one after the other
            if isinstance(error, StoreUnavailable):
                failure = as_failure(error)
            else:
                failure = Failure("damaged", str(error))
            indexes |= {which: failure for which in missing if which not in indexes}
        return indexes


def _piece_name(identity: str, piece: Piece) -> str:
    return f"{identity}:{piece.segment}:{piece.offset}:{piece.length}:{piece.digest:x}"
