"""What one of many readers is given and tells: documents by their bytes, how they are to be read,
and what came of each. Imports no model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol

from memstore.compute import Compute
from memstore.disk.format.text_parts import Keep
from memstore.errors import MemstoreError
from memstore.share.format.manifest import Manifest

Status = Literal["read", "there", "refused"]


class Given(NamedTuple):
    """A document to be read."""

    name: str
    path: str  # what its file is called in errors
    data: bytes
    known: tuple[str, ...]  # digests of texts of it that need not be read
    taken: str | None = None  # the digest of the text that is published by its name


Batch = Sequence[Given]


class Told(NamedTuple):
    """What came of a document."""

    name: str
    status: Status
    size: int  # bytes of its file
    digest: str = ""  # of its text
    passages: int = 0  # that were read; blocks, of a landmark model
    tokens: int = 0  # that were read
    error: tuple[str, str] | None = None  # the name of an error, and why it is refused

    @classmethod
    def refused(cls, given: Given, error: MemstoreError) -> "Told":
        """That of one that cannot be read."""
        return cls(given.name, "refused", len(given.data), error=(type(error).__name__, str(error)))


class Done(NamedTuple):
    """What came of a batch."""

    documents: list[Told]
    staged: str | None = None  # the object that names what was sent of them


@dataclass(frozen=True)
class Job:
    """How documents are read, and where they go."""

    url: str
    model: str
    compute: Compute
    codec: str | None = None  # of a new memory; None for the model's
    keep: Keep = "kv"
    replace: bool = False
    lookup: tuple[tuple[str, Any], ...] = ()  # settings of ModelAPI.ingest

    def key(self, batch: Batch) -> str:
        """Names a batch that is read so."""
        digest = blake2b(repr((self.model, self.codec, self.keep, self.lookup)).encode())
        for one in batch:
            data = blake2b(one.data, digest_size=20).hexdigest()
            digest.update(repr((one.name, data)).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:40]


class Engine(Protocol):
    """What has batches read by as many readers as there are."""

    @property
    def workers(self) -> int:
        """How many read now."""

    def describe(self, job: Job) -> Manifest:
        """As memstore.library.reading.describe, by one of them."""

    def read(self, job: Job, batches: Iterable[Batch]) -> Iterator[Done]:
        """As memstore.library.reading.read_batch, by all of them, in any order. Takes batches as
        there are readers for them. A document whose readers were ended again and again is refused.
        """
