"""The newest manifest that was read of each object store, by which an older one in its place is
noticed.
"""

import os
import struct
import threading
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from memstore.errors import StaleMemory

Seen = tuple[int, bytes]
"""Number and id of a manifest."""

_SEEN = struct.Struct("<Q16s")
_lock = threading.Lock()
_newest: dict[str, Seen] = {}  # by identity of the object store, in this process


def newest_seen(identity: str, folder: Path | None = None) -> Seen | None:
    """The newest manifest of an object store that was read, by this process or, as a folder
    remembers it, by an earlier one.
    """
    found = (_newest.get(identity), _remembered(identity, folder))
    return max((seen for seen in found if seen), key=lambda seen: seen[0], default=None)


def note_newest(
    identity: str, seen: Seen, folder: Path | None = None, *, reset: bool = False
) -> None:
    """Remember that a manifest was read, also in a folder; reset: forget a newer one."""
    with _lock:
        if reset or identity not in _newest or _newest[identity][0] < seen[0]:
            _newest[identity] = seen
        before = _remembered(identity, folder)
        if folder is not None and (reset or before is None or before[0] < seen[0]):
            # by a new file: another process reads the whole of one or of the other
            made = folder / f"newest-{os.getpid()}"
            with suppress(OSError):  # a full disk remembers nothing
                made.write_bytes(_SEEN.pack(*seen))
                made.rename(_file(identity, folder))


def _remembered(identity: str, folder: Path | None) -> Seen | None:
    if folder is not None:
        with suppress(OSError, struct.error):
            number, id_ = _SEEN.unpack(_file(identity, folder).read_bytes())
            return number, id_
    return None


def _file(identity: str, folder: Path) -> Path:
    """The file in which a folder remembers the newest manifest of an object store."""
    return folder / f"newest-{blake2b(identity.encode(), digest_size=20).hexdigest()}"


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
    what = f"another manifest {number}" if number == before[0] else f"manifest {number}"
    raise StaleMemory(
        f"{url}: its newest is {what}, but manifest {before[0]} was read before, so somebody has "
        f"put back an older state; publish again, or accept it by --at-least {number}"
    )
