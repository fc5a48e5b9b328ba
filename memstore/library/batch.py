"""The request and the reply of a worker that ingests a batch of a library's documents, and the
progress of all workers. Imports no model.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from memstore.compute import Compute
from memstore.disk.format.text_parts import Keep
from memstore.errors import MemstoreError
from memstore.share.upload import Sent

Status = Literal["read", "there", "refused"]


class Given(NamedTuple):
    """A document to ingest."""

    name: str
    path: str  # of its file, for errors
    data: bytes
    there: str | None = None  # digest of the text that is published under its name
    as_wanted: bool = False  # is that kept as this ingest keeps texts?


Batch = Sequence[Given]


class Outcome(NamedTuple):
    """The outcome for a document."""

    name: str
    status: Status
    size: int  # bytes of its file
    passages: int = 0  # that were ingested; blocks, of a landmark model
    tokens: int = 0  # that were ingested
    error: tuple[str, str] | None = None  # the name of an error, and its message
    notes: tuple[str, ...] = ()  # what of its file was not read

    @classmethod
    def refused(cls, given: Given, error: MemstoreError) -> "Outcome":
        """The outcome for a document that cannot be ingested."""
        return cls(given.name, "refused", len(given.data), error=(type(error).__name__, str(error)))


class Done(NamedTuple):
    """The outcome for a batch."""

    documents: list[Outcome]
    sent: Sent | None = None  # what was uploaded of them


@dataclass(frozen=True)
class Job:
    """How documents are ingested, and where they are published."""

    url: str
    model: str
    compute: Compute
    codec: str | None = None  # of a new memory; None for the model's
    keep: Keep | None = None  # None: as the model does by itself
    replace: bool = False


@dataclass
class Progress:
    """The progress of all workers."""

    files: int
    bytes: int  # of all files
    done: int = 0  # bytes of files that are done
    documents: Counter[Status] = field(default_factory=Counter)
    passages: int = 0
    tokens: int = 0  # that were ingested now
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.began

    @property
    def tokens_per_second(self) -> float:
        """Of all workers together."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Estimated from the speed so far."""
        return self.seconds * (self.bytes - self.done) / max(1, self.done)

    def add(self, outcome: Outcome) -> None:
        """Count a document that is done."""
        self.done += outcome.size
        self.documents[outcome.status] += 1
        self.passages += outcome.passages
        self.tokens += outcome.tokens
