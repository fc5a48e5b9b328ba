"""Bytes as they are damaged at random."""

import random


def damaged(data: bytes, random: random.Random) -> bytes:
    """The bytes with a few of them changed, or cut, or with bytes of elsewhere in them."""
    kind = random.randrange(4)
    if kind == 0:
        return data[: random.randrange(len(data))]
    changed = bytearray(data)
    if kind == 1:
        start = random.randrange(len(data))
        changed[start : start + 64] = random.randbytes(min(64, len(data) - start))
    elif kind == 2:
        start, other = random.randrange(len(data)), random.randrange(len(data))
        changed[start : start + 32] = data[other : other + 32]
    else:
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)
