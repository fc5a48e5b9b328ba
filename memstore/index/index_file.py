"""Convert FAISS's inverted lists of rounded vectors, searched by inner product, to arrays and back;
and the files of an index: a header and arrays with checksums, replaced atomically.

A file is a cache: it is read only if it is complete and of the right kind, and deleting it loses
nothing. FAISS is imported only here, at its first use.
"""

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
from memstore.disk.files import DATA, NO_SPACE, mode_of, open_regular, replacement, storage_full
from memstore.errors import InvalidInput, ReadOnlyMemory, install_extra

_MAGIC = b"memstore index 2\n"
_FIXED = len(_MAGIC) + 16  # then the header's length and its checksum

Pieces = list[bytes | memoryview]  # a file's content


class Unusable(Exception):
    """An index file that is damaged, of another kind, or of other keys; the message says which."""


class Parts(msgspec.Struct):
    """Fields that all headers have; each kind of file adds more."""

    lengths: list[Count]
    payload: bytes


H = TypeVar("H", bound=Parts)


@contextmanager
def understood(name: str) -> Iterator[None]:
    """Context that turns any error about a file's content, in our code or in FAISS, into Unusable,
    except InvalidInput (FAISS is missing).
    """
    try:
        yield
    except (Unusable, InvalidInput):
        raise
    except Exception as error:
        raise Unusable(f"{name} cannot be decoded ({error})") from error


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
    if directory.is_symlink():
        raise ReadOnlyMemory(f"{directory} cannot be written: it is a link")
    try:
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
            raise storage_full(directory, error.strerror) from error
        raise ReadOnlyMemory(f"{directory} cannot be written: {error.strerror}") from error


def content_of(path: Path) -> np.ndarray:
    """All bytes of a file, uint8, a mapped copy. Raises Unusable (empty, or not a regular file),
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
    """Whether FAISS is installed."""
    return importlib.util.find_spec("faiss") is not None


def empty_lists(codes: str, width: int, lists: int) -> Any:
    """`lists` untrained lists of vectors [width]; codes: their name in FAISS's factory."""
    library = faiss()
    index = library.index_factory(width, f"IVF{lists},{codes}", library.METRIC_INNER_PRODUCT)
    index.by_residual = True
    return index


def arrays_of(index: Any) -> list[np.ndarray]:
    """Lists as arrays: centroids float32 [lists, width], codebook float32 [n], vectors of each list
    uint32 [lists], ids uint32 [vectors], then the codes of each list, uint8.
    """
    library = faiss()
    lists, held = library.downcast_InvertedLists(index.invlists), library.rev_swig_ptr
    sizes = [lists.list_size(number) for number in range(index.nlist)]
    ids = [held(lists.get_ids(n), size).astype(np.uint32) for n, size in enumerate(sizes)]
    codes = [held(lists.get_codes(n), _code_bytes(lists, size)) for n, size in enumerate(sizes)]
    centroids = index.quantizer.reconstruct_n(0, index.nlist)
    codebook = library.vector_to_array(_codebook(index))
    return [centroids, codebook, np.array(sizes, np.uint32), np.concatenate(ids), *codes]


def index_of(codes: str, width: int, parts: Iterator[np.ndarray]) -> tuple[Any, np.ndarray]:
    """The lists whose arrays are the next parts, uint8 [n] each, and the ids in them; codes: as for
    `empty_lists`. Raises ValueError if the arrays contradict each other, InvalidInput if FAISS is
    missing.
    """
    centroids, codebook = floats(next(parts)), floats(next(parts))
    sizes, ids = (np.array(part).view("<u4") for part in islice(parts, 2))
    library, index = faiss(), empty_lists(codes, width, len(sizes))
    index.quantizer.add(centroids.reshape(len(sizes), width))
    numbers = 2 * width if codes == "SQ8" else 16 * width  # the least and the range; 16 levels
    library.copy_array_to_vector(codebook.reshape(numbers), _codebook(index))
    lists = library.downcast_InvertedLists(index.invlists)
    if len(ids) != sizes.sum():
        raise ValueError("its lists contradict each other")
    for number, own in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
        lists.resize(number, len(own))
        coded = next(parts).reshape(_code_bytes(lists, len(own)))
        if len(own):
            library.rev_swig_ptr(lists.get_ids(number), len(own))[:] = own
            library.rev_swig_ptr(lists.get_codes(number), len(coded))[:] = coded
    index.is_trained, index.ntotal = True, len(ids)
    return index, ids


def floats(part: np.ndarray) -> np.ndarray:
    """The numbers float32 [n] of a part, copied, because the file may be changed or removed, and
    for alignment. Raises ValueError unless all are finite.
    """
    numbers = np.array(part).view("<f4")
    if not np.isfinite(numbers).all():
        raise ValueError("its numbers are not finite")
    return numbers


def _codebook(index: Any) -> Any:
    """The trained parameters of the codes: a vector of FAISS."""
    return index.sq.trained if hasattr(index, "sq") else index.pq.centroids


def _code_bytes(lists: Any, size: int) -> int:
    """The bytes of the codes in a list of `size` vectors; FastScan pads them to whole groups."""
    if not hasattr(lists, "n_per_block"):
        return size * int(lists.code_size)
    return -(-size // lists.n_per_block) * int(lists.block_size)
