"""FAISS's inverted lists of rounded vectors, searched by inner product, as arrays and back; and the
files of an index, a header and arrays of bytes, with checksums, replaced whole.

A file is a cache: it is read only if it is whole and of this kind, and deleting it loses nothing.
FAISS is imported here alone, and only where it is used.
"""

import errno
import importlib.util
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import msgspec
import numpy as np
import torch
import xxhash

from memstore.decode import Count, unpack
from memstore.disk.files import DATA, NO_SPACE, mode_of, open_regular, replacement
from memstore.errors import InvalidInput, ReadOnlyMemory, StorageFull, install_extra

_MAGIC = b"memstore index 2\n"
_FIXED = len(_MAGIC) + 16  # then the header's length and its checksum
_KINDS = "<f4", "<f4", "<u4", "<u4"  # of the arrays of lists before their codes

Pieces = list[bytes | memoryview]  # a file's content


class Unusable(Exception):
    """An index file that is damaged, of another kind, or of other keys; says which."""


class Parts(msgspec.Struct):
    """Fields of every header; each kind has more."""

    lengths: list[Count]
    payload: bytes


H = TypeVar("H", bound=Parts)


@contextmanager
def understood(name: str) -> Iterator[None]:
    """Turn any error about a file's content, in our code or in FAISS, into Unusable; InvalidInput
    (FAISS is missing) stays.
    """
    try:
        yield
    except (Unusable, InvalidInput):
        raise
    except Exception as error:
        raise Unusable(f"{name} is not understood ({error})") from error


def encode_file(header: dict[str, Any], parts: Sequence[np.ndarray]) -> Pieces:
    """The content of a file; parts: contiguous."""
    data = [part.reshape(-1).view(np.uint8).data for part in parts]
    digest = xxhash.xxh3_64()
    for part in data:
        digest.update(part)
    packed = msgpack.packb(
        header | {"lengths": [len(part) for part in data], "payload": digest.digest()}
    )
    size, checksum = len(packed).to_bytes(8, "little"), xxhash.xxh3_64(packed).digest()
    return [_MAGIC + size + checksum + packed, *data]


def write_file(path: Path, pieces: Pieces | None) -> int:
    """Replace a file, or remove it (None); return its bytes. Raises StorageFull, ReadOnlyMemory."""
    directory = path.parent
    try:
        if directory.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(directory))
        if pieces is None:
            path.unlink(missing_ok=True)
            return 0
        data = directory.with_name(DATA)  # the index is as private as what it is of
        if not directory.exists():
            mode = mode_of(data) or 0o600
            directory.mkdir(mode=0o700)
            directory.chmod(mode | 0o100 | (mode & 0o044) >> 2)
        with replacement(path, like=data) as file:
            file.writelines(pieces)
            return file.tell()
    except OSError as error:
        if error.errno in NO_SPACE:
            raise StorageFull(
                f"{directory}: no room for the index; make room and run it again"
            ) from error
        raise ReadOnlyMemory(f"{directory} cannot be written: {error.strerror}") from error


def content_of(path: Path) -> np.ndarray:
    """All bytes of a file, uint8, a mapped copy. Raises Unusable (it is empty, or no regular file),
    FileNotFoundError, OSError.
    """
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    except (InvalidInput, ValueError) as error:
        raise Unusable(str(error)) from error


def decode_file(name: str, content: np.ndarray, form: type[H]) -> tuple[H, list[np.ndarray]]:
    """The checked header and the parts of a file, uint8 [n] each. Raises Unusable."""
    header, end = decode_header(name, content, form)
    payload = content[end:]
    if (
        len(payload) != sum(header.lengths)
        or xxhash.xxh3_64(payload.data).digest() != header.payload
    ):
        raise Unusable(f"{name} is damaged")
    return header, np.split(payload, np.cumsum(header.lengths)[:-1])


def decode_header(name: str, content: np.ndarray, form: type[H]) -> tuple[H, int]:
    """The checked header, and where it ends. Raises Unusable."""
    if len(content) < _FIXED or content[: len(_MAGIC)].tobytes() != _MAGIC:
        raise Unusable(f"{name} is damaged, or of another version")
    end = _FIXED + int.from_bytes(content[len(_MAGIC) : len(_MAGIC) + 8].tobytes(), "little")
    packed = content[_FIXED:end].tobytes()
    if xxhash.xxh3_64(packed).digest() != content[len(_MAGIC) + 8 : _FIXED].tobytes():
        raise Unusable(f"{name} is damaged")
    with understood(name):
        return unpack(packed, form), end


# Inverted lists


def faiss() -> Any:
    """FAISS with as many threads as torch. Raises InvalidInput, which says how to get it."""
    try:
        import faiss as library
    except ImportError as error:
        raise InvalidInput(f"this index needs FAISS: {install_extra('cpu')}") from error
    library.omp_set_num_threads(torch.get_num_threads())
    return library


def has_faiss() -> bool:
    """Is FAISS installed?"""
    return importlib.util.find_spec("faiss") is not None


def empty_lists(codes: str, width: int, lists: int) -> Any:
    """So many lists of vectors [width], untrained. codes: how FAISS's factory calls the codes."""
    library = faiss()
    index = library.index_factory(width, f"IVF{lists},{codes}", library.METRIC_INNER_PRODUCT)
    index.by_residual = True
    return index


def arrays_of(index: Any) -> list[np.ndarray]:
    """Lists as arrays: centroids float32 [lists, width], codebook float32 [n], vectors of each list
    uint32 [lists], ids uint32 [vectors], then the codes of each list, uint8.
    """
    library = faiss()
    lists = library.downcast_InvertedLists(index.invlists)
    sizes = np.array([lists.list_size(number) for number in range(index.nlist)], np.uint32)
    ids, codes = [np.zeros(0, np.uint32)], []
    for number, size in enumerate(sizes.tolist()):
        ids.append(library.rev_swig_ptr(lists.get_ids(number), size).astype(np.uint32))
        codes.append(library.rev_swig_ptr(lists.get_codes(number), _code_bytes(lists, size)))
    centroids = index.quantizer.reconstruct_n(0, index.nlist)
    codebook = library.vector_to_array(_codebook(index))
    return [centroids, codebook, sizes, np.concatenate(ids), *codes]


def index_of(codes: str, width: int, parts: Iterator[np.ndarray]) -> tuple[Any, np.ndarray]:
    """The lists whose arrays are the next parts, uint8 [n] each, and the ids in them; codes: as
    `empty_lists` takes them. Raises ValueError where the arrays contradict each other, InvalidInput
    where FAISS is missing.
    """
    # copies: the file may be changed or removed, and a copy is aligned
    centroids, codebook, sizes, ids = (
        np.array(part).view(kind) for part, kind in zip(islice(parts, 4), _KINDS)
    )
    coded, counts = [*islice(parts, len(sizes))], sizes.tolist()
    centroids = centroids.reshape(-1, width)
    library, index = faiss(), empty_lists(codes, width, len(centroids))
    lists = library.downcast_InvertedLists(index.invlists)
    numbers = 2 * width if codes == "SQ8" else 16 * width  # the least and the range; 16 levels
    if (
        [len(one) for one in coded] != [_code_bytes(lists, size) for size in counts]
        or (len(centroids), len(ids), codebook.size) != (len(counts), sum(counts), numbers)
        or not (np.isfinite(centroids).all() and np.isfinite(codebook).all())
    ):
        raise ValueError("its lists contradict each other")
    index.quantizer.add(centroids)
    library.copy_array_to_vector(codebook, _codebook(index))
    index.is_trained, index.ntotal, end = True, len(ids), 0
    for number, size in enumerate(counts):
        if size:
            lists.resize(number, size)
            library.rev_swig_ptr(lists.get_ids(number), size)[:] = ids[end : end + size]
            library.rev_swig_ptr(lists.get_codes(number), len(coded[number]))[:] = coded[number]
            end += size
    return index, ids


def _codebook(index: Any) -> Any:
    """What the codes were trained to: a vector of FAISS."""
    return index.sq.trained if hasattr(index, "sq") else index.pq.centroids


def _code_bytes(lists: Any, size: int) -> int:
    """The bytes of a list of `size` vectors; FastScan stores the codes of some together."""
    if not hasattr(lists, "n_per_block"):
        return size * int(lists.code_size)
    return -(-size // lists.n_per_block) * int(lists.block_size)
