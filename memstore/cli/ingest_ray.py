"""Reading documents with a Ray cluster: progress, notes, refused files, and the result."""

import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from memstore.cli import console
from memstore.cli.options import ModelOptions

if TYPE_CHECKING:
    from memstore.disk.format.text_parts import Keep
    from memstore.documents.folder import Files
    from memstore.library.library_ingest import Progress
    from memstore.library.reading import Outcome


def ingest_with_ray(
    found: "Files",
    url: str,
    model_options: ModelOptions,
    *,
    codec: str | None,
    keep: "Keep | None",
    replace: bool,
    address: str | None,
    as_json: bool,
) -> None:
    """Read files on a Ray cluster, and publish them. Raises typer.Exit if a file was
    refused.
    """
    from memstore.documents.folder import STDIN
    from memstore.library import library_ingest
    from memstore.library.ray_engine import RayEngine
    from memstore.library.reading import Job

    if any(str(file.path) == STDIN for file in found.files):
        raise typer.BadParameter("standard input is read by one process; leave --to out")
    model, codec = _model_and_codec(url, model_options, codec)
    compute = model_options.compute
    job = Job(url, model, compute, codec, keep, replace)
    failed: list[dict[str, Any]] = [console.report(error) for error in found.refused]
    notes: list[dict[str, Any]] = []
    with ExitStack() as resources:
        resources.enter_context(redirect_stdout(sys.stderr))  # where Ray reports its processes
        engine = RayEngine(address, gpus=model_options.device != "cpu")
        resources.enter_context(engine)
        show = resources.enter_context(console.waiting("reading"))

        def on_progress(progress: "Progress", documents: "list[Outcome]") -> None:
            for document in documents:
                if document.error is not None:
                    name, message = document.error
                    message = console.one_line(message)
                    console.note(f"error: {message}")
                    failed.append({"document": document.name, "name": name, "message": message})
                for note in map(console.one_line, document.notes):
                    console.note(f"note: {console.one_line(document.name)}: {note}")
                if document.notes:
                    notes.append({"document": document.name, "notes": document.notes})
            show(
                f"{progress.documents.total():,} of {progress.files:,} documents, "
                f"{progress.passages:,} passages, {progress.tokens_per_second:,.0f} tokens a "
                f"second, about {console.duration(progress.seconds_left)} to go"
            )

        progress, number = library_ingest.ingest_library(found.files, job, engine, on_progress)
    counts = {status: progress.documents[status] for status in ("read", "there")}
    counts["refused"] = len(failed)
    if as_json:
        told = {"url": job.url, "number": number, **counts, "passages": progress.passages}
        told |= {"tokens": progress.tokens, "seconds": round(progress.seconds, 3)}
        console.emit({**told, "failed": failed, **({"notes": notes} if notes else {})})
    else:
        parts = [f"{count:,} {status}" for status, count in counts.items() if count]
        console.say(
            f"{len(found.files) + len(found.refused):,} files: {', '.join(parts) or 'nothing'}; "
            f"{progress.passages:,} passages, {progress.tokens:,} tokens in "
            f"{console.duration(progress.seconds)}, {progress.tokens_per_second:,.0f} a second; "
            f"manifest {number}"
        )
    if number:
        with console.working("index", "tokens") as indexing:
            library_ingest.index_library(job.url, indexing)
    if failed:
        raise typer.Exit(1)


def _model_and_codec(url: str, options: ModelOptions, codec: str | None) -> tuple[str, str | None]:
    """The model and the codec of what is published at a URL; those of the options if nothing is.
    Raises what `name_of` raises for a published memory's model.
    """
    from memstore.hf.models_by_name import default_name, name_of
    from memstore.share.manifest import find_newest
    from memstore.share.open_object_store import open_object_store

    newest = find_newest(open_object_store(url, make=True))
    if newest is None:
        model = options.model or default_name()
    else:
        codec = newest.codec
        model = str(name_of(newest.signature, url, options.model))
    if Path(model).exists():
        model = str(Path(model).absolute())  # its path on every machine
    return model, codec
