"""The header of a GGUF file: how many layers it says, and of what sizes its tensors are."""

import mmap
import struct
from pathlib import Path

from memstore.errors import InvalidWeights
from memstore.model.model_files import check_file

_FORMS = "BbHhIif?"  # of a value's types by their numbers, and see below
_TEXT, _LIST = 8, 9
_WIDE = {10: "Q", 11: "q", 12: "d"}
_MOST = 1 << 20  # keys, tensors


def check_gguf(file: Path) -> tuple[int, int]:
    """How many numbers its weights have, and how many tensors. Raises InvalidWeights for a file
    that is damaged, or says more layers than it has tensors.
    """
    check_file(file)
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as m:
            numbers, tensors, layers = _Header(m).read()
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise InvalidWeights(f"cannot read {file} as a GGUF file: {error}") from None
    if not all(1 <= count <= tensors for count in layers):
        raise InvalidWeights(f"{file} says {layers[0]:,} layers and has {tensors:,} tensors")
    return numbers, tensors


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def read(self) -> tuple[int, int, list[int]]:
        """Numbers of all tensors, how many these are, and what is said of layers."""
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin as one")
        _, _, tensors, keys = self._take("4sIQQ")
        if max(tensors, keys) > _MOST:
            raise ValueError(f"{tensors:,} tensors and {keys:,} keys")
        layers = []
        for _ in range(keys):
            key = self._text()
            value = self._value(self._take("I")[0])
            if key.endswith(b"block_count"):
                layers.append(value if isinstance(value, int) else 0)
        numbers = 0
        for _ in range(tensors):
            self._text()
            (dimensions,) = self._take("I")
            if dimensions > 8:
                raise ValueError(f"a tensor of {dimensions} dimensions")
            count = 1
            for size in self._take(f"{dimensions}Q"):
                count *= size
            numbers += count
            self._take("IQ")
        if numbers > 16 * len(self._data):  # no form of numbers takes less than half a bit
            raise ValueError(f"{numbers:,} numbers in {len(self._data):,} bytes")
        return numbers, tensors, layers

    def _take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _text(self) -> bytes:
        (length,) = self._take("Q")
        if length > len(self._data) - self._at:
            raise ValueError("a text goes beyond its end")
        self._at += length
        return self._data[self._at - length : self._at]

    def _value(self, kind: int) -> object:
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._take(_WIDE.get(kind) or _FORMS[kind])[0]
        inner, length = self._take("IQ")
        if inner == _LIST:
            raise ValueError("a list of lists")
        if inner == _TEXT:
            for _ in range(length):
                self._text()
            return None
        self._at += struct.calcsize(f"<{_WIDE.get(inner) or _FORMS[inner]}") * length
        return None
