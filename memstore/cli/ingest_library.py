"""Reading documents in by a cluster: progress, what was refused and why, and what came of it."""

import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from memstore.cli.options.ingest_options import HowRead, OnCluster, WhichFiles
from memstore.cli.terminal import console

if TYPE_CHECKING:
    from memstore.documents.folder import Files
    from memstore.library.batch import Job, Told
    from memstore.library.progress import Progress


def ingest_library(
    paths: list[str], which: WhichFiles, how: HowRead, cluster: OnCluster, *, as_json: bool
) -> None:
    """Have a cluster read files, and publish them. Raises typer.Exit where a file was refused."""
    from memstore.documents.folder import STDIN
    from memstore.library import library_ingest
    from memstore.library.ray_engine import RayEngine

    if STDIN in paths:
        raise typer.BadParameter("standard input is read by one process; leave --engine out")
    found = which.find(paths, None, how.mode)
    job = _job(how, str(cluster.to))
    failed: list[dict[str, Any]] = []

    def refuse(name: str, message: str, document: str | None = None) -> None:
        message = console.one_line(message)
        console.note(f"error: {message}")
        told = {} if document is None else {"document": document}
        failed.append({**told, "name": name, "message": message})

    for error in found.refused:
        refuse(type(error).__name__, str(error))
    with ExitStack() as open_here:
        open_here.enter_context(redirect_stdout(sys.stderr))  # to which Ray tells of its processes
        engine = open_here.enter_context(RayEngine(cluster.address, gpus=how.by.device != "cpu"))
        show = open_here.enter_context(console.changing("reading"))
        served = _Served(open_here, cluster.metrics_port)

        def on_progress(progress: "Progress", documents: "list[Told]") -> None:
            served.progress = progress
            for told in documents:
                if told.error is not None:
                    refuse(*told.error, told.name)
            show(_line(progress))

        progress, number = library_ingest.ingest_library(found.files, job, engine, on_progress)
    _tell(progress, number, job, found, failed, as_json=as_json)
    if number:
        with console.working("index", "tokens") as indexing:
            library_ingest.index_library(job.url, indexing)
    if failed:
        raise typer.Exit(1)


def _job(how: HowRead, url: str) -> "Job":
    """Raises what `name_of` raises for a published memory's model."""
    from memstore.hf.models_by_name import default_name, name_of
    from memstore.library.batch import Job
    from memstore.share.format.published import Published
    from memstore.share.objects.open_object_store import open_object_store

    codec, newest = how.codec, Published.newest(open_object_store(url, make=True))
    if newest is None:
        model = how.by.model or default_name()
    else:
        codec = newest.manifest.codec
        model = str(name_of(newest.manifest.signature, url, how.by.model))
    if Path(model).exists():
        model = str(Path(model).absolute())  # where it lies on every machine
    settings = tuple(how.settings.items())
    return Job(url, model, how.by.compute, codec, how.kept, how.replace, settings)


class _Served:
    """Metrics of how far it is, at a port if one is given."""

    def __init__(self, open_here: ExitStack, port: int | None) -> None:
        self.progress: Progress | None = None
        if port is not None:
            from memstore.serve.metrics import ADDRESS, served

            port = open_here.enter_context(served(self, port))
            console.note(f"metrics at http://{ADDRESS}:{port}/metrics")

    def collect(self) -> Any:
        """As Progress.collect, once something is done."""
        return () if self.progress is None else self.progress.collect()


def _line(progress: "Progress") -> str:
    done = progress.documents.total()
    return (
        f"{done:,} of {progress.files:,} documents, {progress.passages:,} passages, "
        f"{progress.tokens_per_second:,.0f} tokens a second, about "
        f"{console.duration(progress.seconds_left)} to go"
    )


def _tell(
    progress: "Progress",
    number: int,
    job: "Job",
    found: "Files",
    failed: list[dict[str, Any]],
    *,
    as_json: bool,
) -> None:
    counts = {status: progress.documents[status] for status in ("read", "there")}
    counts["refused"] = len(failed)
    if as_json:
        told = {"url": job.url, "number": number, **counts, "passages": progress.passages}
        told |= {"tokens": progress.tokens, "seconds": round(progress.seconds, 3)}
        console.emit({**told, "failed": failed})
        return
    parts = [f"{count:,} {status}" for status, count in counts.items() if count]
    console.say(
        f"{len(found.files) + len(found.refused):,} files: {', '.join(parts) or 'nothing'}; "
        f"{progress.passages:,} passages, {progress.tokens:,} tokens in "
        f"{console.duration(progress.seconds)}, {progress.tokens_per_second:,.0f} a second; "
        f"manifest {number}"
    )
