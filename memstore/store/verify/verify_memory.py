"""Checks that a memory stores what was written to it, and repairs it by dropping what is damaged.

The pages of keys are checked first, without LMDB, which may crash on a damaged one. Everything else
is read in a child process: if reading a document kills the child, that document is damaged, and
another child reads the others.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memstore.child import python_command
from memstore.disk.files import DATA, named_os_errors, occupy_standard_streams
from memstore.disk.lmdb.meta_pages import is_sound
from memstore.errors import RESTORE, CorruptMemory, MemoryNotFound, MemstoreError
from memstore.paths import expanded
from memstore.share.publication_options import is_url
from memstore.store.verify.report import Problem, Report


def verify_memory(path: Path | str, *, repair: bool = False) -> Report:
    """Check every byte of a memory that a reader could use; with `repair`, drop damaged documents
    and the keys and values of damaged passages (questions compute them again), and check again.

    A repair reports what was wrong before it and what it dropped; other processes may read
    meanwhile. It refuses a memory whose pages of keys, meta pages or own rows are damaged.

    path: a memory's directory, or the URL of a published memory, which is read whole and cannot be
    repaired.

    Raises MemoryNotFound, MemoryLocked, StorageFull; MemstoreError (no child can be started);
    CorruptMemory (the memory cannot be repaired); of a URL also StoreUnavailable, InvalidInput
    (repair).
    """
    if is_url(path):
        from memstore.store.verify.verify_published import verify_published

        return verify_published(str(path), repair=repair)
    path = expanded(path)
    if not (path / DATA).is_file():
        raise MemoryNotFound.of(path)
    before = _walk(path)
    if not before.all_problems or not repair:
        return before.report()
    for problem in before.problems:
        if problem.document is None:
            raise _not_repaired(path, problem.what)
    damaged = {problem.document: problem.name for problem in before.problems if problem.document}
    try:
        events = [event["event"] for event in _child("drop", path, [*damaged, *before.passages])]
    except CorruptMemory as error:
        raise _not_repaired(path, str(error)) from error
    if "end" not in events:
        raise _not_repaired(path, "dropping what is damaged ended the process")
    after = _walk(path)
    if after.all_problems:
        raise _not_repaired(path, after.all_problems[0].what)
    dropped = [name for number, name in sorted(damaged.items()) if number not in after.whole]
    return replace(after.report(), problems=before.all_problems, dropped=dropped)


def _not_repaired(path: Path, what: str) -> CorruptMemory:
    return CorruptMemory(f"{path} cannot be repaired ({what.partition(';')[0]}): {RESTORE}")


@dataclass
class _Walk:
    """The findings of a walk."""

    records: int = 0
    bytes: int = 0
    whole: list[int] = field(default_factory=list)  # documents
    problems: list[Problem] = field(default_factory=list)  # of documents, and the memory itself
    passages: dict[int, Problem] = field(default_factory=dict)  # by number, of damaged records
    counts: list[Problem] = field(default_factory=list)  # of references

    @property
    def all_problems(self) -> list[Problem]:
        return [*self.problems, *self.passages.values(), *self.counts]

    def report(self) -> Report:
        return Report(len(self.whole), self.records, self.bytes, self.all_problems)

    def add(self, event: dict[str, Any]) -> None:
        """Note an event of memstore.store.verify.walk."""
        if event["event"] == "problem":
            self.problems.append(Problem(event["document"], event["name"], event["what"]))
        elif event["event"] == "passage":
            self.passages[event["number"]] = Problem(None, event["name"], event["what"])
        elif event["event"] == "count":
            self.counts.append(Problem(None, "", event["what"]))
        elif event["event"] == "whole":
            self.whole.append(event["document"])
            self.records += event["records"]
            self.bytes += event["bytes"]


def _walk(path: Path) -> _Walk:
    """Walk over a memory in children: in another one, past what was read, whenever one dies."""
    walk = _Walk()
    try:
        with named_os_errors(path):
            if not is_sound(path):
                walk.problems.append(Problem(None, "", "pages of keys are damaged"))
    except OSError as error:
        walk.problems.append(Problem(None, "", f"pages of keys cannot be read ({error})"))
    while not walk.problems or walk.problems[-1].document is not None:
        read = [*walk.whole, *(one.document for one in walk.problems if one.document is not None)]
        reading: dict[str, Any] = {"document": None, "name": ""}
        what = "reading it ended the process"
        try:
            for event in _child("walk", path, read):
                if event["event"] == "end":
                    return walk
                if event["event"] == "reading":
                    reading = event
                walk.add(event)
        except CorruptMemory as error:  # the memory cannot be opened
            what = str(error)
        walk.problems.append(Problem(reading["document"], reading["name"], what))
    return walk


def _child(what: str, path: Path, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """Run memstore.store.verify.walk, and yield its events until it ends, however it ends. Raises
    the errors that it reports.
    """
    occupy_standard_streams()
    command = python_command("memstore.store.verify.walk", what, str(path))
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # the numbers may be too many for an argument
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,  # an interrupt of this process is not for the child
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        if not child.stdout.readline():
            raise MemstoreError(
                "the process that verifies did not start; see what `python -I -c 'import lmdb'` "
                "says, and install memstore with what it needs"
            )
        with suppress(BrokenPipeError):  # it died
            child.stdin.write(json.dumps(numbers) + "\n")
            child.stdin.flush()
        for line in child.stdout:
            with suppress(ValueError):  # a child that dies leaves half a line
                event = json.loads(line)
                if event["event"] == "error":
                    kinds = {kind.__name__: kind for kind in MemstoreError.__subclasses__()}
                    raise kinds.get(event["kind"], CorruptMemory)(event["what"])
                yield event
    finally:
        child.kill()
        child.communicate()
