"""Reading files into a memory one after the other: unchanged files are skipped, unreadable ones are
reported, and documents of deleted files are forgotten.
"""

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from memstore.cli import console
from memstore.errors import DocumentExists, InvalidInput

if TYPE_CHECKING:
    from memstore.disk.format.document import Document
    from memstore.disk.format.text_parts import Keep
    from memstore.documents.folder import File, Files, Source
    from memstore.model.model_api import ModelAPI
    from memstore.model.source_text import IngestProgress, Text
    from memstore.store.memory_store import MemoryStore
    from memstore.store.write.admission import Mode

_OWN = (InvalidInput, DocumentExists)  # errors of one file, after which the others are read


def text_of(file: "File", source: "Source | None" = None) -> "Text":
    """The text of a file. Raises InvalidInput."""
    from memstore.documents import read
    from memstore.documents.converted import LIMITS
    from memstore.documents.folder import STDIN
    from memstore.model.source_text import Text

    if str(file.path) == STDIN and file.folder is None:
        data = sys.stdin.buffer.read(LIMITS.file_bytes + 1)
        return Text(read(data, "standard input"), file.name)
    return Text(file.path, file.name, source=None if source is None else source.to_dict())


def checked(text: "Text", which: str = "") -> "Text":
    """A text that can be read, with a sign of life while it is converted. Raises InvalidInput."""
    with console.waiting(f"{which}looking at {console.one_line(text.name)}"):
        text.check()
    return text


class FileIngest:
    """Reads files into an open memory."""

    def __init__(
        self,
        model: "ModelAPI",
        memory: "MemoryStore",
        mode: "Mode",
        keep: "Keep | None",
        *,
        labels: dict[str, Any] | None,
        quiet: bool,
    ) -> None:
        """keep: of ModelAPI.ingest. labels: of the documents; None leaves those that they have.
        quiet: print no results.
        """
        self.failed: list[dict[str, Any]] = []
        self._model, self._memory, self._mode = model, memory, mode
        self._keep, self._labels, self._quiet = keep, labels, quiet
        self._results: list[dict[str, Any]] = []
        self._forgotten: list[Document] = []

    def read(self, found: "Files", first: "Text | None" = None) -> None:
        """Read the files; first: the checked text of the only file, whose errors are raised."""
        self.failed += map(console.report, found.refused)
        if first is not None:
            self._ingest(first, self._mode)
            return
        many = len(found.files) if found.folders else 0
        for number, file in enumerate(found.files, 1):
            try:
                self._read_file(file, f"[{number:,} of {many:,}] " if many else "")
            except _OWN as error:
                self.failed.append(console.report(error))

    def forget_lost(self, found: "Files") -> None:
        """Forget the documents of folders whose files are gone, but none of a folder without any
        file.
        """
        from memstore.documents.folder import Source

        for folder in found.folders:
            from_here = [
                (document, source)
                for document in self._memory.documents()
                if (source := Source.of(document)) is not None and source.folder == folder.digest
            ]
            lost = [document for document, source in from_here if folder.has_lost(source)]
            if lost and not any(file.folder == folder for file in found.files):
                error = InvalidInput(
                    f"no file was found in {folder.path}; nothing of it is forgotten: is it the "
                    "right folder, or pattern? `memstore rm` takes names"
                )
                self.failed.append(console.report(error))
                continue
            for document in lost:
                self._memory.forget(document.name)
                self._forgotten.append(document)
                if not self._quiet:
                    console.say(f"{console.one_line(document.name)}: forgotten, its file is gone")

    def build_index(self) -> None:
        """Build the index again if it lacks much of what was read."""
        if self._memory.update_index():
            unit = "layers" if self._model.keeps is None else "tokens"
            with console.working("index", unit) as show:
                self._model.build_index(self._memory, show)

    def to_dict(self) -> dict[str, Any]:
        """The results of all files, as plain values."""
        forgotten = {"forgotten": [document.name for document in self._forgotten]}
        return {
            "documents": self._results,
            **(forgotten if self._forgotten else {}),
            **({"failed": self.failed} if self.failed else {}),
        }

    def summary(self) -> str:
        """The same in one line."""
        counts = Counter(result["status"] for result in self._results)
        counts |= {"forgotten": len(self._forgotten), "not read": len(self.failed)}
        parts = [f"{count:,} {status}" for status, count in counts.items() if count]
        return f"{len(self._results) + len(self.failed):,} files: {', '.join(parts) or 'nothing'}"

    def _read_file(self, file: "File", which: str) -> None:
        seen, known, done = self._look(file)
        if done is not None and seen is not None:
            if seen.hash:
                self._update_source(done, seen)
            if self._labels is not None:
                self._memory.label(done.name, self._labels)
            self._results.append(_result(done, "unchanged"))
            return
        text = checked(text_of(file, seen), which)
        self._ingest(text, self._mode if known is None else "replace", which)

    def _look(self, file: "File") -> "tuple[Source | None, Source | None, Document | None]":
        """The state of a file now, the state that the document of its name recorded, and that
        document if it is complete and of the same text. The file is hashed only if its time and
        size do not tell.
        """
        seen, there = file.look(), self._document_of(file)
        known = self._known(there, seen)
        if seen is None:
            return None, known, None
        done = known is not None and there is not None and there.state == "ready"
        if done and known is not None and known.mtime_ns == seen.mtime_ns != 0:
            done = known.size == seen.size
        if not done or known is None or known.mtime_ns != seen.mtime_ns or not seen.mtime_ns:
            seen = msgspec.structs.replace(seen, hash=file.hash())
            done = done and known is not None and known.hash == seen.hash
        return seen, known, there if done else None

    def _document_of(self, file: "File") -> "Document | None":
        return self._memory.document(file.name) if self._memory.has(file.name) else None

    def _known(self, there: "Document | None", seen: "Source | None") -> "Source | None":
        """The state of the file that its document recorded, if the document came from it."""
        from memstore.documents.folder import Source

        known = None if there is None else Source.of(there)
        if known is None or seen is None or self._mode == "replace":
            return None
        return known if (known.folder, known.file) == (seen.folder, seen.file) else None

    def _update_source(self, there: "Document", seen: "Source") -> None:
        from memstore.disk.format.document import SOURCE

        if there.metadata.get(SOURCE) != seen.to_dict():
            self._memory.describe(there.name, {**there.metadata, SOURCE: seen.to_dict()})

    def _ingest(self, text: "Text", mode: "Mode", which: str = "") -> None:
        text.labels = self._labels
        if text.labels is None and self._memory.has(text.name):
            text.labels = self._memory.document(text.name).labels or None
        result = _ingest_one(self._model, self._memory, text, mode, self._keep, which=which)
        self._results.append(result)
        if not self._quiet:
            console.say(_result_line(result))


def _ingest_one(
    model: "ModelAPI",
    memory: "MemoryStore",
    text: "Text",
    mode: "Mode",
    keep: "Keep | None",
    *,
    which: str,
) -> dict[str, Any]:
    """Read one text; return the result. which: "[2 of 7] " for one of many files."""
    known = memory.has(text.name)
    name = console.one_line(text.name)
    began = time.monotonic()
    seen: list[IngestProgress] = []  # the latest only

    with console.reading(f"{which}{text.name}") as show:

        def progress(state: "IngestProgress") -> None:
            if not seen and state.characters < state.total_characters and not which:
                console.note(
                    f"{name}: {state.tokens_per_second:,.0f} tokens a second, about "
                    f"{console.duration(state.seconds_left)} to go"
                )
            seen[:] = [state]
            show(state.characters, state.total_characters, state.tokens)

        document = model.ingest(text, memory, mode=mode, progress=progress, keep=keep)
    resumed_at = seen[0].resumed_tokens if seen else 0
    if not seen:
        status = "already read"
    elif resumed_at:
        status = "resumed"
    else:
        status = "replaced" if known else "read"
    return _result(document, status, resumed_at, round(time.monotonic() - began, 3))


def _result(
    document: "Document", status: str, resumed_at: int = 0, seconds: float = 0.0
) -> dict[str, Any]:
    """The result of a document, as plain values. resumed_at: the token from which it was read."""
    return {
        "name": document.name,
        "status": status,
        "resumed_at": resumed_at,
        "blocks": document.blocks,
        "tokens": document.tokens,
        "bytes": document.bytes,
        "seconds": seconds,
        **({"notes": document.notes} if document.notes else {}),
    }


def _result_line(result: dict[str, Any]) -> str:
    status = result["status"]
    if status == "resumed":
        status += f" at token {result['resumed_at']:,}"
    figures = (
        f"{result['blocks']:,} blocks, {result['tokens']:,} tokens, {console.size(result['bytes'])}"
    )
    notes = "".join(f"\n  note: {console.one_line(note)}" for note in result.get("notes", ()))
    name = console.one_line(result["name"])
    return f"{name}: {status}; {figures}, {result['seconds']:.1f} s{notes}"
