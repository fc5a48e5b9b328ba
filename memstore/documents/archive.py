"""The archive (zip) that a document is: its members are read one by one, never beyond bounds."""

import io
import zipfile
import zlib
from collections.abc import Iterable

from memstore.documents.converted import Limits
from memstore.errors import UnreadableDocument

_STEP = 1 << 20
_LONGEST = 1000  # characters of a member's name


class Archive:
    """The members of a zip by name. What its directory says of sizes is not believed."""

    def __init__(self, data: bytes, limits: Limits) -> None:
        """Raises UnreadableDocument for what is no whole zip, and for too many members."""
        self._limits, self._read = limits, 0
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError) as error:
            raise UnreadableDocument(f"is broken: {error}") from None
        if len(self._zip.infolist()) > limits.members:
            raise UnreadableDocument(f"has more than {limits.members:,} members")
        self.names = frozenset(self._zip.namelist())
        if any(len(name) > _LONGEST for name in self.names):  # links are followed from each
            raise UnreadableDocument(f"has members with names longer than {_LONGEST:,} characters")

    def member(self, name: str) -> bytes:
        """A member's bytes. Raises UnreadableDocument where it is missing, encrypted, damaged or
        larger than it may be.
        """
        limits = self._limits
        if name not in self.names:
            raise UnreadableDocument(f"is broken: it has no {name}")
        info = self._zip.getinfo(name)
        if info.flag_bits & 1:
            raise UnreadableDocument("is encrypted; save it without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UnreadableDocument(  # others make of few bytes any number at a time
                "is compressed in a way that documents are not; save it anew"
            )
        parts, size = [], 0
        try:
            with self._zip.open(name) as member:
                while part := member.read(_STEP):
                    size += len(part)
                    self._read += len(part)
                    if size > limits.member_bytes or self._read > limits.all_bytes:
                        raise UnreadableDocument(
                            f"holds more than {limits.member_bytes >> 20} MB in a member, or "
                            f"{limits.all_bytes >> 20} MB in all, when it is not compressed any "
                            "more, which is too much for a file of its size; split it"
                        )
                    parts.append(part)
        except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError) as error:
            raise UnreadableDocument(f"is broken: {name}: {error}") from None
        except RuntimeError:  # what zipfile says of a password
            raise UnreadableDocument("is encrypted; save it without a password") from None
        return b"".join(parts)

    def has_any(self, names: Iterable[str]) -> bool:
        """Is there a member of one of these names?"""
        return not self.names.isdisjoint(names)
