"""The command that reads documents into a memory."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memstore.cli.command import command
from memstore.cli.ingest_files import Reading, checked, text_of
from memstore.cli.ingest_library import ingest_library
from memstore.cli.options.command_options import Json, Store
from memstore.cli.options.ingest_options import HowRead, OnCluster, WhichFiles
from memstore.cli.options.option_groups import ASK_BUDGET, Tiers
from memstore.cli.readers import reader_for_ingest
from memstore.cli.terminal import console
from memstore.errors import MemoryNotFound

if TYPE_CHECKING:
    from memstore.model.model_api import ModelAPI
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import OpenOptions

# an ingest reads back only its latest blocks; with --retrieve it gets what asking gets
INGEST_BUDGET = 128 << 20


@command(
    "ingest",
    "memstore ingest book.txt",
    "memstore ingest notes.txt --name diary --append",
    "memstore ingest papers --recursive --sync",
    "memstore ingest library --recursive --model smollm2 --workers 4",
    "memstore ingest library --recursive --to s3://team/library --engine ray",
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
    *,
    which: WhichFiles,
    how: HowRead,
    tiers: Tiers,
    cluster: OnCluster,
    as_json: Json = False,
) -> None:
    """Read documents into a memory, and make it if need be.

    The same text again is a no-op, and an interrupted ingest is resumed. A file that cannot be read
    is said, and does not keep others from being read (exit status 1).
    """
    how.check()
    if cluster.check(how, which):
        ingest_library(paths, which, how, cluster, as_json=as_json)
        return
    from memstore.store.open_options import on_device

    found = which.find(paths, store, how.mode)
    alone = len(paths) == 1 and not found.folders
    if alone and found.refused:
        raise found.refused[0]
    # what cannot be read is refused before a model is loaded
    first = checked(text_of(found.files[0])) if alone else None
    reader = reader_for_ingest(store, how.by)
    lookup = how.lookup(reader)
    computing = None if how.workers == 1 else reader.workers(how.workers)
    options = tiers.options(ASK_BUDGET if how.retrieve else INGEST_BUDGET)
    options = on_device(options, how.by.device)
    reading = Reading(
        reader,
        lambda make: _open_or_create(store, reader, how, options, make=make),
        how.mode,
        lookup,
        workers=computing,
        quiet=as_json,
    )
    with computing or nullcontext(), reading:
        reading.files(found, first)
        if which.sync:
            reading.forget_lost(found)
        reading.build_index()
    if as_json:
        console.emit({"store": str(store), **reading.told()})
    elif found.folders:
        console.say(reading.summary())
    if reading.failed:
        raise typer.Exit(1)


def _open_or_create(
    path: Path, reader: "ModelAPI", how: HowRead, tiers: "OpenOptions", *, make: bool
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
            codec=how.codec or reader.codec,
            quota=how.quota,
            selector=reader.keeps,
            **tiers,
        )
    try:
        if how.codec is not None:
            console.note(f"note: {path} exists and keeps its codec, {memory.codec}")
        if how.quota is not None and how.quota != memory.quota:
            memory.set_quota(how.quota)
    except BaseException:
        memory.close()
        raise
    return memory


COMMANDS = (ingest,)
