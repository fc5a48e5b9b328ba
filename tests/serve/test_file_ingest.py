"""When a server looks for files that wait, beside a memory that others write."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from memstore.serve.background import file_ingest
from memstore.serve.background.file_ingest import FileIngest


def test_a_locked_memory_is_tried_again_soon_however_long_a_look_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_ingest, "_SECONDS", 600.0)
    monkeypatch.setattr(file_ingest, "_PAUSE", 1e9)
    tries, third = list[Any](), threading.Event()

    def locked(self: FileIngest, row: Any) -> bool:
        tries.append(row)
        if len(tries) == 3:
            third.set()
        return False

    monkeypatch.setattr(FileIngest, "_read", locked)
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    uploads: Any = SimpleNamespace(
        requeue=nothing,
        leaving=list,
        waiting_owners=lambda: ["owner"],
        next_queued=lambda owner: {"number": 1},
        move=nothing,
    )
    none: Any = None
    store: Any = SimpleNamespace(watch=nothing)
    backfill: Any = SimpleNamespace(run=nothing)
    ingest = FileIngest(none, store, uploads, backfill, none)
    try:
        assert third.wait(60)
    finally:
        ingest.close()
