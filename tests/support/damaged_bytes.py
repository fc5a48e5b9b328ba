"""Damaged bytes, as a strategy of hypothesis."""

from hypothesis import strategies as st


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
