"""The commands that maintain a memory: ls, stats, rm, verify, export, import, compact, and index,
the only one of them that needs the model.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.opening import opened
from memstore.cli.options import (
    AtLeast,
    IndexKind,
    Json,
    ModelOptions,
    Published,
    ReadStore,
    Store,
    flag,
)
from memstore.errors import InvalidInput, MemoryNotFound
from memstore.share.publication_options import is_url

if TYPE_CHECKING:
    from memstore.store.open_options import OpenOptions


@command("ls", "memstore ls", "memstore ls --store s3://team/library")
def ls(store: ReadStore, at_least: AtLeast = None, as_json: Json = False) -> None:
    """List the documents of a memory."""
    from memstore.store.memory_store import MemoryStore

    with MemoryStore.open(
        store, read_only=True, **Published(at_least=at_least).options(store)
    ) as memory:
        codec, manifest = memory.codec, memory.manifest
        documents = memory.documents()
    if as_json:
        told = [document.told() for document in documents]
        console.emit({"codec": codec, "manifest": manifest, "documents": told})
        return
    rows: list[tuple[object, ...]] = [("name", "state", "tokens", "blocks", "size", "since")]
    for d in documents:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(d.created))
        rows.append((d.name, d.state, d.tokens, d.blocks, console.size(d.bytes), since))
    published = "" if manifest is None else f"; manifest {manifest}"
    said = f"{console.columns(rows)}\nstored with {codec}" if documents else "no documents"
    console.say(f"{said}{published}")


@command("stats", "memstore stats")
def stats(store: ReadStore, at_least: AtLeast = None, as_json: Json = False) -> None:
    """Say how much a memory holds."""
    from memstore.store.memory_store import MemoryStore

    with MemoryStore.open(
        store, read_only=True, **Published(at_least=at_least).options(store)
    ) as memory:
        figures = memory.stats()
    if as_json:
        console.emit(figures)
        return
    quota = "none" if figures["quota"] is None else console.size(figures["quota"])
    console.say(
        f"{figures['documents']:,} documents, {figures['tokens']:,} tokens in "
        f"{figures['blocks']:,} blocks"
    )
    if figures["model"] is not None:
        console.say(f"read by {console.one_line(figures['model'])}")
    console.say(
        f"on disk {console.size(figures['file_bytes'])}, of it blocks "
        f"{console.size(figures['bytes'])} "
        f"({figures['codec']}); quota {quota}"
    )
    passages = figures["passages"]
    if passages["different"]:
        console.say(
            f"{passages['different']:,} different passages, keys and values of "
            f"{passages['stored']:,}, {console.size(passages['bytes'])}"
        )
    if figures["manifest"] is not None:
        console.say(f"published as manifest {figures['manifest']}")


@command("rm", "memstore rm diary", "memstore rm diary letters --erase")
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The documents.")],
    store: Store,
    erase: Annotated[
        bool, flag("--erase", "Rewrite the memory's file without any byte of the documents.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove documents from a memory.

    None is removed where one of the names is unknown. The file keeps its size, and bytes of the
    texts until later documents take their place, until `compact`. With --erase nothing of them is
    left in the memory's files; no other process may have the memory open, and an index is built
    again by `memstore index`.
    """
    from memstore.store.memory_store import MemoryStore

    names = list(dict.fromkeys(names))
    with MemoryStore.open(store) as memory:
        for name in names:
            memory.document(name)  # refused before anything is removed
        removed = [memory.forget(name, erase=erase) for name in names]
    if as_json:
        console.emit({"removed": [document.told() for document in removed], "erased": erase})
        return
    for document in removed:
        console.say(
            f"{console.one_line(document.name)}: {'erased' if erase else 'removed'}, "
            f"{document.tokens:,} tokens, {console.size(document.bytes)}"
        )


@command("verify", "memstore verify", "memstore verify --repair")
def verify(
    store: ReadStore,
    repair: Annotated[bool, flag("--repair", "Drop damaged documents, whole.")] = False,
    as_json: Json = False,
) -> None:
    """Check everything a memory holds; status 1 if damaged."""
    from memstore.store.verify.verify_memory import verify_memory

    report = verify_memory(store, repair=repair)
    if as_json:
        console.emit({"clean": report.clean, **asdict(report)})
    else:
        for problem in report.problems:
            console.say(
                console.one_line(f"damaged: {problem.name or 'the memory'}: {problem.what}")
            )
        for name in report.dropped:
            console.say(console.one_line(f"dropped: {name}"))
        size = console.size(report.bytes)
        whole = f"{report.documents:,} documents, {report.records:,} records, {size}"
        console.say(
            f"{whole}: "
            f"{'clean' if report.clean or repair else 'whole, the rest is damaged (see --repair)'}"
        )
    if not (report.clean or repair):
        raise typer.Exit(1)


@command("export", "memstore export diary diary.memstore")
def export(
    name: Annotated[str, typer.Argument(help="The document.")],
    file: Annotated[Path, typer.Argument(help="The file to write: a new one, or an older export.")],
    store: ReadStore,
    as_json: Json = False,
) -> None:
    """Write one document to a file that `import` reads.

    Only a memory of the same model can import it.
    """
    from memstore.store.memory_store import MemoryStore

    with MemoryStore.open(store, read_only=True) as memory:
        written = memory.export_document(name, file)
    if as_json:
        console.emit({"name": name, "file": str(file), "bytes": written})
    else:
        console.say(f"{console.one_line(name)}: exported to {file}, {console.size(written)}")


@command("import", "memstore import diary.memstore --store other")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    store: Store,
    name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="Another name for the document.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read an exported document, making the memory if need be."""
    from memstore.share.document_file import DocumentFile
    from memstore.store.memory_store import MemoryStore
    from memstore.store.write.admission import check_name

    exported = DocumentFile(file)
    head = exported.head
    try:
        memory = MemoryStore.open(store)
    except MemoryNotFound:
        exported.check()  # so that a bad file makes no memory
        check_name(head.document.name if name is None else name)
        memory = MemoryStore.create(store, head.signature, selector=head.selector)
    with memory:
        document = memory.import_document(file, name)
    if as_json:
        console.emit({"imported": document.told()})
    else:
        console.say(
            f"{console.one_line(document.name)}: imported, {document.tokens:,} tokens, "
            f"{console.size(document.bytes)}"
        )


@command("compact", "memstore compact")
def compact(store: Store, as_json: Json = False) -> None:
    """Give the room of removed documents back to the disk.

    The file is rewritten; no other process may have the memory open.
    """
    from memstore.store.memory_store import MemoryStore

    with MemoryStore.open(store) as memory:
        before, after = memory.compact()
    if as_json:
        console.emit({"bytes_before": before, "bytes_after": after})
    else:
        console.say(f"{console.size(before)} before, {console.size(after)} after")


@command(
    "index",
    "memstore index",
    "memstore index --store s3://team/library",
    "memstore index --index faiss-ivf-sq8",
)
def index(
    store: ReadStore, kind: IndexKind = None, *, model_options: ModelOptions, as_json: Json = False
) -> None:
    """Build an approximate index over landmarks.

    For memories too large to search exactly. It is stored with the memory, or published with it,
    and used by every later command. Documents read later are searched exactly until there are
    enough of them to join it. Build it again after much has changed. --index is for models with
    landmark keys of their own.
    """
    options: OpenOptions = {}
    if kind is not None:
        options["index"] = kind
    with opened(store, model_options, options, read_only=is_url(store)) as (model, memory):
        if model.keeps != memory.selector:
            raise InvalidInput(
                "another selector of this model chose the passages; ingest the documents again "
                "into a new memory"
            )
        with_selector = model.keeps is not None
        if with_selector and options:
            raise InvalidInput("--index is for models with landmark keys; leave it out")
        began = time.monotonic()
        with console.working("index", "tokens" if with_selector else "layers") as show:
            built = model.build_index(memory, show)
        built["seconds"] = round(time.monotonic() - began, 3)
    if as_json:
        console.emit({"store": str(store), "index": built})
    elif with_selector:
        _say_lists(built)
    else:
        _say_engines(built)


def _say_lists(built: dict[str, Any]) -> None:
    lists = built["engines"]
    if not lists:
        console.say(
            "lists are made from two million tokens on, for selectors that keep a landmark of "
            "each; every passage is scored"
        )
        return
    console.say(
        f"{lists['lists']:,} lists of {lists['landmarks']:,} token landmarks of "
        f"{lists['passages']:,} passages, {console.size(lists['bytes'])}; {built['seconds']:.1f} s"
    )


def _say_engines(built: dict[str, Any]) -> None:
    for layer, engine in built["engines"].items():
        efforts, recalls = (", ".join(map(str, engine[name])) for name in ("effort", "recall"))
        held = f"{engine['family']} over {engine['landmarks']:,} landmarks"
        console.say(f"layer {layer}: {held}; effort of its heads {efforts}; recall {recalls}")
    console.say(
        f"{built['seconds']:.1f} s"
        if built["engines"]
        else "too few landmarks to index; they are searched exactly"
    )


COMMANDS = (ls, stats, rm, verify, export, import_, compact, index)
