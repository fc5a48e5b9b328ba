"""Reading uploaded files into the memory, in the background: one after the other, behind the
questions, resumed after a restart; and forgetting them.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from sqlite3 import Row
from typing import TYPE_CHECKING, NamedTuple

from memstore.disk.document import Document
from memstore.documents import read
from memstore.errors import (
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    MemoryLocked,
    MemstoreError,
)
from memstore.model.ingest import Ingesting, IngestProgress
from memstore.model.text import Text
from memstore.serve.adopting import Adopting
from memstore.serve.uploads import Uploads
from memstore.serve.worker import Job, Stopped

if TYPE_CHECKING:
    from memstore.serve.service import Service

_log = logging.getLogger("memstore")
_SECONDS = 15.0  # between two looks for what expired, or could not be forgotten
_SECONDS_LOCKED = 0.5  # until a memory that another process writes is tried again
_SECONDS_A_CHUNK = 30.0  # that a deletion waits for the end of a chunk


class _Reading(NamedTuple):
    """The number of the file that is being read, and the job that does it."""

    file: int
    job: Job


class Ingests:
    """Reads files that are queued, by a thread that prepares their texts and the model's thread
    that reads them.

    Which files wait is said by their rows alone: a server that is killed goes on with them when it
    is started again, from the chunk where it was.
    """

    def __init__(self, service: "Service") -> None:
        self._service = service
        self.uploads = Uploads(service)
        self._adopting = Adopting(service, self.uploads)
        self._changed = threading.Condition()
        self._reading: _Reading | None = None
        self._progress: tuple[int, IngestProgress] | None = None
        self._forgetting = threading.Lock()
        self._ending = False
        self.uploads.requeue()
        self._thread = threading.Thread(target=self._run, name="memstore-files", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Read what is queued."""
        with self._changed:
            self._changed.notify()

    def progress(self, row: Row) -> IngestProgress | None:
        """How far the reading of a file is, while it goes on."""
        known = self._progress
        return known[1] if known is not None and known[0] == row["number"] else None

    def delete(self, row: Row) -> None:
        """Delete a file, and forget its document; killed in between, the next start goes on with
        it. Raises MemoryLocked where another process writes the memory: then it goes soon after;
        ReadOnlyMemory.
        """
        self._service.store.check_writable()
        self.uploads.leave(row)
        self._forget(row["number"])

    def forget(self, name: str) -> None:
        """Forget a document, and the file that it was. Raises DocumentNotFound, MemoryLocked,
        ReadOnlyMemory.
        """
        row = self._service.database.row(
            "SELECT * FROM files WHERE document = ? AND state != 'leaving'", (name,)
        )
        if row is not None:
            self.delete(row)
        else:
            self._service.store.forget(name)

    def close(self, seconds: float = 2.0) -> None:
        """End; the worker was stopped before. What is half read is gone on with by the next."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(seconds)

    # The thread

    def _run(self) -> None:
        while not self._ending:
            pause, failed = _SECONDS, False
            try:
                self._forget_leaving()
                self._adopting.look()
                until = time.monotonic() + _SECONDS
                while not self._ending and (row := self.uploads.next_queued()) is not None:
                    if not self._read(row):
                        pause = _SECONDS_LOCKED
                        break
                    if time.monotonic() > until:  # there is a look in between
                        break
            except Exception:
                if self._ending:  # the database was closed
                    return
                _log.exception("uploaded files are looked at again in %.0f seconds", _SECONDS)
                failed = True
            with self._changed:
                wait = failed or pause < _SECONDS or self.uploads.next_queued() is None
                if not self._ending and wait:
                    self._changed.wait(pause)

    def _read(self, row: Row) -> bool:
        """Read a file as far as it goes; False if another process writes the memory now."""
        text = None
        try:
            text = text_of(row["filename"], row["document"], b"".join(self.uploads.content(row)))
            with self._changed:  # who deletes it finds the job, or there is none
                if not self.uploads.move(row, "reading", digest=text.digest):
                    return True
                steps = self._service.reader.ingesting(text, self._service.store)
                job = self._service.worker.in_background("files", self._told(row, steps))
                self._reading = _Reading(row["number"], job)
            job.finished.wait()
        except Stopped:
            return False
        except Exception as error:
            self._failed(row, text, error)
            return True
        finally:
            self._reading = self._progress = None
        if job.state == "done":
            read: Document = job.result
            self.uploads.move(row, "ready", tokens=read.tokens, stored_bytes=read.bytes)
            self._adopting.look_anew()  # it may have been forgotten since
        elif job.state == "failed" and not isinstance(job.error, MemoryLocked):
            assert job.error is not None
            self._failed(row, text, job.error)
        else:  # deleted, or the server ends, or another process writes
            self.uploads.move(row, "queued")
            return job.error is None
        return True

    def _told(self, row: Row, steps: Ingesting) -> Ingesting:
        number = row["number"]
        try:
            while True:
                state = next(steps)
                self._progress = number, state
                yield state
        except StopIteration as end:
            document: Document = end.value
            return document
        finally:
            steps.close()

    def _failed(self, row: Row, text: Text | None, error: BaseException) -> None:
        """Nothing of a file that cannot be read stays in the memory."""
        store = self._service.store
        if text is not None:
            for found in store.documents():
                if found.name == row["document"] and found.source_hash == text.digest:
                    with suppress(MemstoreError):  # the disk may be full
                        store.forget(found.name)
        code, message = told_of(error, store.path)
        self.uploads.move(row, "failed", error_code=code, error=message)

    # Forgetting

    def _forget_leaving(self) -> None:
        for row in self.uploads.leaving():
            with suppress(MemoryLocked):
                self._forget(row["number"])

    def _forget(self, file: int) -> None:
        """Forget the document of a file that left, then the file. Raises MemoryLocked."""
        with self._changed:
            reading = self._reading
        if reading is not None and reading.file == file:
            self._service.worker.cancel(reading.job)
            if not reading.job.finished.wait(_SECONDS_A_CHUNK):
                raise MemoryLocked("the file is being read; it is forgotten soon")
        with self._forgetting:
            row = self.uploads.left(file)
            if row is None:
                return  # somebody else was faster
            store = self._service.store
            for found in store.documents():
                mine = row["tokens"] or found.source_hash == row["digest"]
                if found.name == row["document"] and mine:
                    with suppress(DocumentNotFound):
                        store.forget(found.name)
            self.uploads.remove(row)


def text_of(filename: str, document: str, content: bytes) -> Text:
    """What an uploaded file says, to be read as a document, converted where it is none of text.
    Raises InvalidInput for what cannot be read.
    """
    text = Text(read(content, filename), document)
    text.check()
    return text


def told_of(error: BaseException, path: Path | None) -> tuple[str, str]:
    """(code, message) of a file that could not be read, as OpenAI's last_error; without the place
    of the memory.
    """
    if not isinstance(error, MemstoreError):
        return "server_error", "the server failed to read it"
    said = str(error) if path is None else str(error).replace(str(path), "the memory")
    if isinstance(error, DocumentExists):
        return "invalid_file", said
    return ("unsupported_file" if isinstance(error, InvalidInput) else "server_error"), said
