"""One document in one file: its pieces (memstore.share.pieces), as segments of a publication hold
them, followed by the entry that tells where they are.

    magic "mRexport"
    the pieces, one after the other; their entry names no object, since all are in this file
    the footer, an object of memstore.share.packed_objects: signature, selector, and the entry
    bytes of the footer (u64), XXH3-64 of these 8 bytes, magic "mRexpend"
"""

import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from xxhash import xxh3_64_intdigest

from memstore.disk.files import NO_SPACE, check_outside_memories, replacement, storage_full
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.errors import CorruptMemory, InvalidConfig, InvalidInput, OlderFormat
from memstore.share.document_parts import Head, Part, usable_parts
from memstore.share.entries import Entries, Entry, entries_of, plain_entries
from memstore.share.packed_objects import PACKED_BYTES, open_packed, pack
from memstore.share.piece_writer import PieceWriter
from memstore.share.pieces import Kind, read_parts

_BEGIN, _END, _FOOTER = b"mRexport", b"mRexpend", b"mRfooter"
_TRAILER = struct.Struct("<QQ8s")  # bytes of the footer, checksum, magic
_OLDER = b"\x93\xa4head"  # how exports of earlier versions begin
_RUN_BYTES = 16 << 20  # of records that are held in main memory


class _Footer(msgspec.Struct, forbid_unknown_fields=True):
    signature: dict[str, Any]
    selector: dict[str, Any] | None
    document: Entries  # one


# Writing


def check_target(file: Path) -> None:
    """Refuse to overwrite anything but an export or an empty file, and to write into a memory's
    directory. Raises InvalidInput.
    """
    check_outside_memories(file)
    try:
        status = os.lstat(file)
    except OSError:  # nothing is there, or nothing can be: writing says what
        return
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(f"{file} is a link, or no regular file; name another file")
    if status.st_size and not _begins_like_one(file):
        raise InvalidInput(
            f"{file} is no exported document, and is left as it is; name another file, or remove it"
        )


def _begins_like_one(file: Path) -> bool:
    """Was it written as an export, complete or not, of this format or of an older one?"""
    try:
        with open(file, "rb") as source:
            return source.read(len(_BEGIN)).startswith((_BEGIN, _OLDER))
    except OSError:
        return False


def write_document(head: Head, parts: Iterable[Part], file: Path) -> int:
    """Write a document to a new file as its parts come; return its bytes. A file that exists is
    replaced at the end, or stays as it is.

    Raises InvalidInput (the file cannot be written), StorageFull, CorruptMemory (a part is damaged
    or missing), and what the parts raise.
    """
    try:
        with replacement(file) as out:
            if file.is_file():  # as private as the file that it replaces
                os.fchmod(out.fileno(), file.stat().st_mode & 0o777)
            pieces = PieceWriter(_Appended(out)).write(head, parts)
            selector = None if head.selector is None else head.selector.to_dict()
            footer = {
                "signature": head.signature.to_dict(),
                "selector": selector,
                "document": plain_entries([Entry.of(head.document, pieces)]),
            }
            packed = pack(_FOOTER, footer)
            out.write(packed + _trailer(len(packed)))
    except OSError as error:
        if error.errno in NO_SPACE:
            raise storage_full(file, error.strerror) from error
        raise InvalidInput(
            f"{file} could not be written ({error.strerror}); name another file"
        ) from error
    return file.stat().st_size


class _Appended:
    """A file as the Target of a PieceWriter."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._size = out, 0
        self.append("tokens", [_BEGIN])

    def size(self, kind: Kind) -> int:
        """See Target."""
        return self._size

    def room(self, kind: Kind) -> int:
        """See Target."""
        return _RUN_BYTES

    def append(self, kind: Kind, chunks: Sequence[bytes]) -> tuple[str, int]:
        """See Target."""
        offset = self._size
        for chunk in chunks:
            self._out.write(chunk)
            self._size += len(chunk)
        return "", offset


def _trailer(size: int) -> bytes:
    return _TRAILER.pack(size, xxh3_64_intdigest(size.to_bytes(8, "little")), _END)


# Reading


class DocumentFile:
    """An exported document; its pieces are read by ranges, as those of a publication."""

    def __init__(self, file: Path) -> None:
        """Read the footer. Raises InvalidInput (no export, truncated, damaged), NewerFormat,
        OlderFormat.
        """
        self.file, self.url = file, str(file)
        try:
            if file.exists() and not file.is_file():
                raise CorruptMemory("it is no file")
            with self._opened() as source:
                begin = source.read(len(_BEGIN))
                self._size = os.fstat(source.fileno()).st_size
            if begin.startswith(_OLDER):
                raise OlderFormat(
                    f"{file} was exported by an older version; ingest the document again, and "
                    "export it again"
                )
            if begin != _BEGIN:
                raise CorruptMemory("it does not begin like one")
            end = self._size - _TRAILER.size
            size, _, _ = _TRAILER.unpack(self.get_range("", max(0, end), _TRAILER.size))
            if self.get_range("", end, _TRAILER.size) != _trailer(size):
                raise CorruptMemory("it does not end like one")
            if size > min(PACKED_BYTES, end):
                raise CorruptMemory("its footer is too large")
            packed = self.get_range("", end - size, size)
            footer = open_packed(_FOOTER, packed, _Footer, f"{file}: its footer")
            (self._entry,) = entries_of(footer.document)
            if {piece.segment for piece in self._entry.pieces} - {""}:
                raise CorruptMemory("its parts are in other files")
            spec = None if footer.selector is None else IndexSpec.decode(footer.selector)
            self.head = Head(Signature.from_dict(footer.signature), self._entry.row, spec)
        except (ValueError, IndexError, CorruptMemory, InvalidConfig) as error:
            raise self._damaged(error) from error

    def parts(self) -> Iterator[Part]:
        """The document's parts, each checked. Raises InvalidInput, at the latest at the end, where
        a memory could not use all of them.
        """
        row, pieces = self._entry
        try:
            yield from usable_parts(self.head, read_parts(self, self.head.signature, row, pieces))
        except (ValueError, CorruptMemory) as error:
            raise self._damaged(error) from error

    def check(self) -> None:
        """Read all of it. Raises InvalidInput."""
        for _ in self.parts():
            pass

    def get_range(self, name: str, offset: int, length: int) -> memoryview:
        """Bytes of the file, of exactly this length. Raises CorruptMemory, InvalidInput."""
        if offset + length > self._size:
            raise CorruptMemory("it is truncated")
        with self._opened() as source:
            data = os.pread(source.fileno(), length, offset)
        if len(data) != length:
            raise CorruptMemory("it is truncated")
        return memoryview(data)

    def _opened(self) -> BinaryIO:
        try:
            return open(self.file, "rb", buffering=0)
        except OSError as error:
            raise InvalidInput(
                f"{self.file} cannot be read ({error.strerror}); name a file that `memstore export`"
                " wrote"
            ) from error

    def _damaged(self, error: Exception) -> InvalidInput:
        what = str(error).partition(";")[0].removeprefix(f"{self.url}: ")
        return InvalidInput(
            f"{self.file} is no whole exported document ({what}); export it again, nothing was "
            "imported"
        )
