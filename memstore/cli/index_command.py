"""The command that builds an index over a memory: index."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import IndexKind, Json, ReadStore
from memstore.cli.options.model_options import ModelOptions
from memstore.cli.readers import opened
from memstore.cli.terminal import console
from memstore.errors import InvalidInput
from memstore.share.publication_options import is_url

if TYPE_CHECKING:
    from memstore.model.model_api import ModelAPI
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import OpenOptions


@command(
    "index",
    "memstore index",
    "memstore index --store s3://team/library",
    "memstore index --index faiss-ivf-sq8 --recall 0.99",
)
def index(
    store: ReadStore,
    kind: IndexKind = None,
    recall: Annotated[
        float | None,
        typer.Option(
            "--recall", metavar="R", help="Share of the true top blocks to find; default 0.95."
        ),
    ] = None,
    *,
    by: ModelOptions,
    as_json: Json = False,
) -> None:
    """Build an approximate index over landmarks.

    For memories too large to search exactly. It is kept beside the memory, or published where that
    is, and used by every later command; documents read after it are searched exactly until there
    are enough of them to join it. Build it again after much has changed. --index and --recall are
    of models with landmark keys of their own.
    """
    options: OpenOptions = {}
    if kind is not None:
        options["index"] = kind
    if recall is not None:
        options["index_recall"] = recall
    with opened(store, by, options, read_only=is_url(store)) as (reader, memory):
        if reader.keeps != memory.selector:
            raise InvalidInput(
                "another selector than this model's finds passages here; ingest the documents "
                "again into a new memory"
            )
        if reader.keeps is not None and options:
            raise InvalidInput(
                "--index and --recall are of models with landmark keys; leave them out"
            )
        built = _built(reader, memory, "layers" if reader.keeps is None else "tokens")
    if as_json:
        console.emit({"store": str(store), "index": built})
        return
    if reader.keeps is not None:
        _say_lists(built)
        return
    for layer, engine in built["engines"].items():
        efforts, recalls = (", ".join(map(str, engine[name])) for name in ("effort", "recall"))
        held = f"{engine['family']} over {engine['landmarks']:,} landmarks"
        console.say(f"layer {layer}: {held}; effort of its heads {efforts}; recall {recalls}")
    console.say(
        f"{built['seconds']:.1f} s"
        if built["engines"]
        else "too few landmarks to index; they are searched exactly"
    )


def _say_lists(built: dict[str, Any]) -> None:
    lists = built["engines"]
    if not lists:
        console.say(
            "lists are made of two million tokens and more, of selectors that keep a landmark of "
            "each; here every passage is scored"
        )
        return
    console.say(
        f"{lists['lists']:,} lists of {lists['landmarks']:,} token landmarks of "
        f"{lists['passages']:,} passages, {console.size(lists['bytes'])}; {built['seconds']:.1f} s"
    )


def _built(reader: "ModelAPI", memory: "MemoryStore", parts: str) -> dict[str, Any]:
    """What the model's build_index says of it, and the seconds that it took."""
    began = time.monotonic()
    with console.working("index", parts) as show:
        built = reader.build_index(memory, show)
    return built | {"seconds": round(time.monotonic() - began, 3)}


COMMANDS = (index,)
