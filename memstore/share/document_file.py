"""An exported document: its parts and contents (memstore.share.contents), as in an object of a
publication, and a manifest with this one document.

    magic "mRexport"
    the parts, then the contents
    the footer: the manifest
    bytes of the footer (u64), XXH3-64 of these 8 bytes, magic "mRexpend"
"""

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64_intdigest

from memstore.disk.files import NO_SPACE, check_outside_memories, replacement, storage_full
from memstore.errors import CorruptMemory, InvalidInput
from memstore.share.contents import DocumentWriter, Kind, Place, Segment, Stored, read_parts
from memstore.share.document_parts import Head, Part, usable_parts
from memstore.share.manifest import Manifest
from memstore.share.ranges import OBJECT_BYTES

_BEGIN, _END, _FOOTER = b"mRexport", b"mRexpend", b"mRfooter"
_TRAILER = struct.Struct("<QQ8s")  # bytes of the footer, checksum, magic


# Writing


def check_target(file: Path) -> None:
    """Refuse a target inside a memory's directory, and an existing file that is neither an export
    nor empty. Raises InvalidInput.
    """
    check_outside_memories(file)
    if not os.path.lexists(file):
        return
    if file.is_symlink() or not file.is_file():
        raise InvalidInput(f"{file} is a link, or no regular file; name another file")
    begin = b""
    with suppress(OSError), open(file, "rb") as source:
        begin = source.read(len(_BEGIN)) or _BEGIN
    if begin != _BEGIN:
        raise InvalidInput(
            f"{file} is not an exported document, and is unchanged; name another file, or remove it"
        )


def write_document(head: Head, parts: Iterable[Part], file: Path) -> int:
    """Write a document to a file as its parts arrive; return its bytes. An existing file is
    replaced at the end, and unchanged after an error.

    Raises InvalidInput (the file cannot be written), StorageFull, CorruptMemory (a part is damaged
    or missing), and what the parts raise.
    """
    try:
        with replacement(file) as out:
            out.write(_BEGIN)
            whole = Segment()  # the whole file

            def append(kind: Kind, data: bytes) -> Stored:
                offset = out.tell()
                out.write(data)
                return whole, offset, len(data)

            draft = DocumentWriter(append).write(head, parts)
            contents = draft.encode()
            place = Place("", out.tell(), len(contents), xxh3_64_intdigest(contents))
            out.write(contents)
            row = head.document
            entries = {row.name: draft.entry(place)}
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
    """An exported document, read by ranges like a publication."""

    def __init__(self, file: Path) -> None:
        """Read the footer. Raises InvalidInput (no export, truncated, damaged), NewerFormat,
        OlderFormat.
        """
        self.file, self.url = file, str(file)
        try:
            if file.exists() and not file.is_file():
                raise CorruptMemory("it is not a file")
            with self._opened() as source:
                begin = source.read(len(_BEGIN))
                self._size = os.fstat(source.fileno()).st_size
            if begin != _BEGIN:
                raise CorruptMemory("its header is wrong")
            end = self._size - _TRAILER.size
            size, _, _ = _TRAILER.unpack(self.get_range("", max(0, end), _TRAILER.size))
            if self.get_range("", end, _TRAILER.size) != _trailer(size):
                raise CorruptMemory("its trailer is wrong")
            if size > min(OBJECT_BYTES, end):
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
        """The document's parts, each checked. Raises InvalidInput, at the latest at the end, if
        they are not a complete document.
        """
        try:
            yield from usable_parts(self.head, read_parts(self, self._entry))
        except (ValueError, CorruptMemory) as error:
            raise self._damaged(error) from error

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
        what = str(getattr(error, "reason", error)).removeprefix(f"{self.url}: ")
        return InvalidInput(
            f"{self.file} is not a whole exported document ({what}); export it again, nothing was "
            "imported"
        )
