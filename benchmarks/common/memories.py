"""Where benchmarks make memories, what the page cache holds of one, and how much main memory an
ingest takes.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.tables import table
from memstore import MemoryStore
from memstore.model.model_api import ModelAPI


def data_file(memory: Path) -> Path:
    """The file that holds a memory's blocks."""
    return memory / "data.mdb"


def drop_cache(memory: Path) -> None:
    """Let the page cache forget a memory's file; nobody may have it open."""
    os.sync()
    file = os.open(data_file(memory), os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


@contextmanager
def workplace(options: argparse.Namespace) -> Iterator[Path]:
    """The directory --work, or a temporary one."""
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        yield options.work
        return
    with tempfile.TemporaryDirectory(prefix="memstore-benchmark-") as temporary:
        yield Path(temporary)


def status_bytes(field: str) -> int:
    """Resident bytes of this process by a field of /proc/self/status (Linux): VmHWM (the peak),
    RssAnon (its own), RssFile (of mapped files).
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * int(fields[field].split()[0])


def weigh_ingest(
    model: ModelAPI, store: MemoryStore, text: Path, **settings: Any
) -> dict[str, int]:
    """In a fresh process: tokens of a file, the peak bytes of ingesting it, and those above what a
    short text takes. settings: of ModelAPI.ingest.
    """
    model.ingest("A first short text, so that all is loaded. " * 200, store, name="first")
    before = status_bytes("VmHWM")
    document = model.ingest(text, store, **settings)
    peak = status_bytes("VmHWM")
    return {"tokens": document.tokens, "peak": peak, "above": peak - before}


def peaks_table(found: Sequence[dict[str, int]]) -> str:
    """A row of `weigh_ingest` a line."""
    lines = [
        [f"{row['tokens']:,}", *(f"{row[at] / 1e6:,.0f}" for at in ("peak", "above"))]
        for row in found
    ]
    return table(["tokens", "peak MB", "MB above a short text"], lines)
