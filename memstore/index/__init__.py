"""Indexes over landmark keys, token landmarks and words. docs/appendix/index.md says which to
choose. FAISS is imported where an engine is used.
"""

from memstore.index.block_rows import Scope
from memstore.index.landmark_index import INDEX_KINDS, LandmarkIndex
from memstore.kernels.api import Hits

__all__ = ["INDEX_KINDS", "Hits", "LandmarkIndex", "Scope"]
