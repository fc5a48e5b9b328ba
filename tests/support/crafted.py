"""Wrong values that an attacker might put in a file with right checksums, and damaged bytes."""

import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("MEMSTORE_HOSTILE", "100"))  # of each fuzzer
fuzzed = settings(
    max_examples=EXAMPLES,
    derandomize="MEMSTORE_HOSTILE" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NAN = float("nan")
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
WRONG = [
    None, True, False, -1, 0, 1, 2, 3, 255, 256, 70_000, 2**31, 2**40, 2**62, 2**64 - 1, -(2**63),
    0.5, NAN, float("inf"), -0.0, 1e300, "", "x", "ready", "replacing", "\0", "\x1b[2J", "x" * 9000,
    b"", b"x", b"\xff" * 16, b"\0" * 64, [], [0], [[]], [1, 1], [NAN], {}, {"a": NAN}, {"a": [[1]]},
    {1: 2}, DEEP,
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a value."""
    yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:  # of its own: a test may change it further
        return to.copy() if isinstance(to, (dict, list)) else to
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], to)
    return copy


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes cut short, with a bit flipped, with noise, or with bytes from another place."""
    at = draw(st.integers(0, len(data) - 1))
    kind = draw(st.sampled_from(["cut", "flip", "noise", "move"]))
    if kind == "cut":
        return data[:at]
    changed = bytearray(data)
    if kind == "flip":
        changed[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == "noise":
        noise = draw(st.binary(min_size=1, max_size=64))
        changed[at : at + len(noise)] = noise[: len(data) - at]
    else:
        other = draw(st.integers(0, len(data) - 1))
        size = min(32, len(data) - at, len(data) - other)
        changed[at : at + size] = data[other : other + size]
    return bytes(changed)
