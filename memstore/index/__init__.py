"""The landmark index: packed exact search, and FAISS engines over the same keys.
docs/appendix/index.md says which to choose. FAISS is imported where an engine is used.
"""

import torch

from memstore.errors import InvalidInput
from memstore.index.block_rows import Hits, Scope
from memstore.index.faiss.faiss_head import FAMILY
from memstore.index.faiss.faiss_index import FaissIndex
from memstore.index.packed import PackedIndex

__all__ = ["INDEX_KINDS", "FaissIndex", "Hits", "PackedIndex", "Scope", "make_index"]

INDEX_KINDS = ("auto", "packed", f"faiss-{FAMILY}")


def make_index(
    kind: str,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
) -> PackedIndex:
    """An empty index for keys [.., num_kv_heads, head_dim], held in `dtype` on `device`.

    kind: "packed" (exact), "faiss-ivf-sq8" (needs FAISS), or "auto": exact until an
    engine is built, and after that whichever of the two costs less for a search.

    Raises InvalidInput for an unknown kind, or where FAISS is missing.
    """
    if kind not in INDEX_KINDS:
        raise InvalidInput(f"unknown index {kind!r}: choose one of {', '.join(INDEX_KINDS)}")
    if kind == "packed":
        return PackedIndex(num_kv_heads, head_dim, dtype, device=device)
    return FaissIndex(num_kv_heads, head_dim, dtype, auto=kind == "auto", device=device)
