"""What can go wrong, by name: every error a user can meet is a MemstoreError and says in one line
what to do.
"""

from collections.abc import Collection, Sequence
from pathlib import Path


def install_extra(extra: str) -> str:
    """The command that brings what `extra` of pyproject.toml lists. It names the clone: the package
    index's `memstore` is somebody else's.
    """
    return f"pip install '.[{extra}]' in a clone of memstore"


class MemstoreError(Exception):
    """Base of every error this package raises on purpose."""


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
        """The error of a directory in which there is none."""
        where = path if path.is_absolute() else f"./{path}"
        return cls(f"{where} holds no memory; make one: memstore ingest FILE")


class MemoryExists(MemstoreError):
    """The directory already holds a memory."""


class MemoryClosed(MemstoreError):
    """The memory was closed, or was opened by the parent of this forked process."""


class MemoryLocked(MemstoreError):
    """Another process holds what this operation needs for itself."""


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
    """What was written by an older version of this package, which this one does not read."""


class DocumentNotFound(MemstoreError):
    """No document of this name or id, or it was forgotten in the meantime."""


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
    """A part of the memory does not read back as it was written."""


class CorruptBlock(CorruptMemory):
    """A record is missing, truncated, altered, or another block's; the message names its key."""


class MissingBlock(CorruptBlock):
    """There is no such record."""


class StaleMemory(CorruptMemory):
    """A published memory is older than what was read of it before, or than was asked for."""


class StorageFull(MemstoreError):
    """The disk, or the address space, has no room for what was to be written."""


class StoreUnavailable(MemstoreError):
    """An object store or a cache server is away, refuses, or did not answer in time; what is cached
    here still answers.
    """


class ObjectNotFound(StoreUnavailable):
    """An object that a published memory names is not in its object store."""


class BlocksUnavailable(StoreUnavailable):
    """Some of the blocks of one read could not be had; `units` (each a BlockKey) are those."""

    def __init__(self, message: str, units: Collection[tuple[int, int, int, int]]) -> None:
        super().__init__(message)
        self.units = frozenset(units)


class BudgetExceeded(MemstoreError):
    """A tier's byte budget is too small for what one step needs at once; `fits` is how many units
    would have fitted.
    """

    def __init__(self, message: str, fits: int = 0) -> None:
        super().__init__(message)
        self.fits = fits
