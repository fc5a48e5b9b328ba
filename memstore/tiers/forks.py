"""Forks of a process whose tiers are in use by several threads.

A child has none of its parent's other threads: a lock that one of them held could never be released
there, and what one was reading never arrives. So a fork waits for the locks of all tiers, which
nobody holds for long, and the child's tiers are told.
"""

import os
import threading
import weakref
from typing import Protocol


class Forked(Protocol):
    """What stays usable in a forked child."""

    _lock: threading.RLock

    def _in_child(self) -> None:
        """Called in the child, with the lock held."""
        ...


_all: "weakref.WeakSet[Forked]" = weakref.WeakSet()
_forking = threading.RLock()
_locked: list[Forked] = []


def survive_forks(one: Forked) -> None:
    """Keep an object's lock free in forked children, as long as the object lives."""
    with _forking:
        _all.add(one)


def _before() -> None:
    _forking.acquire()
    _locked.extend(_all)
    for one in _locked:
        one._lock.acquire()


def _after(*, in_child: bool) -> None:
    for one in _locked:
        if in_child:
            one._in_child()
        one._lock.release()
    _locked.clear()
    _forking.release()


os.register_at_fork(
    before=_before,
    after_in_parent=lambda: _after(in_child=False),
    after_in_child=lambda: _after(in_child=True),
)
