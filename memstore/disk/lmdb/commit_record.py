"""What every commit records of itself, so that one that is undone is noticed."""

import struct
from typing import NamedTuple

from memstore.disk.lmdb.transaction import digest

TABLE, KEY = "meta", b"commit"  # where the record lies
_FORM = struct.Struct("<Qd")


class Commit(NamedTuple):
    """A commit that was made."""

    transaction: int  # its number
    time: float  # seconds since 1970

    def pack(self) -> bytes:
        """Its record, with the checksum."""
        value = _FORM.pack(*self)
        return digest(TABLE, KEY, value) + value

    @classmethod
    def unpack(cls, record: bytes | memoryview) -> "Commit | None":
        """The inverse; None for a record that is damaged."""
        value = bytes(record[8:])
        if len(value) != _FORM.size or digest(TABLE, KEY, value) != record[:8]:
            return None
        return cls(*_FORM.unpack(value))
