"""Making very many objects that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Have the collector not look through objects again and again while they are made, since none
    of them is garbage yet: with a hundred thousand documents that takes longer than to read them.
    What becomes garbage meanwhile, in any thread, is found afterwards.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
