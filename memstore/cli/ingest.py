"""The command that reads documents into a memory, or with Ray into a published one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.ingest_files import FileIngest, checked, text_of
from memstore.cli.ingest_ray import ingest_with_ray
from memstore.cli.opening import opened
from memstore.cli.options import Json, ModelOptions, Store, Tiers, flag, option
from memstore.errors import InvalidInput

if TYPE_CHECKING:
    from memstore.documents.folder import Files
    from memstore.model.model_api import ModelAPI
    from memstore.store.write.admission import Mode

# an ingest reads back only its latest blocks
INGEST_BUDGET = 128 << 20


@command(
    "ingest",
    "memstore ingest book.txt",
    "memstore ingest notes.txt --name diary --replace",
    "memstore ingest papers --sync --label team=research",
    "memstore ingest library --model smollm2",
    "memstore ingest library --to s3://team/library",
    interrupted="interrupted; what was read is stored, and the same command resumes",
)
def ingest(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Files, one document each: text, Markdown, PDF, HTML, Office, OpenDocument, EPUB, "
            "mail, CSV, notebooks; folders, with all files in them; patterns such as "
            "'notes/**/*.md'; - is standard input.",
        ),
    ],
    store: Store,
    *,
    name: Annotated[
        str | None,
        option(
            "--name",
            "N",
            "Name of the document; default: the file's. For a folder: prefix of the names.",
        ),
    ] = None,
    sync: Annotated[
        bool, flag("--sync", "Remove documents of these folders whose files are gone.")
    ] = False,
    replace: Annotated[bool, flag("--replace", "Replace a document of the same name.")] = False,
    label: Annotated[
        list[str] | None, option("--label", "KEY=VALUE", "Label of these documents (repeatable).")
    ] = None,
    codec: Annotated[
        str | None,
        option(
            "--codec",
            "NAME",
            "New memory: zstd or raw (lossless), int8 (smaller); default: the model's.",
        ),
    ] = None,
    keep: Annotated[
        Literal["kv", "text"] | None,
        typer.Option(
            "--keep",
            help="kv stores keys and values of passages; text stores only tokens, which questions "
            "read as text. Default: kv for a model with a reading adapter (`memstore adapt`).",
        ),
    ] = None,
    model_options: ModelOptions,
    tiers: Tiers,
    to: Annotated[
        str | None, option("--to", "URL", "Read on a Ray cluster, and publish the memory here.")
    ] = None,
    address: Annotated[
        str | None,
        option(
            "--address",
            "HOST:PORT",
            "Ray cluster; default: $RAY_ADDRESS, else one on this machine.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read documents into a memory; create the memory if it does not exist.

    The same text again changes nothing, and an interrupted ingest resumes. A file that cannot be
    read is reported, and the others are read (exit status 1).
    """
    labels = _labels(label)
    alone = {"sync": sync, "label": labels is not None}
    for option_name, given in alone.items():
        if to is not None and given:
            raise typer.BadParameter(f"--{option_name} does not go with --to")
    if to is None and address is not None:
        raise typer.BadParameter("--address goes with --to")
    if codec is not None:
        from memstore.disk.format.codec import get_codec

        get_codec(codec)  # refuses an unknown one, also if the memory exists
    mode: Mode = "replace" if replace else "new"
    found = _find(paths, name, sync, without=None if to else store)
    if not found.files:  # refused before a model is loaded or a memory created
        for error in found.refused[:-1]:
            console.report(error)
        nothing = InvalidInput(f"no file was found in {', '.join(paths)}; nothing is changed")
        raise found.refused[-1] if found.refused else nothing
    if to is not None:
        ingest_with_ray(
            found,
            to,
            model_options,
            codec=codec,
            keep=keep,
            replace=replace,
            address=address,
            as_json=as_json,
        )
        return
    one_file = len(paths) == 1 and not found.folders
    # a file that cannot be read is refused before a model is loaded
    first = checked(text_of(found.files[0])) if one_file else None
    options = tiers.options(INGEST_BUDGET)
    with opened(store, model_options, options, read_only=False, make=True, codec=codec) as (
        model,
        memory,
    ):
        new = not memory.ready()
        if codec not in (None, memory.codec):
            console.note(f"note: {store} exists and keeps its codec, {memory.codec}")
        files = FileIngest(model, memory, mode, keep, labels=labels, quiet=as_json)
        files.read(found, first)
        if sync:
            files.forget_lost(found)
        files.build_index()
        if new and not as_json:
            _note_adapter(model, keep)
    if as_json:
        console.emit({"store": str(store), **files.to_dict()})
    elif found.folders:
        console.say(files.summary())
    if files.failed:
        raise typer.Exit(1)


def _note_adapter(model: "ModelAPI", keep: str | None) -> None:
    """Say what a new memory of a model without a reading adapter lacks."""
    from memstore.model.passages.repositioned_attention import PassageModel

    if keep == "text" or not isinstance(model, PassageModel) or model.adapted_passages:
        return
    if keep is None:
        what = "passages are stored as text"
    else:
        what = "answers from several stored passages are less accurate than from text"
    console.note(f"note: this model has no reading adapter, so {what}; `memstore adapt` trains one")


def _labels(given: list[str] | None) -> dict[str, Any] | None:
    """Labels of KEY=VALUE: numbers, true, false and null are values, anything else is text. Raises
    typer.BadParameter.
    """
    from memstore.decode import from_json

    labels = dict[str, Any]()
    for one in given or ():
        key, found, value = one.partition("=")
        if not key or not found:
            raise typer.BadParameter(f"--label is KEY=VALUE, not {one!r}")
        try:
            labels[key] = from_json(value, float | int | bool | None)  # type: ignore[arg-type]
        except ValueError:
            labels[key] = value
    return labels or None


def _find(paths: list[str], name: str | None, sync: bool, without: Path | None) -> "Files":
    """The files to read. Raises typer.BadParameter for options that do not go with them."""
    from memstore.documents.folder import find

    one_name = typer.BadParameter("--name is for one PATH; several are named after their files")
    if name is not None and len(paths) > 1:
        raise one_name
    found = find(paths, name=name, without=without)
    if name is not None and len(found.files) > 1 and not found.folders:
        raise one_name
    if sync and not found.folders and not found.refused:
        raise typer.BadParameter("--sync is for folders: name one")
    return found


COMMANDS = (ingest,)
