"""Background ingest of uploaded files: those of a key one after the other, those of several keys in
turn, behind the questions, resumed after a restart; and their deletion.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from sqlite3 import Row

from memstore.disk.format.document import Document
from memstore.documents import read
from memstore.errors import (
    DocumentExists,
    DocumentNotFound,
    InvalidInput,
    MemoryLocked,
    MemstoreError,
)
from memstore.model.document_ingest import Ingesting, IngestProgress
from memstore.model.model_api import ModelAPI
from memstore.model.texts.source_text import Text
from memstore.serve.answering.jobs import Job
from memstore.serve.answering.worker import Worker
from memstore.serve.api_errors import Stopped
from memstore.serve.background.backfill import Backfill
from memstore.serve.state.uploads import Uploads
from memstore.store.memory_store import MemoryStore

_log = logging.getLogger("memstore")
_SECONDS = 15.0  # between two looks for what expired, or could not be forgotten
_PAUSE = 10.0  # times what a look took, until the next, as a memory may change on and on
_SECONDS_LOCKED = 0.5  # until a memory that another process writes is tried again
_SECONDS_A_CHUNK = 30.0  # that a deletion waits for the end of a chunk
# Documents that are converted at once, one of each key: a slow one keeps none of another waiting
_CONVERTED_AT_ONCE = max(2, min(4, os.cpu_count() or 1))


class FileIngest:
    """Reads files that are queued: a thread for each key that has some prepares their texts, and
    the model's thread reads them.

    Which files wait is said by their rows alone: a server that is killed goes on with them when it
    is started again, from the chunk where it was.
    """

    def __init__(
        self,
        reader: ModelAPI,
        store: MemoryStore,
        uploads: Uploads,
        backfill: Backfill,
        worker: Worker,
    ) -> None:
        self._reader, self._store, self._worker = reader, store, worker
        self._uploads, self._backfill = uploads, backfill
        self._changed = threading.Condition()
        self._reading: dict[int, Job] = {}  # by the numbers of files
        self._progress: dict[int, IngestProgress] = {}
        self._threads: dict[str, threading.Thread] = {}  # by whose files they read
        self._converting = 0
        self._to_convert: deque[object] = deque()  # a ticket for each that waits to, in order
        self._called = self._locked = False
        self._due = threading.Event()  # to look: this was called, or the memory has changed
        self._backfilling, self._forgetting = threading.Lock(), threading.Lock()
        self._ending = False
        self._uploads.requeue()
        store.watch(self._due)
        self._thread = threading.Thread(target=self._run, name="memstore-files", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Read what is queued."""
        with self._changed:
            self._called = True
            self._changed.notify_all()
            self._due.set()

    def progress(self, row: Row) -> IngestProgress | None:
        """How far the reading of a file is, while it goes on."""
        return self._progress.get(row["number"])

    def delete(self, row: Row) -> None:
        """Delete a file, and forget its document; killed in between, the next start goes on with
        it. Raises MemoryLocked where another process writes the memory: then it goes soon after;
        ReadOnlyMemory.
        """
        self._store.check_writable()
        self._uploads.leave(row)
        self._forget(row["number"])

    def forget(self, name: str) -> None:
        """Forget a document, and the file that it was. Raises DocumentNotFound, MemoryLocked,
        ReadOnlyMemory.
        """
        row = self._uploads.of_document(name)
        if row is not None:
            self.delete(row)
        else:
            self._store.forget(name)

    def close(self, seconds: float = 2.0) -> None:
        """End; the worker was stopped before. What is half read is gone on with by the next."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            self._due.set()
            threads = [self._thread, *self._threads.values()]
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    # The threads

    def _run(self) -> None:
        while not self._ending:
            began = time.monotonic()
            try:
                self._forget_leaving()
                with self._backfilling:
                    self._backfill.run()
                self._begin_queued()
            except Exception:
                if self._ending:  # the database was closed
                    return
                _log.exception("uploaded files are looked at again in %.0f seconds", _SECONDS)
            pause = min(_SECONDS, _PAUSE * (time.monotonic() - began))
            self._due.wait(_SECONDS)
            with self._changed:
                self._changed.wait_for(lambda: self._ending or self._called or self._locked, pause)
                if self._locked:
                    self._changed.wait_for(lambda: self._ending, _SECONDS_LOCKED)
                self._called = self._locked = False
                self._due.clear()

    def _begin_queued(self) -> None:
        """Have a thread read the files of everybody who has some."""
        with self._changed:
            for owner in self._uploads.waiting_owners():
                if owner not in self._threads and not self._ending:
                    thread = threading.Thread(
                        target=self._read_files, args=(owner,), name="memstore-file", daemon=True
                    )
                    self._threads[owner] = thread
                    thread.start()

    def _read_files(self, owner: str) -> None:
        """Read what is queued of an owner."""
        try:
            while True:
                with self._changed:  # who queues one finds this thread, or that there is none
                    row = None if self._ending else self._uploads.next_queued(owner)
                    if row is None:
                        del self._threads[owner]
                        return
                if not self._read(row):
                    with self._changed:
                        self._locked = True
                        self._due.set()
                    break
        except Exception:
            if not self._ending:  # else the database was closed
                _log.exception("uploaded files are read again in %.0f seconds", _SECONDS)
        finally:
            with self._changed:
                if self._threads.get(owner) is threading.current_thread():
                    del self._threads[owner]
                self._changed.notify_all()

    def _read(self, row: Row) -> bool:
        """Read a file as far as it goes; False if another process writes the memory now."""
        text, number = None, row["number"]
        try:
            with self._turn_to_convert():
                content = b"".join(self._uploads.content(row))
                text = text_of(row["filename"], row["document"], content)
            with self._changed:  # who deletes it finds the job, or there is none
                if not self._uploads.move(row, "reading", digest=text.digest):
                    return True
                steps = self._reader.ingesting(text, self._store)
                owner = f"{row['owner'] or 'local'}/files"
                job = self._worker.in_background(owner, self._watched(row, steps))
                self._reading[number] = job
            job.finished.wait()
        except Stopped:
            return False
        except Exception as error:
            self._failed(row, text, error)
            return True
        finally:
            self._reading.pop(number, None)
            self._progress.pop(number, None)
        if job.state == "done":
            read: Document = job.result
            with self._backfilling:  # which makes a file of every document that has none
                self._uploads.move(row, "ready", tokens=read.tokens, stored_bytes=read.bytes)
                self._backfill.invalidate()  # it may have been forgotten since
        elif job.state == "failed" and not isinstance(job.error, MemoryLocked):
            assert job.error is not None
            self._failed(row, text, job.error)
        else:  # deleted, or the server ends, or another process writes
            self._uploads.move(row, "queued")
            return job.error is None
        return True

    @contextmanager
    def _turn_to_convert(self) -> Iterator[None]:
        """As long as a document is converted; who waits longest is next. Raises Stopped."""
        ticket = object()
        with self._changed:
            self._to_convert.append(ticket)
            self._changed.wait_for(
                lambda: (
                    self._ending
                    or (self._to_convert[0] is ticket and self._converting < _CONVERTED_AT_ONCE)
                )
            )
            self._to_convert.remove(ticket)
            self._changed.notify_all()
            if self._ending:
                raise Stopped
            self._converting += 1
        try:
            yield
        finally:
            with self._changed:
                self._converting -= 1
                self._changed.notify_all()

    def _watched(self, row: Row, steps: Ingesting) -> Ingesting:
        number = row["number"]
        try:
            while True:
                state = next(steps)
                self._progress[number] = state
                yield state
        except StopIteration as end:
            document: Document = end.value
            return document
        finally:
            steps.close()

    def _failed(self, row: Row, text: Text | None, error: BaseException) -> None:
        """Nothing of a file that cannot be read stays in the memory."""
        if text is not None and self._is_of(row["document"], text.digest):
            with suppress(MemstoreError):  # the disk may be full
                self._store.forget(row["document"])
        code, message = error_of(error, self._store.path)
        self._uploads.move(row, "failed", error_code=code, error=message)

    # Forgetting

    def _forget_leaving(self) -> None:
        for row in self._uploads.leaving():
            with suppress(MemoryLocked):
                self._forget(row["number"])

    def _forget(self, file: int) -> None:
        """Forget the document of a file that left, then the file. Raises MemoryLocked."""
        with self._changed:
            job = self._reading.get(file)
        if job is not None:
            self._worker.cancel(job)
            if not job.finished.wait(_SECONDS_A_CHUNK):
                raise MemoryLocked("the file is being read; it is forgotten soon")
        with self._forgetting:
            row = self._uploads.left(file)
            if row is None:
                return  # somebody else was faster
            if row["tokens"] or self._is_of(row["document"], row["digest"]):
                with suppress(DocumentNotFound):
                    self._store.forget(row["document"])
            self._uploads.remove(row)

    def _is_of(self, name: str, digest: str) -> bool:
        """Is there a document of this name that was read from such a text?"""
        return any(
            document.name == name and document.source_hash == digest
            for document in self._store.documents()
        )


def text_of(filename: str, document: str, content: bytes) -> Text:
    """What an uploaded file says, to be read as a document, converted where it is none of text.
    Raises InvalidInput for what cannot be read.
    """
    text = Text(read(content, filename), document)
    text.check()
    return text


def error_of(error: BaseException, path: Path | None) -> tuple[str, str]:
    """(code, message) of a file that could not be read, as OpenAI's last_error; without the place
    of the memory.
    """
    if not isinstance(error, MemstoreError):
        return "server_error", "the server failed to read it"
    message = str(error) if path is None else str(error).replace(str(path), "the memory")
    if isinstance(error, DocumentExists):
        return "invalid_file", message
    return ("unsupported_file" if isinstance(error, InvalidInput) else "server_error"), message
