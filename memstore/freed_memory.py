"""Control what glibc does with freed memory; other C libraries are left alone."""

import ctypes
import sys
from collections.abc import Callable


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation: otherwise every large activation of a training
    step is mapped and page-faulted again (measured: 2x a step).
    """
    if mallopt := _of_glibc("mallopt"):
        mmap_max, trim_threshold, top_pad = -4, -1, -2
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 1 << 28)


def return_freed_memory() -> None:
    """Return the free pages inside the heap to the system: during long runs of similar work glibc
    keeps more and more of them.
    """
    if trim := _of_glibc("malloc_trim"):
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), name, None)
