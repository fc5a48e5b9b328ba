"""The named errors of this package. Every error that a user can meet is a MemstoreError, whose
message says in one line what to do.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path


def install_extra(extra: str) -> str:
    """The command that installs an extra of pyproject.toml, from a clone: the package index's
    `memstore` is another project.
    """
    return f"pip install '.[{extra}]' in a clone of memstore"


class MemstoreError(Exception):
    """Base of every error this package raises on purpose."""

    @property
    def reason(self) -> str:
        """The message without advice: what follows a semicolon, unless in a name or parentheses."""
        return re.sub(r"; [^;')]*$", "", str(self))


class InvalidInput(MemstoreError):
    """A file or an argument that cannot be used as given."""


class UnreadableDocument(InvalidInput):
    """A file that cannot be turned into text; the message names it and says why."""


class InvalidConfig(MemstoreError):
    """A model or training configuration that contradicts itself."""


class InvalidWeights(MemstoreError):
    """Weights that are truncated, unreadable or of another architecture."""


class MemoryNotFound(MemstoreError):
    """The directory holds no memory."""

    @classmethod
    def of(cls, path: Path) -> "MemoryNotFound":
        """The error for a directory without a memory."""
        where = path if path.is_absolute() or path.parts[:1] == ("..",) else f"./{path}"
        return cls(f"{where} holds no memory; make one: memstore ingest FILE")


class MemoryExists(MemstoreError):
    """The directory already holds a memory."""


class MemoryClosed(MemstoreError):
    """The memory was closed, or was opened by the parent of this forked process."""


class MemoryLocked(MemstoreError):
    """Another process has a lock that this operation needs."""


class ReadOnlyMemory(MemstoreError):
    """The memory, its directory or its file system does not allow writing."""


class WrongModel(MemstoreError):
    """The memory was written by another model, or with another selector; `differences` names the
    fields in which their signatures differ.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = list(differences)


class NewerFormat(MemstoreError):
    """The memory was written by a newer version of this package."""


class OlderFormat(MemstoreError):
    """The memory was written by an older version of this package; this one cannot read it."""


class DocumentNotFound(MemstoreError):
    """No document has this name or id, or it was removed concurrently."""


class DocumentExists(MemstoreError):
    """The document's name is in use for other content."""

    @classmethod
    def published(cls, name: str, url: str) -> "DocumentExists":
        """For a document whose name is published with other content."""
        return cls(
            f"document {name!r} is published at {url} with other content; give --replace to put "
            "this in its place, or publish it under another name"
        )


# what to do where no repair can help
RESTORE = "import an export, pull a publication or ingest the documents again, into a new directory"


class CorruptMemory(MemstoreError):
    """A part of the memory differs from what was written."""


class CorruptBlock(CorruptMemory):
    """A record is missing, truncated, altered, or another block's; the message names its key."""


class MissingBlock(CorruptBlock):
    """A record does not exist."""


class StaleMemory(CorruptMemory):
    """A published memory is older than one that was read before, or than the one requested."""


class StorageFull(MemstoreError):
    """The disk, or the address space, has no room for the data to write."""


class StoreUnavailable(MemstoreError):
    """An object store or cache server is unreachable, refuses requests, or did not answer in time;
    cached data still answer.
    """


class ObjectNotFound(StoreUnavailable):
    """An object that a published memory names is not in its object store."""


class BlocksUnavailable(StoreUnavailable):
    """Some blocks of one read are unavailable; `units` (each a BlockKey) lists them."""

    def __init__(self, message: str, units: Collection[tuple[int, int, int, int]]) -> None:
        super().__init__(message)
        self.units = frozenset(units)


class BudgetExceeded(MemstoreError):
    """A tier's byte budget is too small for one step; `fits` is the number of units that fit."""

    def __init__(self, message: str, fits: int = 0) -> None:
        super().__init__(message)
        self.fits = fits
