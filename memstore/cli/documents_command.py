"""The commands that look after a memory and need no model: ls, stats, rm, verify, export,
import, compact.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import AtLeast, Json, ReadStore, Store, asked_for
from memstore.cli.terminal import console
from memstore.errors import MemoryNotFound


@command("ls", "memstore ls", "memstore ls --store s3://team/library")
def ls(store: ReadStore, at_least: AtLeast = None, as_json: Json = False) -> None:
    """List the documents of a memory."""
    from memstore.disk.format.document import is_of_prompt
    from memstore.store.memory_store import MemoryStore

    with MemoryStore.open(store, read_only=True, **asked_for(at_least)) as memory:
        codec, manifest = memory.codec, memory.manifest
        documents = [row for row in memory.documents() if not is_of_prompt(row.name)]
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

    with MemoryStore.open(store, read_only=True, **asked_for(at_least)) as memory:
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
        shared = passages["shared_bytes"]
        more = f"; {console.size(shared)} of them stand in several places" if shared else ""
        console.say(
            f"{passages['different']:,} different passages, keys and values of "
            f"{passages['stored']:,}, {console.size(passages['bytes'])}{more}"
        )
    index = figures["index"]
    most = max(index["landmarks"].values(), default=0)
    built = f"; engines on disk {console.size(index['file_bytes'])}" if index["file_bytes"] else ""
    if most:
        console.say(f"index: {most:,} landmarks a head ({index['kind']}{built})")
    if figures["manifest"] is not None:
        console.say(f"published as manifest {figures['manifest']}")


@command("rm", "memstore rm diary", "memstore rm diary letters --erase")
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The documents.")],
    store: Store,
    erase: Annotated[
        bool,
        typer.Option(
            "--erase", help="Rewrite the memory's file without any byte of the documents."
        ),
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
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop damaged documents, whole.")
    ] = False,
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
    from memstore.store.memory_store import MemoryStore
    from memstore.store.transfer.exports import check_export, read_head
    from memstore.store.write.admission import check_name

    read_head(file)
    try:
        memory = MemoryStore.open(store)
    except MemoryNotFound:
        head = check_export(file)  # so that a bad file makes no memory
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


COMMANDS = (ls, stats, rm, verify, export, import_, compact)
