"""`memstore.open`: a memory is found or made, and its model."""

from contextlib import ExitStack
from pathlib import Path

from memstore.api.memory import Memory
from memstore.compute import Compute
from memstore.errors import InvalidInput, MemoryNotFound
from memstore.hf.models_by_name import default_name, reader_named, reader_of
from memstore.model.model_api import ModelAPI
from memstore.paths import expanded
from memstore.share.format.manifest import MANIFESTS
from memstore.share.publication_options import is_url
from memstore.store.memory_store import MemoryStore
from memstore.store.open_options import OpenOptions, on_device


def open_memory(
    path: Path | str,
    model: ModelAPI | Path | str | None = None,
    *,
    device: str = "auto",
    dtype: str | None = None,
    weights: str = "auto",
    create: bool = True,
    options: OpenOptions | None = None,
) -> Memory:
    """Open a memory with its model, or create one.

    path: its directory, or the URL of a published memory. model: what reads and asks it: a model's
    name ("smollm2"), directory, GGUF file or name on the Hugging Face hub, or one that is loaded;
    None for the one that the memory was made with; of a new one $MEMSTORE_MODEL, else a packaged
    model that is installed, else the landmark model that ships. device: "auto", "cpu", "cuda",
    "mps". dtype: "float32", "bfloat16", "float16", None for the fastest. weights: that tokens are
    generated with: "auto", "full", "int8", "int4". create: where there is no
    memory yet. options: see OpenOptions.

    Raises MemoryNotFound, WrongModel, InvalidInput, InvalidConfig, InvalidWeights, and what
    MemoryStore.open and MemoryStore.create raise.
    """
    loaded = None if model is None or isinstance(model, str | Path) else model
    if loaded is not None and not isinstance(loaded, ModelAPI):
        raise InvalidInput(
            f"a {type(loaded).__name__} is no model for a memory: memstore.wrap(model, tokenizer) "
            "makes one of a transformers model"
        )
    named = model if isinstance(model, str | Path) else None
    opening = on_device(options or {}, device if loaded is None else str(loaded.device))
    compute = Compute(device, dtype, weights)
    with ExitStack() as stack:
        try:
            store = stack.enter_context(MemoryStore.open(path, **opening))
        except MemoryNotFound:
            if not create or is_url(path):
                raise
            _check_free(expanded(path))  # before a model is loaded
            reader = loaded or reader_named(named or default_name(), compute=compute)
            store = MemoryStore.create(
                path, reader.signature, codec=reader.codec, selector=reader.keeps, **opening
            )
            return Memory(reader, store)
        if loaded is not None:
            advice = "open it with its own model, or make a new memory"
            loaded.signature.check_same(store.signature, str(path), advice)
        reader = loaded or reader_of(store.signature, str(path), named, compute=compute)
        stack.pop_all()
        return Memory(reader, store)


def _check_free(path: Path) -> None:
    """Raises InvalidInput for a directory in which no memory can be made."""
    inside = {child.name for child in path.iterdir()} if path.is_dir() else set()
    if MANIFESTS in inside:
        raise InvalidInput(f"{path} is a published memory: open it as file://{path.resolve()}")
    if inside:
        raise InvalidInput(f"{path} is not empty and holds no memory; name a new directory")
