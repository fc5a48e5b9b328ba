"""Options of opening a publication, checked before anything is opened."""

import math
import re
from pathlib import Path
from typing import Any, TypedDict

from memstore.errors import InvalidConfig

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
LOCAL_BUDGET = 8 << 30
DEADLINE = 20.0
REFRESH = 5.0


class ShareOptions(TypedDict, total=False):
    """Settings of the tiers below the host tier of a publication; each has a default."""

    local_cache: Path | str | None  # a directory that caches read values, across restarts
    local_budget: int  # bytes of that directory (default 8 GiB)
    valkey: str | None  # URL of a Valkey or Redis server, a cache shared by readers
    deadline: float  # seconds of a request, and of its retries (20)
    refresh: float  # seconds between checks for a newer manifest (5)


def is_url(path: object) -> bool:
    """Is this the URL of a publication, not a directory?"""
    return isinstance(path, str) and _URL.match(path) is not None


def take_share_options(options: Any) -> ShareOptions:
    """Remove the ShareOptions from a dict of options, and return them; other options stay.

    Raises InvalidConfig for a deadline, budget or interval that is not a finite number above 0.
    """
    names = [name for name in ShareOptions.__annotations__ if name in options]
    taken = ShareOptions(**{name: options.pop(name) for name in names})  # type: ignore[typeddict-item]
    for name in ("deadline", "local_budget", "refresh"):
        value = taken.get(name)
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise InvalidConfig(f"{name} must be above 0, is {value}")
    return taken
