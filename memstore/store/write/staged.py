"""The chunks of a document that were staged and are not yet given to a commit."""

import threading

from memstore.store.write.chunk import Chunk
from memstore.store.write.commits import Commits, Tail


class Staged:
    """In order; from any thread."""

    def __init__(self, commits: Commits, commit_bytes: int, *, held_until: int = 0) -> None:
        """commit_bytes: of a commit. held_until: characters of the document up to which nothing is
        committed while old blocks would be replaced: that would take away text that is not read
        again yet, and whoever resumes has what is appended, and nothing else.
        """
        self._commits, self._commit_bytes, self._held_until = commits, commit_bytes, held_until
        self._lock = threading.Lock()  # of the next two
        self._chunks: list[Chunk] = []
        self._bytes = 0

    @property
    def chunks(self) -> list[Chunk]:
        """They, as they are now."""
        with self._lock:
            return [*self._chunks]

    def add(self, chunk: Chunk, size: int) -> None:
        """Take the next one, which makes a commit larger by so many bytes."""
        with self._lock:
            self._chunks.append(chunk)
            self._bytes += size

    def submit_if_enough(self) -> None:
        """Give them to a commit once they are as much as one takes, and wait where storage is far
        behind. Raises what committing raised.
        """
        if self._bytes >= self._commit_bytes:
            self.submit()
        while self._commits.waiting_bytes > 2 * self._commit_bytes:
            self._commits.wait_for_one()
        self._commits.check()

    def submit(self, *, final: bool = False, tail: Tail | None = None) -> None:
        """Give the whole ones to a commit, or all with the document's end."""
        with self._lock:
            if self._is_held() and not final:
                return
            chunks = [chunk for chunk in self._chunks if chunk.whole or final]
            self._chunks = [chunk for chunk in self._chunks if not (chunk.whole or final)]
            size, self._bytes = self._bytes, 0
            if chunks or final:
                self._commits.submit(chunks, size, final=final, tail=tail)

    def clear(self) -> None:
        """Let them go."""
        with self._lock:
            self._chunks = []

    def _is_held(self) -> bool:
        last = self._chunks[-1] if self._commits.cut and self._chunks else None
        return last is not None and last.end < self._held_until
