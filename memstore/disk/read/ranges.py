"""Reading ranges of a file into buffers, in one call of the system each: waiting for what the page
cache does not hold, or not.
"""

import os
from collections.abc import Sequence

NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)  # of Linux; not every file system knows it


def read_into(
    file: int, buffers: Sequence[memoryview | bytearray], offset: int, size: int, flags: int
) -> None:
    """Fill buffers, of `size` bytes together, from byte `offset` of a file. Raises OSError, also
    where the file ends before.

    flags: 0, or NOWAIT: BlockingIOError is raised instead, also where the page cache does not hold
    all of it and where nothing can be read so.
    """
    try:
        count = os.preadv(file, buffers, offset, flags)
    except OSError as error:
        if flags:
            raise BlockingIOError from error
        raise
    if count == size:
        return
    if flags:
        raise BlockingIOError
    left = [memoryview(buffer) for buffer in buffers]
    while count:
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if not left:
            return
        left[0] = left[0][count:]
        count = os.preadv(file, left, offset)
    raise OSError("the file ends before it")
