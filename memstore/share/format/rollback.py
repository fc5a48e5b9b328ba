"""Which manifest of an object store was the newest that was read, by this process or as a local
cache remembers it: an older one in its place, or another one of its number, is a rollback.
"""

import threading
from typing import Protocol

from memstore.errors import StaleMemory

Seen = tuple[int, bytes]
"""Number and id of a manifest."""

_lock = threading.Lock()
_newest: dict[str, Seen] = {}  # by identity of the object store, in this process


class Remembering(Protocol):
    """What remembers the newest manifest over restarts."""

    def newest(self, identity: str) -> Seen | None:
        """Of an object store; None where it knows of none."""

    def note_newest(self, identity: str, seen: Seen, *, anew: bool) -> None:
        """A manifest was read; anew: whether or not it knows of a newer one."""


def newest_seen(identity: str, cache: Remembering | None) -> Seen | None:
    """The newest manifest of an object store that was read. To be asked before that is."""
    with _lock:
        here = _newest.get(identity)
    there = None if cache is None else cache.newest(identity)
    return max(filter(None, (here, there)), key=lambda seen: seen[0], default=None)


def note_newest(
    identity: str, seen: Seen, cache: Remembering | None = None, *, anew: bool = False
) -> None:
    """A manifest was read; anew: what was read before counts no more."""
    with _lock:
        if anew or identity not in _newest or _newest[identity][0] < seen[0]:
            _newest[identity] = seen
    if cache is not None:
        cache.note_newest(identity, seen, anew=anew)


def check_newest(url: str, found: Seen, before: Seen | None, at_least: int | None) -> None:
    """Is the newest manifest of an object store as new as was asked for, or, where nothing was, as
    what was read before? Raises StaleMemory.
    """
    number = found[0]
    if at_least is not None:
        if number < at_least:
            raise StaleMemory(
                f"{url}: its newest manifest is {number}, and one of {at_least} at least was asked "
                "for; publish the newer state again, or ask for less"
            )
        return
    if before is None or number > before[0] or found == before:
        return
    what = f"manifest {number}"
    if number == before[0]:
        what = f"another manifest {number}"
    raise StaleMemory(
        f"{url}: its newest is {what}, but manifest {before[0]} was read before, so somebody has "
        f"put back an older state; publish again, or accept it by --at-least {number}"
    )
