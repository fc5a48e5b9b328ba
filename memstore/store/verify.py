"""Is everything that a memory promises still there: a walk over all of it, and repair by dropping
what is damaged.

A damaged tree page can end the process that reads it, so a child walks, document by document, and
its death is itself reported as damage of the document it was reading. The children of one
verification are forked from one server (the module memstore.store.walk) that has opened nothing.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from memstore.child import python_command
from memstore.disk.files import DATA, occupy_standard_streams
from memstore.errors import CorruptMemory, MemoryNotFound, MemstoreError


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it was written."""

    document: int | None  # id; None = the memory itself
    name: str  # of the document, as far as it can be read
    what: str


@dataclass(frozen=True)
class Report:
    """What a verification found. `documents`, `records` and `bytes` count what was read and is
    whole.
    """

    documents: int = 0
    records: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # names of the documents that repair removed

    @property
    def clean(self) -> bool:
        """Is everything as it was written?"""
        return not self.problems


def verify_memory(path: Path | str, *, repair: bool = False) -> Report:
    """Check every byte of a memory that a reader could use; with `repair`, drop damaged documents
    whole and check again.

    The report of a repair says what was wrong before and what was dropped. Other processes may read
    meanwhile, but a repair of damaged tree pages rewrites the file and needs the memory to itself.

    Raises MemoryNotFound, MemoryLocked, StorageFull; MemstoreError (no child can be started);
    CorruptMemory if a repair was asked for and
    nothing can be saved.
    """
    path = Path(path)
    if not (path / DATA).is_file():
        raise MemoryNotFound(f"{path} holds no memory; `memstore ingest` makes one")
    with _Children() as children:
        report, died = _walk_in_children(children, path)
        if report.clean or not repair:
            return report
        damaged = sorted(
            {problem.document for problem in report.problems if problem.document is not None}
        )
        in_place = not died and all(problem.document is not None for problem in report.problems)
        if not in_place or not _command(children, "drop", path, damaged):
            _command(children, "salvage", path, damaged)
        after, _ = _walk_in_children(children, path)
    if not after.clean:
        raise CorruptMemory(
            f"{path} is still damaged after repair ({after.problems[0].what}); restore it from a "
            "copy"
        )
    names = {
        problem.document: problem.name
        for problem in report.problems
        if problem.document is not None
    }
    return Report(
        after.documents,
        after.records,
        after.bytes,
        report.problems,
        [names[number] for number in damaged],
    )


def _walk_in_children(children: "_Children", path: Path) -> tuple[Report, bool]:
    """Walk, again from the next document whenever a child dies; also whether one did."""
    documents = records = size = 0
    problems: list[Problem] = []
    skip: list[int] = []
    died = False
    while True:
        reading: dict[str, Any] | None = None
        ended = False
        for event in children.run("walk", path, skip):
            if event["event"] == "reading":
                reading = event
            elif event["event"] == "problem":
                problems.append(Problem(event["document"], event["name"], event["what"]))
            elif event["event"] == "whole":
                documents, records, size = (
                    documents + 1,
                    records + event["records"],
                    size + event["bytes"],
                )
            elif event["event"] == "end":
                ended = True
            if event["event"] in ("whole", "done"):
                skip.append(event["document"])
                reading = None
        if ended:
            return Report(documents, records, size, problems), died
        died = True
        if reading is None:
            problems.append(Problem(None, "", "reading the memory's tables ended the process"))
            return Report(documents, records, size, problems), died
        problems.append(
            Problem(reading["document"], reading["name"], "reading it ended the process")
        )
        skip.append(reading["document"])


def _command(children: "_Children", what: str, path: Path, documents: list[int]) -> bool:
    """Have a child change the memory; False if damaged pages kept it from that. Raises what else
    the child met.
    """
    ended = False
    for event in children.run(what, path, documents):
        if event["event"] == "error":
            kind = next(
                (k for k in MemstoreError.__subclasses__() if k.__name__ == event["kind"]),
                CorruptMemory,
            )
            if kind is CorruptMemory and what == "drop":
                return False
            raise kind(event["what"])
        ended = ended or event["event"] == "end"
    if not ended and what != "drop":
        raise CorruptMemory(
            f"{path} could not be repaired, reading it ended the process; restore it from a copy"
        )
    return ended


class _Children:
    """Children that do one thing each and say what they do in events; a context manager."""

    def __enter__(self) -> Self:
        occupy_standard_streams()
        self._server = subprocess.Popen(
            python_command("memstore.store.walk"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,  # with what it forks: what interrupts this process is not for them
        )
        assert self._server.stdout is not None
        if not self._server.stdout.readline():  # that is no damage of the memory
            self._server.communicate()
            raise MemstoreError(
                "the process that verifies did not start; see what `python -I -c 'import lmdb'` "
                "says, and install memstore with what it needs"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:  # nobody waits for what they do, and a repair may end anywhere
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()

    def run(self, what: str, path: Path, documents: list[int]) -> Iterator[dict[str, Any]]:
        """Do walk, drop or salvage in a new child, and give its events until it ends in whatever
        way.

        documents: those to pass over (walk) or to drop.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([what, str(path), documents]) + "\n")
        self._server.stdin.flush()
        for line in self._server.stdout:
            with suppress(ValueError):  # the last line of a child that was killed while writing it
                event = json.loads(line)
                if event["event"] == "gone":
                    break
                yield event
