"""FAISS's inverted lists of codes of 4 bits (IndexIVFPQFastScan), made from plain arrays, and each
list's content as bytes: so a list is there once it is asked for, and FAISS reads no file.

A list's bytes are the ids of its landmarks (uint32 each, up to a multiple of 8 bytes), then their
codes as FAISS has them: blocks of 32 landmarks.
"""

from typing import Any, NamedTuple

import numpy as np

from memstore.index.faiss.faiss_head import faiss

CODE = 16  # bytes of a landmark's code
LEVELS = 16  # values of a number of a code: 4 bits

_BLOCK = 32  # landmarks whose codes lie together


class Trained(NamedTuple):
    """What codes mean."""

    centroids: np.ndarray  # float32 [lists, width]
    codebook: np.ndarray  # float32 [2 CODE, LEVELS, width / (2 CODE)]


def empty_index(trained: Trained) -> Any:
    """FAISS's index of these centroids, without landmarks. Raises InvalidInput where FAISS is
    missing.
    """
    index = untrained_index(trained.centroids)
    faiss().copy_array_to_vector(trained.codebook.ravel(), index.pq.centroids)
    index.is_trained = True
    return index


def untrained_index(centroids: np.ndarray) -> Any:
    """The same, whose codebook is to be trained."""
    library, (count, width) = faiss(), centroids.shape
    quantizer = library.IndexFlatIP(width)
    quantizer.add(centroids)
    index = library.IndexIVFPQFastScan(
        quantizer, width, count, 2 * CODE, 4, library.METRIC_INNER_PRODUCT
    )
    index.by_residual = True
    index.own_fields = True  # the index frees the quantizer, not Python
    quantizer.this.disown()
    return index


def trained_of(index: Any) -> Trained:
    """What the codes of an index mean."""
    codebook = faiss().vector_to_array(index.pq.centroids)
    return Trained(
        index.quantizer.reconstruct_n(0, index.nlist), codebook.reshape(2 * CODE, LEVELS, -1)
    )


def sizes_of(index: Any) -> np.ndarray:
    """How many landmarks each list has, int64 [lists]."""
    lists = index.invlists
    return np.array([lists.list_size(number) for number in range(index.nlist)], np.int64)


def list_bytes(sizes: np.ndarray) -> np.ndarray:
    """Bytes of lists of so many landmarks."""
    return _id_bytes(sizes) + _code_bytes(sizes)


def list_content(index: Any, number: int) -> np.ndarray:
    """The bytes of a list, uint8."""
    library, lists = faiss(), _blocks(index)
    size = lists.list_size(number)
    content = np.zeros(list_bytes(size), np.uint8)
    if size:
        content[: 4 * size].view("<u4")[:] = library.rev_swig_ptr(lists.get_ids(number), size)
        codes = library.rev_swig_ptr(lists.get_codes(number), _code_bytes(size))
        content[_id_bytes(size) :] = codes
    return content


def put_list(index: Any, number: int, size: int, content: np.ndarray) -> None:
    """Have an index hold a list, which is empty in it, of these bytes."""
    if size:
        library, lists = faiss(), _blocks(index)
        lists.resize(number, size)
        library.rev_swig_ptr(lists.get_ids(number), size)[:] = content[: 4 * size].view("<u4")
        codes = library.rev_swig_ptr(lists.get_codes(number), _code_bytes(size))
        codes[:] = content[_id_bytes(size) :]


def _blocks(index: Any) -> Any:
    return faiss().downcast_InvertedLists(index.invlists)


def _id_bytes(sizes: Any) -> Any:
    return (4 * sizes + 7) // 8 * 8


def _code_bytes(sizes: Any) -> Any:
    return (sizes + _BLOCK - 1) // _BLOCK * (_BLOCK * CODE)
