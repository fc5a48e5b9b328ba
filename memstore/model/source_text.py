"""A text to be read, checked before anything is written; and how far its ingest is."""

import codecs
import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memstore.disk.format.citations import Place, pack_places
from memstore.disk.format.document import LABELS, NOTES, SOURCE, Document
from memstore.documents import Converted, read
from memstore.documents.detect import Form, form_of
from memstore.errors import InvalidInput, MemoryLocked, ReadOnlyMemory, UnreadableDocument
from memstore.paths import expanded
from memstore.store.memory_store import MemoryStore

_PIECE = 1 << 20
_KEPT = 64 << 20  # bytes of a file that are kept in memory from its check to its reading


class Text:
    """A text from a file, a string, or a document that was converted.

    A file is read by `check`, which has to know the whole text before any of it is stored. A file
    that is no plain UTF-8 text is converted then, and its text kept. What is small is kept, too; a
    larger file of plain text is read once more by `pieces`, and refused if it is another one by
    then.
    """

    def __init__(
        self,
        content: Path | str | Converted,
        name: str | None = None,
        *,
        source: dict[str, Any] | None = None,
    ) -> None:
        """source: which file of a folder it is (memstore.documents.folder). Raises InvalidInput for
        a path that is no file to read, and for a string without a name.
        """
        self.kind, self.places, self.notes = "text", tuple[Place, ...](), tuple[str, ...]()
        if isinstance(content, Converted):
            content = self._take(content)
        if isinstance(content, str):
            if not name:
                raise InvalidInput("a text given as a string needs a name")
        else:
            content = expanded(content)
            if not content.exists():
                raise InvalidInput(f"{content} does not exist")
            if content.is_dir():
                raise InvalidInput(f"{content} is a directory; name the files in it")
        self.content = content
        self.source = source
        self.labels: dict[str, Any] | None = (
            None  # of its document; None: it has none, or keeps its
        )
        self.name = name or Path(content).name
        self.digest = ""  # BLAKE2 of the whole text, once it is checked
        self.characters = 0  # of the whole text, once it is checked
        self._kept: list[str] | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        """What the row of a document of it says, once it is checked: its kind, unless it is plain
        text, its places, what could not be read, its source and its labels.
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
        """Read it through, and keep what is small in memory; again it does nothing.

        Raises InvalidInput if there is nothing in it; UnreadableDocument for what is no text and
        cannot be converted.
        """
        if self.digest:
            return
        try:
            self._check()
        except _ToBeConverted:
            self.content = self._take(read(Path(self.content), str(self.content)))
            self._check()

    def _check(self) -> None:
        small = isinstance(self.content, Path) and self._size() <= _KEPT
        kept: list[str] | None = [] if small else None
        digest, characters, blank = _hash(), 0, True
        for piece in self._read():
            digest.update(_encoded(piece))
            characters += len(piece)
            blank = blank and not piece.strip()
            if kept is not None:
                kept.append(piece)
        if blank:
            where = self.content if isinstance(self.content, Path) else self.name
            raise InvalidInput(f"{where} is empty; there is nothing to read")
        self.digest, self.characters, self._kept = digest.hexdigest(), characters, kept

    def pieces(self) -> Iterator[str]:
        """The text piece by piece. Raises what `check` raises, and InvalidInput, at its end, if it
        is another text than was checked.
        """
        self.check()
        if self._kept is not None or isinstance(self.content, str):
            yield from self._kept or self._read()
            return
        digest = _hash()
        with suppress(_ToBeConverted):  # it is no text any more
            for piece in self._read():
                digest.update(_encoded(piece))
                yield piece
        if digest.hexdigest() != self.digest:
            raise InvalidInput(f"{self.content} was changed while it was read; read it again")

    def _size(self) -> int:
        try:
            return Path(self.content).stat().st_size
        except OSError as error:
            raise InvalidInput(f"cannot read {self.content}: {error.strerror}") from None

    def _read(self) -> Iterator[str]:
        if isinstance(self.content, str):
            for start in range(0, len(self.content), _PIECE):
                yield self.content[start : start + _PIECE]
            return
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        begun = False
        try:
            with self.content.open("rb") as file:
                while raw := file.read(_PIECE):
                    if b"\0" in raw or not (begun or self._form(raw, self.content) == "text"):
                        raise _ToBeConverted
                    yield decoder.decode(raw)
                    begun = True
                decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise _ToBeConverted from None
        except OSError as error:
            raise InvalidInput(f"cannot read {self.content}: {error.strerror}") from None

    @staticmethod
    def _form(raw: bytes, path: Path) -> Form:
        try:
            return form_of(raw, path.name)
        except UnreadableDocument as error:
            raise UnreadableDocument(f"{path} {error}") from None


class _ToBeConverted(Exception):
    """It is no plain UTF-8 text."""


def _hash() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=20)


def _encoded(piece: str) -> bytes:
    return piece.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class IngestProgress:
    """How far an ingest is: characters read of all, tokens committed or staged, where it went on
    from, and the seconds that it has been reading since.
    """

    characters: int
    total_characters: int
    tokens: int
    resumed_tokens: int
    seconds: float
    seconds_left: float  # at this speed

    @property
    def tokens_per_second(self) -> float:
        """How fast it reads."""
        return (self.tokens - self.resumed_tokens) / self.seconds


OnProgress = Callable[[IngestProgress], None]
Ingesting = Generator[IngestProgress, None, Document]
"""An ingest chunk by chunk: tells how far it is after each, and returns the finished document.
Closed before its end, it commits what it has, to be resumed.
"""


def described(store: MemoryStore, text: Text) -> Document:
    """The document that is there already; its row says what is known of it by now."""
    document = store.document(text.name)
    metadata = document.metadata | text.metadata
    if metadata == document.metadata:
        return document
    try:
        return store.describe(text.name, metadata)
    except (ReadOnlyMemory, MemoryLocked):
        if text.labels not in (None, document.labels):
            raise
        return document  # it can be asked as it is
