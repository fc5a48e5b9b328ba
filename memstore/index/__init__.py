"""The landmark index: packed exact search, and engines of FAISS over the same keys.
docs/appendix/index.md says which to choose. FAISS is imported where an engine is used.
"""

from pathlib import Path

import torch

from memstore.errors import InvalidInput
from memstore.index.block_rows import Scope
from memstore.index.faiss_index import FaissIndex
from memstore.index.packed import PackedIndex
from memstore.kernels.api import Hits

__all__ = ["INDEX_KINDS", "FaissIndex", "Hits", "PackedIndex", "Scope", "make_index"]

INDEX_KINDS = ("auto", "packed")


def make_index(
    kind: str,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
    directory: Path | None = None,
) -> PackedIndex:
    """An empty index for keys [.., num_kv_heads, head_dim], held in `dtype` on `device`.

    kind: "packed" (exact), or "auto": large scopes by an engine of FAISS, once one is built.
    directory: of the engines' files. Raises InvalidInput for an unknown kind.
    """
    if kind not in INDEX_KINDS:
        raise InvalidInput(f"unknown index {kind!r}: choose one of {', '.join(INDEX_KINDS)}")
    if kind == "packed":
        return PackedIndex(num_kv_heads, head_dim, dtype, device=device)
    return FaissIndex(num_kv_heads, head_dim, dtype, device=device, directory=directory)
