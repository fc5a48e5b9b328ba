"""The commands that share a memory through an object store: push, pull, rm, prune."""

from typing import Annotated, Any, Literal

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, Store, flag, option

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///path.",
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help="Names of the documents; default: all."),
]
Grace = Annotated[
    float, option("--grace", "HOURS", "Hours for which unused objects stay in the store.", min=0)
]


@command(
    "push",
    "memstore share push s3://team/library",
    "memstore share push file:///srv/library diary letters",
    "memstore share push s3://team/library --keep text",
    "memstore share push s3://team/library --check",
    interrupted="interrupted; nothing was published; the same command resumes",
)
def push(
    url: Url,
    names: Names = None,
    *,
    store: Store,
    keep: Annotated[
        Literal["kv", "text"],
        typer.Option(
            "--keep",
            help="text publishes no keys and values of passages; readers compute them on demand.",
        ),
    ] = "kv",
    replace: Annotated[
        bool, flag("--replace", "Replace published documents of the same names.")
    ] = False,
    check: Annotated[
        bool, flag("--check", "Verify the published objects, and upload damaged ones again.")
    ] = False,
    grace: Grace = 24.0,
    as_json: Json = False,
) -> None:
    """Publish documents to an object store, for any machine to ask.

    Objects that are already published are not uploaded again. Credentials come from the same
    environment variables and files as those of the object store's own tools.
    """
    from memstore.store.memory_store import MemoryStore
    from memstore.store.transfer import publish_memory

    with (
        MemoryStore.open(store, read_only=True) as memory,
        console.working("publishing", "documents") as show,
    ):
        report = publish_memory(
            memory,
            url,
            names or None,
            progress=show,
            keep=keep,
            replace=replace,
            check=check,
            grace=3600 * grace,
        )
    sent = f"{console.count(report.segments, 'segment')} sent, {console.size(report.bytes)}"
    text = (
        f"{console.count(len(report.documents), 'document')} published, {len(report.there):,} "
        f"unchanged; {sent}; manifest {report.number}"
    )
    console.result(report._asdict(), text, as_json)


@command(
    "pull",
    "memstore share pull s3://team/library diary",
    "memstore share pull file:///backup/library --store restored",
    interrupted="interrupted; what was pulled is stored, and the same command resumes",
)
def pull(
    url: Url,
    names: Names = None,
    *,
    store: Store,
    as_name: Annotated[str | None, option("--name", "N", "Another name for one document.")] = None,
    as_json: Json = False,
) -> None:
    """Copy published documents into a memory, created if needed."""
    from memstore.share.manifest import read_newest
    from memstore.share.open_object_store import open_object_store
    from memstore.store.committed import check_name
    from memstore.store.memory_store import MemoryStore
    from memstore.store.transfer import PublishedDocument, import_from

    if as_name is not None and len(names or ()) != 1:
        raise typer.BadParameter("--name is for one NAME")
    # check everything before a memory is made
    objects = open_object_store(url)
    manifest = read_newest(objects)
    names = list(dict.fromkeys(names or manifest.entries))
    sources = [PublishedDocument.named(objects, manifest, name) for name in names]
    if as_name is not None:
        check_name(as_name)
    new: dict[str, Any] = {"codec": manifest.codec, "selector": manifest.selector}
    memory = MemoryStore.create(store, manifest.signature, exist_ok=True, **new)
    documents = []
    with memory, console.working("pulling", "documents") as show:
        for source in sources:
            documents.append(import_from(memory, source, url, as_name))
            show(len(documents), len(sources))
    lines = [console.described(document, "pulled") for document in documents]
    told = {"pulled": [document.told() for document in documents]}
    console.result(told, "\n".join(lines) or "no documents", as_json)


@command("rm", "memstore share rm s3://team/library diary letters")
def rm(
    url: Url,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of the documents.")],
    as_json: Json = False,
) -> None:
    """Remove documents from a published memory.

    Their bytes stay in the store until `memstore share prune` removes them. Until then a process
    that has the memory open may read them.
    """
    from memstore.share.open_object_store import open_object_store
    from memstore.share.publish import unpublish

    number = unpublish(open_object_store(url), names)
    named = ", ".join(map(console.one_line, names))
    text = f"{named}: no longer published; manifest {number}"
    console.result({"number": number, "documents": names}, text, as_json)


@command("prune", "memstore share prune s3://team/library")
def prune(url: Url, grace: Grace = 24.0, as_json: Json = False) -> None:
    """Remove objects that a published memory no longer uses."""
    from memstore.share.open_object_store import open_object_store
    from memstore.share.publish import prune as remove

    pruned = remove(open_object_store(url), grace=3600 * grace)
    counts = f"{pruned.manifests:,} manifests and {pruned.objects:,} other objects"
    text = f"{counts} removed, {console.size(pruned.bytes)}"
    console.result(pruned._asdict(), text, as_json)


COMMANDS = (push, pull, rm, prune)
