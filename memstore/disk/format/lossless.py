"""The heads of a record as their bits: as they are, or by byte plane."""

import numpy as np


class Raw:
    """The bits as they are."""

    name = "raw"
    lossless = True

    def encode(self, units: np.ndarray, dtype: str) -> list[memoryview]:
        return rows_of(np.ascontiguousarray(units).view(np.uint8).reshape(len(units), -1))

    def decode(
        self, payload: bytes | memoryview, k: np.ndarray, v: np.ndarray, dtype: str, length: int
    ) -> None:
        k, v = content_of(k, v, length)
        check_size(payload, 2 * k.nbytes)
        both = np.frombuffer(payload, dtype=k.dtype).reshape(2, *k.shape)
        k[...] = both[0]
        v[...] = both[1]

    def head_bytes(self, rows: int, dim: int, itemsize: int) -> int:
        return 2 * rows * dim * itemsize


class Shuffled(Raw):
    """The bits by byte plane: bytes of equal significance lie together, which compresses better.
    Not stored as such.
    """

    name = "shuffled"

    def encode(self, units: np.ndarray, dtype: str) -> list[memoryview]:
        count = len(units)
        values = np.ascontiguousarray(units).view(np.uint8).reshape(count, -1, units.itemsize)
        planes = np.empty((count, units.itemsize, values.shape[1]), np.uint8)
        for place in range(units.itemsize):  # a plane at a time: four times faster
            planes[:, place] = values[:, :, place]
        return rows_of(planes.reshape(count, -1))

    def decode(
        self, payload: bytes | memoryview, k: np.ndarray, v: np.ndarray, dtype: str, length: int
    ) -> None:
        k, v = content_of(k, v, length)
        check_size(payload, 2 * k.nbytes)
        # [itemsize, K and V, length * head_dim]
        planes = np.frombuffer(payload, dtype=np.uint8).reshape(k.itemsize, 2, k.size)
        for half, out in enumerate((k, v)):
            values = out.view(np.uint8).reshape(k.size, k.itemsize)
            for place, plane in enumerate(planes[:, half]):
                values[:, place] = plane


def rows_of(data: np.ndarray) -> list[memoryview]:
    """The bytes of each row of a contiguous uint8 array."""
    return [memoryview(row) for row in data]


def content_of(k: np.ndarray, v: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows that are content; those behind become zero."""
    if length < len(k):
        k[length:] = 0
        v[length:] = 0
    return k[:length], v[:length]


def check_size(payload: bytes | memoryview, size: int) -> None:
    """Raises ValueError for a payload of another size."""
    if len(payload) != size:
        raise ValueError(f"{len(payload)} bytes instead of {size}")
