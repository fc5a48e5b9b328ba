"""Reading files into a memory one after the other: what is there already is passed over, what
cannot be read is said and left out, what is gone is forgotten.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from memstore.cli import ingest_report
from memstore.cli.terminal import console
from memstore.closing import Closing
from memstore.disk.files import INDEX, OWN_NAMES
from memstore.errors import DocumentExists, InvalidInput, InvalidWeights, MemstoreError

if TYPE_CHECKING:
    from memstore.disk.format.document import Document
    from memstore.documents.folder import File, Files, Source
    from memstore.model.document_ingest import IngestProgress, IngestWorkers
    from memstore.model.model_api import ModelAPI
    from memstore.model.texts.source_text import Text
    from memstore.store.memory_store import MemoryStore
    from memstore.store.size_estimate import SizeEstimate
    from memstore.store.write.admission import Mode

_FEW = 512  # tokens of a document that is read before anybody would ask how long that takes
_OWN = (InvalidInput, DocumentExists)  # what is wrong with one file, and not with the others


def text_of(file: "File", source: "Source | None" = None) -> "Text":
    """The text of a file. Raises InvalidInput."""
    from memstore.documents import read
    from memstore.documents.converted import LIMITS
    from memstore.documents.folder import STDIN
    from memstore.model.texts.source_text import Text

    if str(file.path) == STDIN and file.folder is None:
        data = sys.stdin.buffer.read(LIMITS.file_bytes + 1)
        return Text(read(data, "standard input"), file.name)
    return Text(file.path, file.name, source=None if source is None else source.to_dict())


def checked(text: "Text", which: str = "") -> "Text":
    """A text that can be read, with a sign of life while it is converted. Raises InvalidInput."""
    with console.waiting(f"{which}looking at {console.one_line(text.name)}"):
        text.check()
    return text


class Reading(Closing):
    """Files on their way into a memory, which is opened when the first can be read; a context
    manager that closes it.
    """

    def __init__(
        self,
        reader: "ModelAPI",
        open_memory: "Callable[[bool], MemoryStore | None]",
        mode: "Mode",
        lookup: dict[str, Any],
        *,
        workers: "IngestWorkers | None" = None,
        quiet: bool,
    ) -> None:
        """open_memory: whether it may be made -> the memory, or None; workers: compute beside this
        process; quiet: nothing is said on stdout.
        """
        self.memory: MemoryStore | None = None
        self._made = False
        self.failed: list[dict[str, Any]] = []
        self._reader, self._open, self._mode, self._lookup = reader, open_memory, mode, lookup
        self._quiet, self._workers = quiet, workers
        if workers is not None:
            self._lookup = {**lookup, "workers": workers}
        self._turn = 0  # the number of the file that is read
        self._ahead: dict[str, Text] = {}  # of files that come, by name
        self._results: list[dict[str, Any]] = []
        self._forgotten: list[Document] = []

    def files(self, found: "Files", first: "Text | None" = None) -> None:
        """Read what was found; first: the text of the only file, where it is checked already, and
        whose errors are the command's.
        """
        for error in found.refused:
            self._fail(error)
        if first is not None:
            self._read(first, self._mode)
            return
        self.memory = self._open(False)
        many = len(found.files) if found.folders else 0
        if self._workers is not None:
            self._workers.expect(self._coming(found.files))
        for number, file in enumerate(found.files, 1):
            self._turn = number
            try:
                self._file(file, f"[{number:,} of {many:,}] " if many else "")
            except _OWN as error:
                self._fail(error)

    def forget_lost(self, found: "Files") -> None:
        """Forget the documents of folders whose files are gone; nothing of a folder in which there
        is no file at all.
        """
        from memstore.documents.folder import Source

        if self.memory is None:
            return
        for folder in found.folders:
            from_here = [
                (document, source)
                for document in self.memory.documents()
                if (source := Source.of(document)) is not None and source.folder == folder.digest
            ]
            lost = [document for document, source in from_here if folder.has_lost(source)]
            if lost and not any(file.folder == folder for file in found.files):
                self._fail(
                    InvalidInput(
                        f"no file was found in {folder.path}; nothing of it is forgotten: is it "
                        "the right folder, or pattern? `memstore rm` takes names"
                    )
                )
                continue
            for document in lost:
                self.memory.forget(document.name)
                self._forgotten.append(document)
                if not self._quiet:
                    console.say(f"{console.one_line(document.name)}: forgotten, its file is gone")

    def build_index(self) -> None:
        """Build what is searched where what was read is not in it yet."""
        if self.memory is not None and self.memory.update_index():
            unit = "layers" if self._reader.keeps is None else "tokens"
            with console.working("index", unit) as show:
                self._reader.build_index(self.memory, show)

    def told(self) -> dict[str, Any]:
        """What became of every file, as plain values."""
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

    def _file(self, file: "File", which: str) -> None:
        seen, known, done = self._look(file)
        if done is not None and seen is not None:
            if seen.hash:
                self._describe(done, seen)
            self._add(done, "unchanged")
            return
        text = self._ahead.pop(file.name, None)
        if text is None or text.source != (None if seen is None else seen.to_dict()):
            text = checked(text_of(file, seen), which)
        self._read(text, self._mode if known is None else "replace", which)

    def _coming(self, files: "Sequence[File]") -> "Iterator[Text]":
        """The texts of files whose turn has not come; what is wrong with one is said when it is."""
        from memstore.documents.folder import STDIN

        for number, file in enumerate(files, 1):
            if number <= self._turn or str(file.path) == STDIN:
                continue
            with suppress(MemstoreError):
                seen, _, done = self._look(file)
                if done is None:
                    text = self._ahead[file.name] = text_of(file, seen)
                    text.check()
                    yield text

    def _look(self, file: "File") -> "tuple[Source | None, Source | None, Document | None]":
        """What is seen of a file, what the document of its name says that was seen of it, and that
        document, if it is there and of the same text. The file is read, and has a hash, where its
        time and size do not tell.
        """
        seen, there = file.look(), self._there(file)
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

    def _there(self, file: "File") -> "Document | None":
        """The document of its name, if there is one."""
        there = self.memory is not None and self.memory.has(file.name)
        return self.memory.document(file.name) if there and self.memory is not None else None

    def _known(self, there: "Document | None", seen: "Source | None") -> "Source | None":
        """What the document of a file's name says of the file, if it came from that."""
        from memstore.documents.folder import Source

        known = None if there is None else Source.of(there)
        if known is None or seen is None or self._mode == "replace":
            return None
        return known if (known.folder, known.file) == (seen.folder, seen.file) else None

    def _describe(self, there: "Document", seen: "Source") -> None:
        from memstore.disk.format.document import SOURCE

        if self.memory is not None and there.metadata.get(SOURCE) != seen.to_dict():
            self.memory.describe(there.name, {**there.metadata, SOURCE: seen.to_dict()})

    def _read(self, text: "Text", mode: "Mode", which: str = "") -> None:
        if self.memory is None:
            self.memory = self._open(False)
        if self.memory is None:
            self.memory, self._made = self._open(True), True
        assert self.memory is not None
        result = _ingest_one(self._reader, self.memory, text, mode, self._lookup, which=which)
        self._results.append(result)
        if not self._quiet:
            console.say(ingest_report.told(result))

    def _add(self, there: "Document", status: str) -> None:
        self._results.append(ingest_report.result(there, status))

    def _fail(self, error: MemstoreError) -> None:
        message = console.one_line(str(error))
        console.note(f"error: {message}")
        self.failed.append({"name": type(error).__name__, "message": message})

    def close(self) -> None:
        """Close the memory, if one was opened."""
        if self.memory is not None:
            self.memory.close()

    def __exit__(self, *error: object) -> None:
        """A memory that was made for a model whose keys cannot be stored is removed while nothing
        is in it: no other model could use it.
        """
        memory = self.memory
        useless = self._made and memory is not None and isinstance(error[1], InvalidWeights)
        empty = useless and memory and not any(row.tokens for row in memory.documents())
        self.close()
        if empty and memory is not None and memory.path is not None:
            with suppress(OSError):
                for name in OWN_NAMES - {INDEX}:
                    (memory.path / name).unlink(missing_ok=True)
                memory.path.rmdir()


def _ingest_one(
    reader: "ModelAPI",
    memory: "MemoryStore",
    text: "Text",
    mode: "Mode",
    lookup: dict[str, Any],
    *,
    which: str = "",
) -> dict[str, Any]:
    """Read one text and say what came of it; which: of how many files, where it is one of many."""
    known = memory.has(text.name)
    began = time.monotonic()
    seen: list[IngestProgress] = []  # the latest only

    def expect(forecast: "SizeEstimate") -> None:
        if forecast.tokens > _FEW and not which:
            console.note(ingest_report.expected(text.name, forecast))

    with console.reading(f"{which}{text.name}") as show:

        def progress(state: "IngestProgress") -> None:
            if not seen and state.characters < state.total_characters and not which:
                console.note(ingest_report.speed(text.name, state))
            seen[:] = [state]
            show(state.characters, state.total_characters, state.tokens)

        document = reader.ingest(
            text, memory, mode=mode, progress=progress, expect=expect, **lookup
        )
    resumed_at = seen[0].resumed_tokens if seen else 0
    if not seen:
        status = "already read"
    elif mode == "append":
        status = "appended"
    elif resumed_at:
        status = "resumed"
    else:
        status = "replaced" if known else "read"
    return ingest_report.result(document, status, resumed_at, round(time.monotonic() - began, 3))
