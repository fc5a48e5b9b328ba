"""Workers that read documents in, forked from the process that needs them."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from memstore.hf import passage_worker
from memstore.model.passages import worker_process
from support.forked import forked


@contextmanager
def forked_workers() -> Iterator[None]:
    """Workers that begin meanwhile are forks that have imported everything, of one thread each."""

    def begin(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        *words, _ = command[command.index(passage_worker.__name__) :]
        return forked(passage_worker.main, [*words, "1"], **options)

    begun = SimpleNamespace(**{**vars(subprocess), "Popen": begin})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "subprocess", begun)
        yield
