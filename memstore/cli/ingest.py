"""The commands that read documents into a memory, and index them."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.cli import console
from memstore.cli.options import (
    ASK_BUDGET,
    IndexKind,
    Json,
    Model,
    ScoreRange,
    Store,
    Tiers,
    TopK,
    command,
    parse_size,
)
from memstore.cli.readers import reader_for_command
from memstore.errors import InvalidInput, MemoryNotFound

if TYPE_CHECKING:
    from memstore.model.ingest import IngestProgress, Mode
    from memstore.model.text import Text
    from memstore.model.verbs import Verbs
    from memstore.store.memory_store import MemoryStore
    from memstore.store.options import OpenOptions
    from memstore.store.room import Forecast

# an ingest reads back only its latest blocks; with --retrieve it gets what asking gets
INGEST_BUDGET = 128 << 20


@command(
    "ingest",
    "memstore ingest book.txt --store mem",
    "memstore ingest notes.txt --store mem --name diary --append",
    interrupted="interrupted; what was read is kept, and the same command goes on from there",
)
def ingest(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="UTF-8 text files, one document each.")
    ],
    store: Store,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="N", help="Name of the document; default: the file's."),
    ] = None,
    model: Model = None,
    append: Annotated[
        bool, typer.Option("--append", help="Continue the document of that name with this text.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Put this text in the place of the document of that name."),
    ] = False,
    retrieve: Annotated[
        bool, typer.Option("--retrieve", help="Attend to retrieved blocks while reading (slower).")
    ] = False,
    top_k: TopK = None,
    score_range: ScoreRange = None,
    chunk_blocks: Annotated[
        int | None, typer.Option("--chunk-blocks", metavar="N", help="Blocks read at once.")
    ] = None,
    quota: Annotated[
        int | None,
        typer.Option(
            "--quota",
            metavar="SIZE",
            parser=parse_size,
            help="Most that the memory's file may take.",
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            "--codec",
            metavar="NAME",
            help="Of a new memory: zstd or raw, lossless; int8 or int4, smaller. Default: zstd; "
            "int8 where a selector chooses blocks, as for --model smollm2.",
        ),
    ] = None,
    *,
    tiers: Tiers,
    as_json: Json = False,
) -> None:
    """Read documents into a memory, and make it if need be.

    The same text again is a no-op, and an interrupted ingest is resumed.
    """
    if append and replace:
        raise typer.BadParameter("--append and --replace exclude each other")
    if score_range is not None and not retrieve:
        raise typer.BadParameter(
            "--score-range chooses among retrieved blocks; it goes with --retrieve"
        )
    if name is not None and len(paths) > 1:
        raise typer.BadParameter("--name is for one PATH; several are named after their files")
    from memstore.disk.codec import codec_for_new
    from memstore.model.text import Text

    if codec is not None:
        codec_for_new(codec)  # an unknown one is refused, whether or not the memory exists
    texts = [Text(_file(path), name or _printable(path.stem)) for path in paths]
    for text in texts:
        # a file that cannot be read is refused before anything is written
        text.check(keep=len(texts) == 1)
    reader = reader_for_command(model)
    lookup: dict[str, Any] = {
        "top_k": top_k,
        "score_range": score_range,
        "chunk_blocks": chunk_blocks,
    }
    reader.lookup.changed(**lookup)  # a setting out of range is refused before a memory is created
    if retrieve:
        lookup["retrieve"] = True
    mode: Mode = "append" if append else "replace" if replace else "new"
    options = tiers.options(ASK_BUDGET if retrieve else INGEST_BUDGET)
    results = []
    with _open_or_create(store, reader, codec, quota, options) as memory:
        for text in texts:
            results.append(_ingest_one(reader, memory, text, mode, lookup))
            if not as_json:
                console.say(_told(results[-1]))
        if memory.update_index():
            with console.working("index") as show:
                reader.build_index(memory, show)
    if as_json:
        console.emit({"store": str(store), "documents": results})


@command(
    "index",
    "memstore index --store mem",
    "memstore index --store mem --index faiss-ivf --recall 0.99",
)
def index(
    store: Store,
    kind: IndexKind = None,
    recall: Annotated[
        float | None,
        typer.Option(
            "--recall", metavar="R", help="Share of the true top blocks to find; default 0.95."
        ),
    ] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Build an approximate index over a memory's landmarks, for memories too large to search
    exactly.

    It is kept beside the memory and used by every later command; documents read after it are
    searched exactly until there are enough of them to join it. Build it again after much has
    changed.
    """
    from memstore.store.memory_store import MemoryStore

    options: OpenOptions = {}
    if kind is not None:
        options["index"] = kind
    if recall is not None:
        options["index_recall"] = recall
    reader = reader_for_command(model)
    began = time.monotonic()
    with (
        MemoryStore.open(store, reader.signature, **options) as memory,
        console.working("index") as show,
    ):
        built = reader.build_index(memory, show)
    built["seconds"] = round(time.monotonic() - began, 3)
    if as_json:
        console.emit({"store": str(store), "index": built})
        return
    if "replaced" in built:
        found = reader.keeps.name if reader.keeps is not None else ""
        how = "is now found" if built["replaced"] else "was found already"
        console.say(f"the memory {how} by {found}; {built['seconds']:.1f} s")
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


def _file(path: Path) -> Path:
    if path.exists() and not path.is_dir() and not path.is_file():
        raise InvalidInput(f"{path} is no regular file; save its text in one")
    return path


def _printable(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")


def _open_or_create(
    path: Path, reader: "Verbs", codec: str | None, quota: int | None, tiers: "OpenOptions"
) -> "MemoryStore":
    from memstore.store.memory_store import MemoryStore

    try:
        memory = MemoryStore.open(path, reader.signature, **tiers)
    except MemoryNotFound:
        return MemoryStore.create(
            path,
            reader.signature,
            codec=codec or reader.codec,
            quota=quota,
            selector=reader.keeps,
            **tiers,
        )
    try:
        if codec is not None:
            console.note(f"note: {path} exists and keeps its codec, {memory.codec}")
        if quota is not None and quota != memory.quota:
            memory.set_quota(quota)
    except BaseException:
        memory.close()
        raise
    return memory


def _ingest_one(
    reader: "Verbs", memory: "MemoryStore", text: "Text", mode: "Mode", lookup: dict[str, Any]
) -> dict[str, Any]:
    """Read one text and say what came of it."""
    known = memory.has(text.name)
    began = time.monotonic()
    seen: list[IngestProgress] = []  # the latest only
    at_once = (lookup["chunk_blocks"] or reader.lookup.chunk_blocks) * reader.shape.block_size

    def expect(forecast: "Forecast") -> None:
        if forecast.tokens > at_once:
            console.note(_expected(text.name, forecast))

    with console.reading(text.name) as show:

        def progress(state: "IngestProgress") -> None:
            if not seen and state.characters < state.total_characters:
                console.note(_speed(text.name, state))
            seen[:] = [state]
            show(state.characters, state.total_characters, state.tokens)

        document = reader.ingest(
            text, memory, mode=mode, progress=progress, expect=expect, **lookup
        )
    resumed_at = seen[0].resumed_tokens if seen else 0
    if not seen:
        status = "already read"
    elif mode == "append":
        status = "appended"
    elif resumed_at:
        status = "resumed"
    else:
        status = "replaced" if known else "read"
    figures = {"blocks": document.blocks, "tokens": document.tokens, "bytes": document.bytes}
    seconds = round(time.monotonic() - began, 3)
    return {
        "name": document.name,
        "status": status,
        "resumed_at": resumed_at,
        **figures,
        "seconds": seconds,
    }


def _expected(name: str, forecast: "Forecast") -> str:
    """How large a document will be, before it is read."""
    size = f"{'up to' if forecast.most else 'about'} {console.size(forecast.bytes)} on disk"
    return f"{console.one_line(name)}: about {forecast.tokens:,} tokens, {size}"


def _speed(name: str, state: "IngestProgress") -> str:
    """How fast a document is read, and how long that will take, by its first chunk."""
    return (
        f"{console.one_line(name)}: {state.tokens_per_second:,.0f} tokens a second, about "
        f"{console.duration(state.seconds_left)} to go"
    )


def _told(result: dict[str, Any]) -> str:
    status = result["status"]
    if status in ("resumed", "appended"):
        status += f" at token {result['resumed_at']:,}"
    figures = (
        f"{result['blocks']:,} blocks, {result['tokens']:,} tokens, {console.size(result['bytes'])}"
    )
    return f"{console.one_line(result['name'])}: {status}; {figures}, {result['seconds']:.1f} s"


COMMANDS = (ingest, index)
