"""FAISS's inverted lists of rounded vectors, searched by inner product, as arrays and back. The
only file that imports FAISS, and only where it is used.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memstore.errors import InvalidInput, install_extra


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


def index_of(
    kind: str,
    centroids: np.ndarray,
    codebook: np.ndarray,
    sizes: np.ndarray,
    ids: np.ndarray,
    codes: Sequence[np.ndarray],
) -> Any:
    """The inverse of arrays_of; kind: the codes as `empty_lists` takes them. Raises ValueError
    where the arrays contradict each other, InvalidInput where FAISS is missing.
    """
    count, width = centroids.shape
    library, index = faiss(), empty_lists(kind, width, count)
    lists, counts = library.downcast_InvertedLists(index.invlists), sizes.tolist()
    numbers = 2 * width if kind == "SQ8" else 16 * width  # the least and the range; 16 levels
    if (
        [len(one) for one in codes] != [_code_bytes(lists, size) for size in counts]
        or (count, len(ids), codebook.size) != (len(codes), sum(counts), numbers)
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
            library.rev_swig_ptr(lists.get_codes(number), len(codes[number]))[:] = codes[number]
            end += size
    return index


def _codebook(index: Any) -> Any:
    """What the codes were trained to: a vector of FAISS."""
    return index.sq.trained if hasattr(index, "sq") else index.pq.centroids


def _code_bytes(lists: Any, size: int) -> int:
    """The bytes of a list of `size` vectors; FastScan stores the codes of some together."""
    if not hasattr(lists, "n_per_block"):
        return size * int(lists.code_size)
    return -(-size // lists.n_per_block) * int(lists.block_size)
