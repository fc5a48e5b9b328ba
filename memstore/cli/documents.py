"""The commands that maintain a memory; only `index` needs the model."""

import json
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, ModelOptions, ReadStore, Store, flag, opened
from memstore.errors import InvalidInput, MemoryNotFound
from memstore.share.publication_options import is_url


@command("ls", "memstore ls", "memstore ls --store s3://team/library")
def ls(store: ReadStore, as_json: Json = False) -> None:
    """List the documents of a memory."""
    from memstore.store.memory_store import MemoryStore

    with MemoryStore.open(store, read_only=True) as memory:
        codec, manifest = memory.codec, memory.manifest
        documents = memory.documents()
    rows: list[tuple[object, ...]] = [("name", "state", "tokens", "blocks", "size", "since")]
    for d in documents:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(d.created))
        rows.append((d.name, d.state, d.tokens, d.blocks, console.stored(d.bytes, d.tokens), since))
    if any(d.labels for d in documents):
        labels = ["labels", *(", ".join(map(_label, d.labels.items())) for d in documents)]
        rows = [(*row, label) for row, label in zip(rows, labels)]
    published = "" if manifest is None else f"; manifest {manifest}"
    said = f"{console.columns(rows)}\nstored with {codec}" if documents else "no documents"
    result = {"codec": codec, "manifest": manifest, "documents": [d.told() for d in documents]}
    console.result(result, f"{said}{published}", as_json)


def _label(label: tuple[str, Any]) -> str:
    """A label as --label takes it."""
    key, value = label
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


@command("stats", "memstore stats")
def stats(store: ReadStore, as_json: Json = False) -> None:
    """Show how much a memory holds."""
    from memstore.store.memory_store import MemoryStore

    with MemoryStore.open(store, read_only=True) as memory:
        figures = memory.stats()
    lines = (f"{name:11}{console.one_line(value)}" for name, value in _described(figures).items())
    console.result(figures, "\n".join(lines), as_json)


def _described(figures: dict[str, Any]) -> dict[str, str]:
    """The figures of a memory in words."""
    tokens, stored = figures["tokens"], figures["bytes"]
    a_token = f", {console.size(stored / tokens)} a token" if stored else ""
    described = {
        "documents": f"{figures['documents']:,}",
        "tokens": f"{tokens:,} in {console.count(figures['blocks'], 'block')}",
        "model": figures["model"],
        "on disk": console.size(figures["file_bytes"]),
        "blocks": f"{console.stored(stored, tokens)}{a_token}; stored with {figures['codec']}",
        "manifest": None if figures["manifest"] is None else f"{figures['manifest']}",
    }
    passages = figures["passages"]
    if passages["different"]:
        whole = passages["stored"] == passages["different"]
        computed = "all" if whole else f"{passages['stored']:,}"
        different = f"{passages['different']:,} different"
        described["passages"] = f"{different}, {computed} with keys and values"
    return {name: value for name, value in described.items() if value is not None}


@command("rm", "memstore rm diary", "memstore rm diary letters --erase")
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of the documents.")],
    store: Store,
    erase: Annotated[
        bool, flag("--erase", "Rewrite the memory's file without any byte of the documents.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove documents from a memory.

    If one of the names is unknown, nothing is removed. The file keeps its size until `memstore
    compact`; until then, or until later documents overwrite them, bytes of the texts stay in it.
    --erase leaves nothing of the documents in the memory's files: no other process may have the
    memory open, and `memstore index` must build the index again.
    """
    from memstore.store.memory_store import MemoryStore

    names = list(dict.fromkeys(names))
    with MemoryStore.open(store) as memory:
        for name in names:
            memory.document(name)  # refused before anything is removed
        removed = [memory.forget(name, erase=erase) for name in names]
    text = "\n".join(console.described(one, "erased" if erase else "removed") for one in removed)
    console.result({"removed": [one.told() for one in removed], "erased": erase}, text, as_json)


@command("verify", "memstore verify", "memstore verify --repair")
def verify(
    store: ReadStore,
    repair: Annotated[bool, flag("--repair", "Remove damaged documents.")] = False,
    as_json: Json = False,
) -> None:
    """Check a whole memory; exit status 1 if something is damaged."""
    from memstore.store.verify import verify_memory

    report = verify_memory(store, repair=repair)
    lines = [f"damaged: {one.name or 'the memory'}: {one.what}" for one in report.problems]
    lines += [f"dropped: {name}" for name in report.dropped]
    mend = "`memstore verify --repair` removes the damaged documents"
    if is_url(store):
        mend = "`memstore share push --check` publishes the damaged documents again"
    state = "clean" if report.clean or repair else f"undamaged; {mend}"
    counts = f"{console.count(report.documents, 'document')}, "
    counts += f"{console.count(report.records, 'record')}, {console.size(report.bytes)}"
    text = "\n".join(map(console.one_line, [*lines, f"{counts}: {state}"]))
    console.result({"clean": report.clean, **asdict(report)}, text, as_json)
    if not (report.clean or repair):
        raise typer.Exit(1)


@command("export", "memstore export diary diary.memstore")
def export(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the document.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write: a new one, or an older export.")
    ],
    store: ReadStore,
    as_json: Json = False,
) -> None:
    """Write one document to a file that `memstore import` reads.

    Only a memory of the same model can import it.
    """
    from memstore.store.memory_store import MemoryStore
    from memstore.store.transfer import export_document

    with MemoryStore.open(store, read_only=True) as memory:
        written = export_document(memory, name, file)
    text = f"{console.one_line(name)}: exported to {file}, {console.size(written)}"
    console.result({"name": name, "file": str(file), "bytes": written}, text, as_json)


@command("import", "memstore import diary.memstore --store other")
def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file that `memstore export` wrote.")
    ],
    store: Store,
    name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="Another name for the document.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read an exported document into a memory, created if needed."""
    from memstore.share.document_file import DocumentFile
    from memstore.store.committed import check_name
    from memstore.store.memory_store import MemoryStore
    from memstore.store.transfer import import_document

    exported = DocumentFile(file)
    head = exported.head
    try:
        memory = MemoryStore.open(store)
    except MemoryNotFound:
        deque(exported.parts(), maxlen=0)  # so that a bad file makes no memory
        check_name(head.document.name if name is None else name)
        new: dict[str, Any] = {"codec": head.document.codec or "zstd", "selector": head.selector}
        memory = MemoryStore.create(store, head.signature, exist_ok=True, **new)
    with memory:
        document = import_document(memory, file, name)
    console.result({"imported": document.told()}, console.described(document, "imported"), as_json)


@command("compact", "memstore compact")
def compact(store: Store, as_json: Json = False) -> None:
    """Give the disk space of removed documents back to the file system.

    It rewrites the memory's file; no other process may have the memory open.
    """
    from memstore.store.memory_store import MemoryStore

    with MemoryStore.open(store) as memory:
        before, after = memory.compact()
    text = f"{console.size(before)} before, {console.size(after)} after"
    console.result({"bytes_before": before, "bytes_after": after}, text, as_json)


@command("index", "memstore index", "memstore index --store s3://team/library")
def index(store: ReadStore, *, model_options: ModelOptions, as_json: Json = False) -> None:
    """Build an approximate index, to search a large memory fast.

    It is stored or published with the memory, and later commands use it. Documents that are
    ingested later are searched exactly until it is built again.
    """
    with opened(store, model_options, {}, read_only=is_url(store)) as (model, memory):
        if model.keeps != memory.selector:
            raise InvalidInput(
                "the memory was written with another selector of this model; ingest again "
                "into a new memory"
            )
        began = time.monotonic()
        with console.working("index", "layers" if model.keeps is None else "tokens") as show:
            built = model.build_index(memory, show)
        built["seconds"] = round(time.monotonic() - began, 3)
    engines, seconds = built["engines"], f"{built['seconds']:.1f} s"
    if not engines:
        text = "the memory is small enough to be searched exactly: no index was built"
    elif model.keeps is not None:
        text = (
            f"{engines['lists']:,} lists of {engines['landmarks']:,} token landmarks of "
            f"{engines['passages']:,} passages, {console.size(engines['bytes'])}; {seconds}"
        )
    else:
        lines = [
            f"layer {layer}: {engine['landmarks']:,} landmarks; effort of its heads "
            f"{', '.join(map(str, engine['effort']))}; recall "
            f"{', '.join(map(str, engine['recall']))}"
            for layer, engine in engines.items()
        ]
        text = "\n".join([*lines, seconds])
    console.result({"store": str(store), "index": built}, text, as_json)


COMMANDS = (ls, stats, rm, verify, export, import_, compact, index)
