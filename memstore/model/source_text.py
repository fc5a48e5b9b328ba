"""A text to ingest, checked before anything is written; and its ingest."""

import hashlib
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memstore.disk.format.document import (
    LABELS,
    NOTES,
    SOURCE,
    Document,
    IngestSettings,
    Place,
    pack_places,
)
from memstore.documents import Converted, plain_text, read
from memstore.errors import InvalidInput, MemoryLocked, ReadOnlyMemory
from memstore.freed_memory import return_freed_memory
from memstore.paths import expanded
from memstore.store.committed import Mode
from memstore.store.memory_store import MemoryStore
from memstore.store.writer import DocumentWriter

_FREED_EVERY = 2048  # tokens of an ingest after which freed memory goes back to the system


class Text:
    """A text from a file, a string, or a converted document.

    `check` reads the whole file before any of it is stored, and converts it unless it is plain
    UTF-8 text.
    """

    def __init__(
        self,
        content: Path | str | Converted,
        name: str | None = None,
        *,
        source: dict[str, Any] | None = None,
    ) -> None:
        """source: which file of a folder it is (memstore.documents.folder). Raises InvalidInput for
        a path that is not a readable file, and for a string without a name.
        """
        self.kind, self.places, self.notes = "text", tuple[Place, ...](), tuple[str, ...]()
        self.content = ""  # the text, once it is checked
        if isinstance(content, Converted):
            content = self._take(content)
        if isinstance(content, str):
            if not name:
                raise InvalidInput("a text given as a string needs a name")
        else:
            content = expanded(content)
            if not content.exists():
                raise InvalidInput(f"{content} does not exist; check the path")
            if content.is_dir():
                raise InvalidInput(f"{content} is a directory; name the files in it")
        self._given, self.source = content, source
        # of its document; None: it has none, or keeps its
        self.labels: dict[str, Any] | None = None
        self.name = name or Path(content).name
        self.digest = ""  # BLAKE2 of the text, once it is checked

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata to store with the document; complete only after `check`.

        kind (unless plain text), places, notes on what could not be read, source and labels.
        """
        kind = {} if self.kind == "text" else {"kind": self.kind}
        notes = {NOTES: list(self.notes)} if self.notes else {}
        source = {} if self.source is None else {SOURCE: self.source}
        labels = {} if self.labels is None else {LABELS: dict(self.labels)}
        return kind | pack_places(self.places) | notes | source | labels

    def _take(self, converted: Converted) -> str:
        self.kind, self.places, self.notes = converted.kind, converted.places, converted.notes
        return converted.text

    def check(self) -> None:
        """Read the whole text; idempotent.

        Raises InvalidInput for an empty text; UnreadableDocument for a file that is not text and
        cannot be converted.
        """
        if self.digest:
            return
        if isinstance(self._given, Path):
            where, text = str(self._given), self._read(self._given)
        else:
            where, text = self.name, self._given
        if not text.strip():
            raise InvalidInput(f"{where} is empty; there is nothing to read")
        data = text.encode("utf-8", "surrogatepass")
        self.content, self.digest = text, hashlib.blake2b(data, digest_size=20).hexdigest()

    def _read(self, path: Path) -> str:
        """The text of a file."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}") from None
        text = plain_text(data, path.name)
        return self._take(read(data, str(path))) if text is None else text


@dataclass(frozen=True)
class IngestProgress:
    """Progress of an ingest: characters done and in all, tokens committed or staged, tokens from
    which it resumed, and seconds since then.
    """

    characters: int
    total_characters: int
    tokens: int
    resumed_tokens: int
    seconds: float
    seconds_left: float  # at this speed

    @property
    def tokens_per_second(self) -> float:
        """Tokens ingested a second, since the ingest began or resumed."""
        return (self.tokens - self.resumed_tokens) / self.seconds


OnProgress = Callable[[IngestProgress], None]
Ingesting = Generator[IngestProgress, None, Document]
"""An ingest that yields its progress after each chunk, and returns the finished document. If it is
closed early, it commits what it has, and can be resumed.
"""


def ingest(
    store: MemoryStore,
    text: Text,
    settings: IngestSettings,
    mode: Mode,
    read: Callable[[DocumentWriter], Iterator[tuple[int, int]]],
) -> Ingesting:
    """Ingest a text under text.name; return the finished document. read: writes the chunks from the
    writer's position on, and yields the characters before and after each.

    A document with the same content is returned unchanged; an interrupted ingest resumes. A
    replaced document keeps its labels unless the text has others. Raises InvalidInput for a text
    that cannot be read, StorageFull.
    """
    text.check()
    metadata = text.metadata
    if text.labels is None and store.has(text.name) and (kept := store.document(text.name).labels):
        metadata[LABELS] = kept
    writer = store.write_document(
        text.name, source_hash=text.digest, settings=settings, mode=mode, metadata=metadata
    )
    if writer is None:
        return _described(store, text)
    with closing(writer):
        # the white space at the end of a text belongs to no passage
        began, resumed, total = time.perf_counter(), writer.tokens, len(text.content.rstrip())
        first: int | None = None
        freed = writer.tokens
        for before, done in read(writer):
            first, done = before if first is None else first, min(done, total)
            seconds = time.perf_counter() - began
            left = seconds * (total - done) / max(1, done - first)
            if writer.tokens - freed >= _FREED_EVERY:
                return_freed_memory()
                freed = writer.tokens
            yield IngestProgress(done, total, writer.tokens, resumed, seconds, left)
        return writer.finish()


def _described(store: MemoryStore, text: Text) -> Document:
    """The stored document of the same content, after its metadata are brought up to date."""
    document = store.document(text.name)
    try:
        return store.describe(text.name, document.metadata | text.metadata)
    except (ReadOnlyMemory, MemoryLocked):
        if text.labels not in (None, document.labels):
            raise
        return document  # it can be asked as it is
