"""The processes that a test starts, as the system reports them."""

import os
from contextlib import suppress
from pathlib import Path

TELLS_CHILDREN = Path("/proc/thread-self/children").exists()


def children_of(process: int) -> list[int]:
    """Those that a process began, by whichever thread."""
    found = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found += [int(child) for child in listed.read_text().split()]
    return found


def runs(process: int) -> bool:
    """Does it, and is it none that ended and nobody waited for?"""
    return _said(process)[:1] not in ([], ["Z"])


def processor_seconds(process: int) -> float:
    """That it took; 0 for one that is gone."""
    said = _said(process)
    return int(said[11]) / os.sysconf("SC_CLK_TCK") if said else 0.0


def _said(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
