"""The commands that share a memory through an object store: publish, unpublish, pull."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import Json, Store, parse_directory
from memstore.cli.terminal import console
from memstore.errors import MemoryNotFound

_SECONDS_BETWEEN_LINES = 5.0
_WHERE = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///path."


@dataclass(frozen=True)
class SendOptions:
    """How documents are published: an option a field."""

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


@dataclass(frozen=True)
class UpkeepOptions:
    """What is done for what is published, afterwards: an option a field."""

    merge: Annotated[
        bool, typer.Option("--merge", help="Then write what lies in many small objects into few.")
    ] = False
    prune: Annotated[
        bool, typer.Option("--prune", help="Then remove what no longer belongs to it.")
    ] = False
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="HOURS",
            min=0,
            help="What went out of use is kept for these hours, by whoever prunes; default 24.",
        ),
    ] = None


@command(
    "publish",
    "memstore publish --store mem --to s3://team/library",
    "memstore publish diary --store mem --to file:///srv/library",
    "memstore publish --keep text --store mem --to s3://team/library",
    "memstore publish --check --store mem --to s3://team/library",
    "memstore publish --merge --prune --to s3://team/library",
    interrupted="interrupted: nothing was published; publish again to go on",
)
def publish(
    to: Annotated[str, typer.Option("--to", metavar="URL", help=f"Where: {_WHERE}")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="The documents; default: all that are ready."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store", metavar="DIR", help="Directory of the memory.", parser=parse_directory
        ),
    ] = None,
    *,
    sending: SendOptions,
    upkeep: UpkeepOptions,
    as_json: Json = False,
) -> None:
    """Publish documents to an object store, where any machine may ask them.

    What is there already is not sent again. The credentials are those that the environment has for
    the object store's own tools.
    """
    asked = names or sending != SendOptions()
    if store is None and (asked or not (upkeep.prune or upkeep.merge)):
        raise typer.BadParameter("name the memory to publish from by --store")
    seconds = None if upkeep.grace is None else 3600 * upkeep.grace
    said: dict[str, Any] = {}
    if store is not None:
        how = {**vars(sending), "grace": seconds}
        said |= _published(store, names or None, to, how, quiet=as_json)
    if upkeep.merge:
        said["merged"] = _merged(to, seconds, quiet=as_json)
    if upkeep.prune:
        said["pruned"] = _pruned(to, seconds, quiet=as_json)
    if as_json:
        console.emit(said)


def _published(
    store: Path, names: list[str] | None, to: str, how: dict[str, Any], *, quiet: bool
) -> dict[str, Any]:
    from memstore.store.memory_store import MemoryStore

    with (
        MemoryStore.open(store, read_only=True) as memory,
        console.working("publishing", "documents") as show,
    ):
        report = memory.publish(to, names, progress=_now_and_then(show), **how)
    if not quiet:
        sent = f"{report.segments:,} segments sent, {console.size(report.bytes)}"
        console.say(
            f"{len(report.documents):,} documents published, {len(report.there):,} were there; "
            f"{sent}; manifest {report.number}"
        )
    return report._asdict()


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


def _merged(to: str, grace: float | None, *, quiet: bool) -> dict[str, Any]:
    from memstore.share.objects.open_object_store import open_object_store
    from memstore.share.publish.garbage_collection import GRACE
    from memstore.share.publish.merge import merge

    merged = merge(open_object_store(to), grace=GRACE if grace is None else grace)
    if not quiet:
        console.say(
            f"{merged.before:,} small segments are now {merged.after:,}, "
            f"{console.size(merged.bytes)}, of {merged.documents:,} documents"
        )
    return merged._asdict()


def _pruned(to: str, grace: float | None, *, quiet: bool) -> dict[str, Any]:
    from memstore.share.objects.open_object_store import open_object_store
    from memstore.share.publish.garbage_collection import GRACE, prune

    pruned = prune(open_object_store(to), grace=GRACE if grace is None else grace)
    if not quiet:
        console.say(
            f"{pruned.manifests:,} manifests and {pruned.objects:,} other objects removed, "
            f"{console.size(pruned.bytes)}"
        )
    return pruned._asdict()


@command("unpublish", "memstore unpublish diary --from s3://team/library")
def unpublish(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The documents.")],
    from_: Annotated[str, typer.Option("--from", metavar="URL", help=f"Where: {_WHERE}")],
    as_json: Json = False,
) -> None:
    """Take documents out of a published memory.

    Their bytes stay until `memstore publish --prune` removes them; who has the memory open may read
    them until then.
    """
    from memstore.share.objects.open_object_store import open_object_store
    from memstore.share.publish.publish import unpublish as take_out

    number = take_out(open_object_store(from_), names)
    if as_json:
        console.emit({"number": number, "documents": names})
    else:
        named = ", ".join(map(console.one_line, names))
        console.say(f"{named}: no longer published; manifest {number}")


@command("pull", "memstore pull diary --from s3://team/library --store mem")
def pull(
    name: Annotated[str, typer.Argument(help="The document.")],
    from_: Annotated[str, typer.Option("--from", metavar="URL", help=f"Where: {_WHERE}")],
    store: Store,
    as_name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="Another name for the document.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Copy a published document into a memory of this machine, making that if need be."""
    from memstore.share.format.published import Published
    from memstore.share.objects.open_object_store import open_object_store
    from memstore.store.memory_store import MemoryStore
    from memstore.store.transfer.published_document import no_published
    from memstore.store.write.admission import check_name

    try:
        memory = MemoryStore.open(store)
    except MemoryNotFound:
        published = Published.open(
            open_object_store(from_)
        )  # so that a bad URL or name makes no memory
        check_name(name if as_name is None else as_name)
        if published.entry(name) is None:
            raise no_published(published, name) from None
        manifest = published.manifest
        memory = MemoryStore.create(
            store, manifest.signature, codec=_codec(manifest.codec), selector=manifest.selector
        )
    with memory:
        document = memory.pull(name, from_, as_name)
    if as_json:
        console.emit({"pulled": asdict(document)})
    else:
        console.say(
            f"{console.one_line(document.name)}: pulled, {document.tokens:,} tokens, "
            f"{console.size(document.bytes)}"
        )


def _codec(name: str) -> str:
    """The codec of a new memory beside one in this: old ones may have what new ones do not."""
    return name.removesuffix("+zstd")


COMMANDS = (publish, unpublish, pull)
