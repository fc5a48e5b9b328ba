"""A retrieval-memory database for transformers: a model reads documents once, and any later
process answers questions from them, with sources.

The model's attention keys and values are stored on disk, indexed by passage.
"""

import os
from importlib import import_module

# How long a thread of torch's OpenMP spins before it sleeps, while it waits for others. By default
# it keeps a core busy for 20 to 200 ms, also if other processes want it. torch reads it when it is
# loaded: GNU's takes rounds (1,000 are 0.07 ms), LLVM's and Intel's milliseconds.
if not os.environ.get("OMP_WAIT_POLICY"):
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("KMP_BLOCKTIME", "0")

__version__ = "0.3.0"

TYPE_CHECKING = False  # typing takes longer to import than all that is here
if TYPE_CHECKING:
    from memstore import errors as errors
    from memstore.errors import MemstoreError as MemstoreError
    from memstore.hf.load import load_reader as load_reader
    from memstore.hf.load import wrap as wrap
    from memstore.memory import Memory as Memory
    from memstore.memory import open_memory as open  # noqa: F401
    from memstore.model.answer import Answer as Answer
    from memstore.model.answer import Source as Source
    from memstore.model.landmark.landmark_model import LandmarkModel as LandmarkModel
    from memstore.model.landmark.landmark_model import load_model as load_model
    from memstore.model.lookup_settings import AskOptions as AskOptions
    from memstore.store.memory_store import MemoryStore as MemoryStore
    from memstore.store.open_options import OpenOptions as OpenOptions
    from memstore.store.transfer import export_document as export_document
    from memstore.store.transfer import import_document as import_document
    from memstore.store.transfer import pull_document as pull_document

_HOME = {
    "Memory": "memstore.memory",
    "open": "memstore.memory",
    "MemstoreError": "memstore.errors",
    "MemoryStore": "memstore.store.memory_store",
    "Answer": "memstore.model.answer",
    "AskOptions": "memstore.model.lookup_settings",
    "OpenOptions": "memstore.store.open_options",
    "LandmarkModel": "memstore.model.landmark.landmark_model",
    "Source": "memstore.model.answer",
    "export_document": "memstore.store.transfer",
    "import_document": "memstore.store.transfer",
    "load_model": "memstore.model.landmark.landmark_model",
    "load_reader": "memstore.hf.load",
    "pull_document": "memstore.store.transfer",
    "wrap": "memstore.hf.load",
}

__all__ = ["__version__", "errors", *sorted(_HOME)]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import public names where they are first used: `import memstore` alone loads neither torch
    nor lmdb.
    """
    if name == "errors":
        return import_module("memstore.errors")
    if name in _HOME:
        if _HOME[name] == "memstore.hf.load":
            from memstore.hf.models_by_name import check_transformers

            check_transformers()
        return getattr(import_module(_HOME[name]), "open_memory" if name == "open" else name)
    raise AttributeError(f"module 'memstore' has no attribute {name!r}")
