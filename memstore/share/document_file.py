"""One document in one file: its pieces (memstore.share.pieces), as segments of a publication hold
them, followed by the entry that tells where they are.

    magic "mRexport"
    the pieces, one after the other; their entry names no object, since all are in this file
    the footer, a manifest that names this document alone
    bytes of the footer (u64), XXH3-64 of these 8 bytes, magic "mRexpend"
"""

import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64_intdigest

from memstore.disk.files import NO_SPACE, check_outside_memories, replacement, storage_full
from memstore.errors import CorruptMemory, InvalidInput
from memstore.share.document_parts import Head, Part, usable_parts
from memstore.share.manifest import Manifest
from memstore.share.packed_objects import PACKED_BYTES
from memstore.share.piece_writer import PieceWriter
from memstore.share.pieces import Entry, Kind, read_parts

_BEGIN, _END, _FOOTER = b"mRexport", b"mRexpend", b"mRfooter"
_TRAILER = struct.Struct("<QQ8s")  # bytes of the footer, checksum, magic


# Writing


def check_target(file: Path) -> None:
    """Refuse to overwrite anything but an export or an empty file, and to write into a memory's
    directory. Raises InvalidInput.
    """
    check_outside_memories(file)
    try:
        if not stat.S_ISREG(os.lstat(file).st_mode):
            raise InvalidInput(f"{file} is a link, or no regular file; name another file")
        with open(file, "rb") as source:
            begin = source.read(len(_BEGIN)) or _BEGIN
    except PermissionError:
        begin = b""
    except OSError:  # nothing is there, or nothing can be: writing says what
        return
    if begin != _BEGIN:
        raise InvalidInput(
            f"{file} is no exported document, and is left as it is; name another file, or remove it"
        )


def write_document(head: Head, parts: Iterable[Part], file: Path) -> int:
    """Write a document to a new file as its parts come; return its bytes. A file that exists is
    replaced at the end, or stays as it is.

    Raises InvalidInput (the file cannot be written), StorageFull, CorruptMemory (a part is damaged
    or missing), and what the parts raise.
    """
    try:
        with replacement(file) as out:
            out.write(_BEGIN)

            def append(kind: Kind, chunks: Sequence[bytes]) -> tuple[str, int]:
                offset = out.tell()
                out.writelines(chunks)
                return "", offset

            row = head.document
            entry = Entry.of(row, PieceWriter(append).write(head, parts))
            entries = {row.name: entry}
            footer = Manifest(head.signature, row.codec, row.created, head.selector, entries)
            packed = footer.encode(_FOOTER)
            out.write(packed + _trailer(len(packed)))
    except OSError as error:
        if error.errno in NO_SPACE:
            raise storage_full(file, error.strerror) from error
        raise InvalidInput(
            f"{file} could not be written ({error.strerror}); name another file"
        ) from error
    return file.stat().st_size


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
            if begin != _BEGIN:
                raise CorruptMemory("it does not begin like one")
            end = self._size - _TRAILER.size
            size, _, _ = _TRAILER.unpack(self.get_range("", max(0, end), _TRAILER.size))
            if self.get_range("", end, _TRAILER.size) != _trailer(size):
                raise CorruptMemory("it does not end like one")
            if size > min(PACKED_BYTES, end):
                raise CorruptMemory("its footer is too large")
            packed = self.get_range("", end - size, size)
            footer = Manifest.decode(packed, f"{file}: its footer", _FOOTER)
            (self._entry,) = footer.entries.values()
            if footer.segments - {""}:
                raise CorruptMemory("its parts are in other files")
            self.head = Head(footer.signature, self._entry.row, footer.selector)
        except (ValueError, CorruptMemory) as error:
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
