"""The commands that share a memory through an object store: push, pull, rm, merge, prune."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import Json, Store
from memstore.cli.terminal import console
from memstore.errors import MemoryNotFound

_SECONDS_BETWEEN_LINES = 5.0

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///path.",
    ),
]
Grace = Annotated[
    float | None,
    typer.Option(
        "--grace",
        metavar="HOURS",
        min=0,
        help="What went out of use is kept for these hours, by whoever prunes; default 24.",
    ),
]


@dataclass(frozen=True)
class SendOptions:
    """How documents are published, and how long what they replace is kept: an option a field."""

    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            metavar="kv|text",
            help="text: no keys and values of passages, which readers compute as they need them.",
        ),
    ] = "kv"
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Also in place of other content published by these names."),
    ] = False
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Read what is published of them, and send again what is damaged."
        ),
    ] = False
    grace: Grace = None


@command(
    "push",
    "memstore share push s3://team/library",
    "memstore share push file:///srv/library diary letters",
    "memstore share push s3://team/library --keep text",
    "memstore share push s3://team/library --check",
    interrupted="interrupted: nothing was published; push again to go on",
)
def push(
    url: Url,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="The documents; default: all that are ready."),
    ] = None,
    *,
    store: Store,
    sending: SendOptions,
    as_json: Json = False,
) -> None:
    """Publish documents to an object store.

    Any machine may ask them there. What is there already is not sent again. The credentials are
    those that the environment has for the object store's own tools.
    """
    from memstore.store.memory_store import MemoryStore

    how = {**vars(sending), "grace": _seconds(sending.grace)}
    with (
        MemoryStore.open(store, read_only=True) as memory,
        console.working("publishing", "documents") as show,
    ):
        report = memory.publish(url, names or None, progress=_now_and_then(show), **how)
    if as_json:
        console.emit(report._asdict())
        return
    sent = f"{report.segments:,} segments sent, {console.size(report.bytes)}"
    console.say(
        f"{len(report.documents):,} documents published, {len(report.there):,} were there; "
        f"{sent}; manifest {report.number}"
    )


def _seconds(hours: float | None) -> float | None:
    return None if hours is None else 3600 * hours


def _now_and_then(show: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Progress that is shown where something has happened since, a line in some seconds at most
    where there is no bar.
    """
    last = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal last
        if sys.stderr.isatty() or time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            show(done, total)

    return told


@command("pull", "memstore share pull s3://team/library diary")
def pull(
    url: Url,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The document.")],
    store: Store,
    as_name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="Another name for the document.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy a published document into a memory.

    The memory is made if need be.
    """
    from memstore.share.format.published import Published
    from memstore.share.objects.open_object_store import open_object_store
    from memstore.store.memory_store import MemoryStore
    from memstore.store.transfer.published_document import no_published
    from memstore.store.write.admission import check_name

    try:
        memory = MemoryStore.open(store)
    except MemoryNotFound:
        # so that a bad URL or name makes no memory
        published = Published.open(open_object_store(url))
        check_name(name if as_name is None else as_name)
        if published.entry(name) is None:
            raise no_published(published, name) from None
        manifest = published.manifest
        memory = MemoryStore.create(
            store, manifest.signature, codec=manifest.codec, selector=manifest.selector
        )
    with memory:
        document = memory.pull(name, url, as_name)
    if as_json:
        console.emit({"pulled": asdict(document)})
    else:
        console.say(
            f"{console.one_line(document.name)}: pulled, {document.tokens:,} tokens, "
            f"{console.size(document.bytes)}"
        )


@command("rm", "memstore share rm s3://team/library diary letters")
def rm(
    url: Url,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The documents.")],
    as_json: Json = False,
) -> None:
    """Take documents out of a published memory.

    Their bytes stay until `memstore share prune` removes them; who has the memory open may read
    them until then.
    """
    from memstore.share.objects.open_object_store import open_object_store
    from memstore.share.publish.publish import unpublish

    number = unpublish(open_object_store(url), names)
    if as_json:
        console.emit({"number": number, "documents": names})
    else:
        named = ", ".join(map(console.one_line, names))
        console.say(f"{named}: no longer published; manifest {number}")


@command("merge", "memstore share merge s3://team/library")
def merge(url: Url, grace: Grace = None, as_json: Json = False) -> None:
    """Write many small objects into few, and half-used ones anew."""
    from memstore.share.objects.open_object_store import open_object_store
    from memstore.share.publish.garbage_collection import GRACE
    from memstore.share.publish.merge import merge as write_anew

    seconds = _seconds(grace)
    merged = write_anew(open_object_store(url), grace=GRACE if seconds is None else seconds)
    if as_json:
        console.emit(merged._asdict())
        return
    console.say(
        f"{merged.before:,} small segments are now {merged.after:,}, "
        f"{console.size(merged.bytes)}, of {merged.documents:,} documents"
    )


@command("prune", "memstore share prune s3://team/library")
def prune(url: Url, grace: Grace = None, as_json: Json = False) -> None:
    """Remove what no longer belongs to a published memory."""
    from memstore.share.objects.open_object_store import open_object_store
    from memstore.share.publish.garbage_collection import GRACE
    from memstore.share.publish.garbage_collection import prune as remove

    seconds = _seconds(grace)
    pruned = remove(open_object_store(url), grace=GRACE if seconds is None else seconds)
    if as_json:
        console.emit(pruned._asdict())
        return
    console.say(
        f"{pruned.manifests:,} manifests and {pruned.objects:,} other objects removed, "
        f"{console.size(pruned.bytes)}"
    )


COMMANDS = (push, pull, rm, merge, prune)
