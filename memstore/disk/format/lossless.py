"""Lossless codecs: a head's raw bits unchanged, or compressed by byte plane."""

import threading

import numpy as np
import zstandard


class Raw:
    """The raw bits, unchanged."""

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


class Zstd:
    """The raw bits by byte plane, compressed: bytes of equal significance are adjacent, which
    compresses better.
    """

    name = "zstd"
    lossless = True
    _LEVEL = 1

    def __init__(self) -> None:
        self._local = threading.local()  # a compressor may not be used by two threads at once

    def encode(self, units: np.ndarray, dtype: str) -> list[bytes]:
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(level=self._LEVEL)
        count = len(units)
        values = np.ascontiguousarray(units).view(np.uint8).reshape(count, -1, units.itemsize)
        planes = np.empty((count, units.itemsize, values.shape[1]), np.uint8)
        for place in range(units.itemsize):  # a plane at a time: four times faster
            planes[:, place] = values[:, :, place]
        return [compressor.compress(payload) for payload in rows_of(planes.reshape(count, -1))]

    def decode(
        self, payload: bytes | memoryview, k: np.ndarray, v: np.ndarray, dtype: str, length: int
    ) -> None:
        k, v = content_of(k, v, length)
        data = self._decompress(payload, 2 * k.nbytes)
        check_size(data, 2 * k.nbytes)
        # [itemsize, K and V, length * head_dim]
        planes = np.frombuffer(data, dtype=np.uint8).reshape(k.itemsize, 2, k.size)
        for half, out in enumerate((k, v)):
            values = out.view(np.uint8).reshape(k.size, k.itemsize)
            for place, plane in enumerate(planes[:, half]):
                values[:, place] = plane

    def head_bytes(self, rows: int, dim: int, itemsize: int) -> int:
        return 2 * rows * dim * itemsize

    def _decompress(self, payload: bytes | memoryview, most: int) -> bytes:
        """Raises ValueError for anything but a frame of at most so many bytes."""
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        try:
            # zstandard allocates what a frame declares, whatever the limit
            declared = zstandard.frame_content_size(payload)
            if declared > most:
                raise ValueError(f"{declared} bytes are declared, of {most} at most")
            data: bytes = decompressor.decompress(payload, max_output_size=most)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        return data


def rows_of(data: np.ndarray) -> list[memoryview]:
    """The bytes of each row of a contiguous uint8 array."""
    return [memoryview(row) for row in data]


def content_of(k: np.ndarray, v: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `length` rows, which are content; those after them become zero."""
    if length < len(k):
        k[length:] = 0
        v[length:] = 0
    return k[:length], v[:length]


def check_size(payload: bytes | memoryview, size: int) -> None:
    """Raises ValueError for a payload of another size."""
    if len(payload) != size:
        raise ValueError(f"{len(payload)} bytes instead of {size}")
