"""One server that forks the children of every verification of a process of tests: it has opened
nothing, and to begin one takes longer than most walks.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest

from memstore.store.verify import verify_memory

_Children = verify_memory._Children


class _Shared(_Children):
    """A server that is begun once, and anew after a verification that was interrupted."""

    def __init__(self) -> None:
        self._runs = False

    def __enter__(self) -> Self:
        if not self._runs:
            super().__enter__()
            self._runs = True
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self.end()

    def end(self) -> None:
        if self._runs:
            self._runs = False
            super().__exit__(KeyboardInterrupt, None, None)


@contextmanager
def shared_verification() -> Iterator[None]:
    """Meanwhile verifications of this thread, in this directory, share a server."""
    shared, here = _Shared(), _place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            verify_memory, "_Children", lambda: shared if _place() == here else _Children()
        )
        yield
    shared.end()


@contextmanager
def own_verification() -> Iterator[None]:
    """Meanwhile each has a server of its own, as without tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_memory, "_Children", _Children)
        yield


def _place() -> tuple[Any, ...]:
    return os.getpid(), threading.get_ident(), os.getcwd()
