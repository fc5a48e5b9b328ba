"""Making very many objects that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 400_000  # objects


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
        made = gc.get_count()[0]
        if made > _MANY:
            # Once, and not generation by generation; through all there is where the collector would
            # itself soon do that.
            gc.collect(2 if made > len(gc.get_objects(2)) // 2 else 1)
