"""Checks that a memory stores what was written to it, and repairs it by dropping what is damaged.

The pages of keys are checked first, without LMDB, which may crash on a damaged one. Everything else
is read in a child process: if reading a document kills the child, that document is damaged, and
another child reads the others.
"""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from memstore.child import run_tied
from memstore.disk.files import DATA, named_os_errors, occupy_standard_streams
from memstore.disk.lmdb.meta_pages import is_sound
from memstore.errors import RESTORE, CorruptMemory, MemoryNotFound, MemstoreError
from memstore.paths import expanded
from memstore.share.publication_options import is_url
from memstore.store.verify.report import Problem, Report

Event = dict[str, Any]


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
    events = _walk(path)
    before = _report(events)
    if before.clean or not repair:
        return before
    problems = [event for event in events if event["event"] == "problem"]
    for problem in problems:
        if problem["document"] is None:
            raise _not_repaired(path, problem["what"])
    damaged = {problem["document"]: problem["name"] for problem in problems}
    passages = [event["number"] for event in events if event["event"] == "passage"]
    try:
        ended = [event["event"] for event in _child("drop", path, [*damaged, *passages])]
    except CorruptMemory as error:
        raise _not_repaired(path, str(error)) from error
    if "end" not in ended:
        raise _not_repaired(path, "dropping what is damaged ended the process")
    events = _walk(path)
    after = _report(events)
    if not after.clean:
        raise _not_repaired(path, after.problems[0].what)
    whole = {event["document"] for event in events if event["event"] == "whole"}
    dropped = [name for number, name in sorted(damaged.items()) if number not in whole]
    return replace(after, problems=before.problems, dropped=dropped)


def _not_repaired(path: Path, what: str) -> CorruptMemory:
    return CorruptMemory(f"{path} cannot be repaired ({what.partition(';')[0]}): {RESTORE}")


def _report(events: list[Event]) -> Report:
    """The result of a walk: problems of documents first, then of passages and of references."""
    whole = [event for event in events if event["event"] == "whole"]
    return Report(
        len(whole),
        sum(event["records"] for event in whole),
        sum(event["bytes"] for event in whole),
        [
            Problem(event["document"], event["name"], event["what"])
            for kind in ("problem", "passage", "count")
            for event in events
            if event["event"] == kind
        ],
    )


def _problem(document: int | None, name: str, what: str) -> Event:
    return {"event": "problem", "document": document, "name": name, "what": what}


def _walk(path: Path) -> list[Event]:
    """Walk over a memory in children: in another one, past what was read, whenever one dies."""
    try:
        with named_os_errors(path):
            if not is_sound(path):
                return [_problem(None, "", "pages of keys are damaged")]
    except OSError as error:
        return [_problem(None, "", f"pages of keys cannot be read ({error})")]
    events: list[Event] = []
    while True:
        read = [event["document"] for event in events if event["event"] in ("whole", "problem")]
        reading: Event = {"document": None, "name": ""}
        what = "reading it ended the process"
        try:
            new = _child("walk", path, read)
            events += new
            if new and new[-1]["event"] == "end":
                return events
            reading = next((one for one in reversed(new) if one["event"] == "reading"), reading)
        except CorruptMemory as error:  # the memory cannot be opened
            what = str(error)
        events.append(_problem(reading["document"], reading["name"], what))
        if reading["document"] is None:
            return events


def _child(what: str, path: Path, numbers: list[int]) -> list[Event]:
    """Run memstore.store.verify.walk; return its events until it ended, however it ended. Raises
    the errors that it reports.
    """
    occupy_standard_streams()
    given = json.dumps(numbers).encode()  # numbers may be too many for an argument
    ran = run_tied("memstore.store.verify.walk", what, str(path), given=given)
    events: list[Event] = []
    for line in ran.stdout.splitlines():
        with suppress(ValueError):  # a child that dies leaves half a line
            events.append(json.loads(line))
    if not events:
        raise MemstoreError(
            "the process that verifies did not start; see what `python -I -c 'import lmdb'` says, "
            "and install memstore with what it needs"
        )
    for event in events:
        if event["event"] == "error":
            kinds = {kind.__name__: kind for kind in MemstoreError.__subclasses__()}
            raise kinds.get(event["kind"], CorruptMemory)(event["what"])
    return events[1:]  # after the one that it began
