"""The commands that read documents into a memory, and index them."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memstore.cli.command_options import (
    ASK_BUDGET,
    IndexKind,
    Json,
    Model,
    ScoreRange,
    Store,
    Tiers,
    TopK,
    command,
    parse_budget,
    parse_size,
)
from memstore.cli.ingest_files import Reading, checked, text_of
from memstore.cli.readers import reader_for_command
from memstore.cli.terminal import console
from memstore.errors import MemoryNotFound

if TYPE_CHECKING:
    from memstore.model.model_api import ModelAPI
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import OpenOptions
    from memstore.store.write.admission import Mode

# an ingest reads back only its latest blocks; with --retrieve it gets what asking gets
INGEST_BUDGET = 128 << 20


@command(
    "ingest",
    "memstore ingest book.txt --store mem",
    "memstore ingest notes.txt --store mem --name diary --append",
    "memstore ingest papers --recursive --sync --store mem",
    "memstore ingest library --recursive --store mem --model smollm2 --workers 4",
    interrupted="interrupted; what was read is kept, and the same command goes on from there",
)
def ingest(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Files, one document each: text (UTF-8), PDF, HTML, DOCX, Markdown, EPUB; "
            "folders, with --recursive; patterns such as 'notes/**/*.md'; - is standard input.",
        ),
    ],
    store: Store,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="N",
            help="Name of the document; default: the file's. Of a folder's, what they begin with.",
        ),
    ] = None,
    recursive: Annotated[
        bool,
        typer.Option(
            "--recursive",
            "-r",
            help="Read the files in folders; changed ones replace their documents.",
        ),
    ] = False,
    sync: Annotated[
        bool,
        typer.Option(
            "--sync", help="Forget documents of these folders whose files are there no more."
        ),
    ] = False,
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
    kv_budget: Annotated[
        Any,
        typer.Option(
            "--kv-budget",
            metavar="SIZE|none",
            parser=parse_budget,
            help="Most that keys and values of passages may take, for good: what is asked seldom "
            "is dropped, and computed when it is asked for (a selector chooses blocks).",
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
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            metavar="kv|text",
            help="text: no keys and values, which a question computes as it needs them (a selector "
            "chooses blocks).",
        ),
    ] = "kv",
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            help="Processes that read, which share the cores; what is stored is the same (a "
            "selector chooses blocks).",
        ),
    ] = 1,
    *,
    tiers: Tiers,
    as_json: Json = False,
) -> None:
    """Read documents into a memory, and make it if need be.

    The same text again is a no-op, and an interrupted ingest is resumed. A file that cannot be read
    is said, and does not keep others from being read (exit status 1).
    """
    if append and replace:
        raise typer.BadParameter("--append and --replace exclude each other")
    if score_range is not None and not retrieve:
        raise typer.BadParameter(
            "--score-range chooses among retrieved blocks; it goes with --retrieve"
        )
    if name is not None and len(paths) > 1:
        raise typer.BadParameter("--name is for one PATH; several are named after their files")
    from memstore.disk.format.codec import codec_for_new
    from memstore.documents.folder import find

    if codec is not None:
        codec_for_new(codec)  # an unknown one is refused, whether or not the memory exists
    found = find(paths, recursive=recursive, name=name, without=store)
    if name is not None and len(found.files) > 1 and not found.folders:
        raise typer.BadParameter("--name is for one PATH; several are named after their files")
    if sync and not found.folders and not found.refused:
        raise typer.BadParameter("--sync is for folders: name one, with --recursive")
    if append and found.folders:
        raise typer.BadParameter("--append continues a document; it is not for folders")
    alone = len(paths) == 1 and not found.folders
    if alone and found.refused:
        raise found.refused[0]
    # what cannot be read is refused before a model is loaded
    first = checked(text_of(found.files[0])) if alone else None
    reader = reader_for_command(model)
    lookup: dict[str, Any] = {
        "top_k": top_k,
        "score_range": score_range,
        "chunk_blocks": chunk_blocks,
    }
    reader.lookup.changed(**lookup)  # a setting out of range is refused before a memory is created
    if retrieve:
        lookup["retrieve"] = True
    if keep != "kv":
        lookup["keep"] = keep
    computing = None if workers == 1 else reader.workers(workers)
    mode: Mode = "append" if append else "replace" if replace else "new"
    options = tiers.options(ASK_BUDGET if retrieve else INGEST_BUDGET)
    reading = Reading(
        reader,
        lambda make: _open_or_create(store, reader, codec, quota, kv_budget, options, make=make),
        mode,
        lookup,
        workers=computing,
        quiet=as_json,
    )
    with computing or nullcontext(), reading:
        reading.files(found, first)
        if sync:
            reading.forget_lost(found)
        if reading.memory is not None and reading.memory.update_index():
            with console.working("index") as show:
                reader.build_index(reading.memory, show)
    if as_json:
        console.emit({"store": str(store), **reading.told()})
    elif found.folders:
        console.say(reading.summary())
    if reading.failed:
        raise typer.Exit(1)


@command(
    "index",
    "memstore index --store mem",
    "memstore index --store mem --index faiss-ivf-sq8 --recall 0.99",
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
        console.working("index", "layers" if reader.keeps is None else "documents") as show,
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


def _open_or_create(
    path: Path,
    reader: "ModelAPI",
    codec: str | None,
    quota: int | None,
    kv_budget: int | Literal["none"] | None,
    tiers: "OpenOptions",
    *,
    make: bool,
) -> "MemoryStore | None":
    """The memory; None where there is none and none is to be made."""
    from memstore.store.memory_store import MemoryStore

    try:
        memory = MemoryStore.open(path, reader.signature, **tiers)
    except MemoryNotFound:
        if not make:
            return None
        return MemoryStore.create(
            path,
            reader.signature,
            codec=codec or reader.codec,
            quota=quota,
            kv_budget=None if kv_budget == "none" else kv_budget,
            selector=reader.keeps,
            **tiers,
        )
    try:
        if codec is not None:
            console.note(f"note: {path} exists and keeps its codec, {memory.codec}")
        if quota is not None and quota != memory.quota:
            memory.set_quota(quota)
        budget = memory.kv_budget if kv_budget is None else kv_budget
        if budget != memory.kv_budget:
            memory.set_kv_budget(None if budget == "none" else budget)
    except BaseException:
        memory.close()
        raise
    return memory


COMMANDS = (ingest, index)
