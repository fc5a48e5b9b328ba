"""The command `ingest`: files one by one into a memory, or with Ray into a published one. Unchanged
files are skipped, unreadable ones reported, and with --sync documents of deleted files removed.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, ModelOptions, Store, Tiers, flag, opened, option
from memstore.errors import DocumentExists, InvalidInput

if TYPE_CHECKING:
    from memstore.disk.format.document import Document
    from memstore.disk.tables.texts import Keep
    from memstore.documents.folder import File, Files, Source
    from memstore.library.library_ingest import Progress
    from memstore.library.reading import Outcome
    from memstore.model.model_api import ModelAPI
    from memstore.model.source_text import IngestProgress, Text
    from memstore.store.committed import Mode
    from memstore.store.memory_store import MemoryStore

_OWN = (InvalidInput, DocumentExists)  # errors of one file, which do not stop the others
# small, since an ingest reads only its latest blocks
INGEST_BUDGET = 128 << 20


@command(
    "ingest",
    "memstore ingest book.txt",
    "memstore ingest notes.txt --name diary --replace",
    "memstore ingest papers --sync --label team=research",
    "memstore ingest library --exclude '*.log' --exclude node_modules",
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
    exclude: Annotated[
        list[str] | None,
        option("--exclude", "PATTERN", "Skip paths whose end matches this (repeatable)."),
    ] = None,
    replace: Annotated[bool, flag("--replace", "Replace a document of the same name.")] = False,
    label: Annotated[
        list[str] | None, option("--label", "KEY=VALUE", "Label of these documents (repeatable).")
    ] = None,
    codec: Annotated[
        Literal["zstd", "raw", "int8"] | None,
        typer.Option(
            "--codec",
            help="New memory: zstd or raw (lossless), int8 (smaller); default: the model's.",
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
        str | None, option("--to", "URL", "Ingest on a Ray cluster, and publish to this URL.")
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
    """Read documents into a memory, which is created if needed.

    Ingesting the same text again changes nothing, and an interrupted ingest resumes. A file that
    cannot be read is reported, and the others are read (exit status 1). Hidden files and folders in
    a folder, such as .git, are skipped; --exclude '*.log' --exclude 'drafts/*' skips more.
    """
    labels = _labels(label)
    for option_name, given in (("--sync", sync), ("--label", labels)):
        if to is not None and given:
            raise typer.BadParameter(f"{option_name} cannot be used with --to")
    if to is None and address is not None:
        raise typer.BadParameter("--address needs --to")
    mode: Mode = "replace" if replace else "new"
    found = _find(paths, name, sync, None if to else store, exclude or ())
    if not found.files:  # refused before a model is loaded or a memory created
        for error in found.refused[:-1]:
            console.report(error)
        nothing = InvalidInput(f"no file was found in {', '.join(paths)}; nothing is changed")
        raise found.refused[-1] if found.refused else nothing
    if to is not None:
        _ingest_with_ray(found, to, model_options, codec, keep, replace, address, as_json)
        return
    one_file = len(paths) == 1 and not found.folders
    # a file that cannot be read is refused before a model is loaded
    first = _checked(_text_of(found.files[0])) if one_file else None
    options = tiers.options(INGEST_BUDGET)
    with opened(store, model_options, options, read_only=False, make=True, codec=codec) as (
        model,
        memory,
    ):
        new = not memory.ready()
        if codec not in (None, memory.codec):
            console.note(f"note: {store} exists and keeps its codec, {memory.codec}")
        files = _FileIngest(model, memory, mode, keep, labels, as_json)
        files.failed += map(console.report, found.refused)
        if first is not None:
            files.read(first, mode)
        else:
            files.read_all(found)
        if sync:
            files.forget_lost(found)
        if memory.update_index():
            with console.working("index", "layers" if model.keeps is None else "tokens") as show:
                model.build_index(memory, show)
        if new and not as_json:
            _note_adapter(model, keep)
    if as_json:
        console.emit({"store": str(store), **files.to_dict()})
    elif found.folders:
        console.say(files.summary())
    if files.failed:
        raise typer.Exit(1)


def _note_adapter(model: "ModelAPI", keep: str | None) -> None:
    """Write a note on a model without a reading adapter."""
    from memstore.model.passages.repositioned_attention import PassageModel

    if keep == "text" or not isinstance(model, PassageModel) or model.adapted_passages:
        return
    if keep is None:
        what = "passages are stored as text"
    else:
        what = "answers from several stored passages are less accurate than from text"
    console.note(f"note: this model has no reading adapter, so {what}; `memstore adapt` trains one")


def _labels(given: list[str] | None) -> dict[str, Any] | None:
    """Labels of KEY=VALUE; VALUE may be JSON's number or constant. Raises typer.BadParameter."""
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


def _find(
    paths: list[str], name: str | None, sync: bool, without: Path | None, exclude: Sequence[str]
) -> "Files":
    """The files to read. Raises typer.BadParameter for options that do not go with them."""
    from memstore.documents.folder import find

    if name is not None and len(paths) > 1:
        raise typer.BadParameter("--name is for one PATH; several are named after their files")
    found = find(paths, name=name, without=without, exclude=exclude)
    if sync and not found.folders and not found.refused:
        raise typer.BadParameter("--sync is for folders: name one")
    return found


def _text_of(file: "File", source: "Source | None" = None) -> "Text":
    """The text of a file. Raises InvalidInput."""
    from memstore.documents import read
    from memstore.documents.converted import LIMITS
    from memstore.documents.folder import STDIN
    from memstore.model.source_text import Text

    if str(file.path) == STDIN and file.folder is None:
        data = sys.stdin.buffer.read(LIMITS.file_bytes + 1)
        return Text(read(data, "standard input"), file.name)
    return Text(file.path, file.name, source=None if source is None else source.to_dict())


def _checked(text: "Text", which: str = "") -> "Text":
    """Convert a text, with a progress display. Raises InvalidInput."""
    with console.waiting(f"{which}looking at {console.one_line(text.name)}"):
        text.check()
    return text


@dataclass
class _FileIngest:
    """Reads files into an open memory, and collects the results. keep: as for ModelAPI.ingest;
    labels: of the documents, None leaves them unchanged; quiet: print no results.
    """

    model: "ModelAPI"
    memory: "MemoryStore"
    mode: "Mode"
    keep: str | None
    labels: dict[str, Any] | None
    quiet: bool
    failed: list[dict[str, Any]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def read_all(self, found: "Files") -> None:
        """Read files that are not checked yet; their errors are reported."""
        many = len(found.files) if found.folders else 0
        for number, file in enumerate(found.files, 1):
            try:
                self._read_file(file, f"[{number:,} of {many:,}] " if many else "")
            except _OWN as error:
                self.failed.append(console.report(error))

    def _read_file(self, file: "File", which: str) -> None:
        """Read a file, unless its document was made from the same bytes of the same file."""
        from memstore.documents.folder import Source

        with console.waiting(f"{which}looking at {console.one_line(file.name)}"):
            seen = file.look()
        there = self.memory.document(file.name) if self.memory.has(file.name) else None
        known = None if there is None or self.mode == "replace" else Source.of(there)
        if there is not None and there.state == "ready" and seen is not None and known == seen:
            if self.labels is not None:
                from memstore.disk.format.document import LABELS

                self.memory.describe(there.name, there.metadata | {LABELS: self.labels})
            self.results.append(_result(there, "unchanged"))
            return
        changed = known is not None and seen is not None and known.is_of(seen)
        text = _checked(_text_of(file, seen), which)
        self.read(text, "replace" if changed else self.mode, which)

    def read(self, text: "Text", mode: "Mode", which: str = "") -> None:
        """Read one text. which: "[2 of 7] " for one of many files."""
        known = self.memory.has(text.name)
        text.labels = self.labels
        name = console.one_line(text.name)
        began = time.monotonic()
        seen: list[IngestProgress] = []  # the latest only

        with console.waiting(f"{which}{text.name}") as show:

            def progress(at: "IngestProgress") -> None:
                first, seen[:] = not seen, [at]
                if at.characters >= at.total_characters:
                    return  # the line of the result follows
                if first and not which:
                    console.note(
                        f"{name}: {at.tokens_per_second:,.0f} tokens a second, about "
                        f"{console.duration(at.seconds_left)} to go"
                    )
                share = 100 * at.characters // max(at.total_characters, 1)
                seconds = time.monotonic() - began
                show(f"{which}{name}: {share}% read, {at.tokens:,} tokens, {seconds:.0f} s")

            document = self.model.ingest(
                text, self.memory, mode=mode, progress=progress, keep=self.keep
            )
        resumed_at = seen[0].resumed_tokens if seen else 0
        if not seen:
            status = "unchanged"
        elif resumed_at:
            status = "resumed"
        else:
            status = "replaced" if known else "read"
        result = _result(document, status, resumed_at, round(time.monotonic() - began, 3))
        self.results.append(result)
        if not self.quiet:
            console.say(_result_line(result))

    def forget_lost(self, found: "Files") -> None:
        """Forget documents whose files are gone, except of a folder without any file."""
        from memstore.documents.folder import Source

        for folder in found.folders:
            from_here = [
                (document, source)
                for document in self.memory.documents()
                if (source := Source.of(document)) is not None and source.folder == folder.digest
            ]
            lost = [document for document, source in from_here if folder.has_lost(source)]
            if lost and not any(file.folder == folder for file in found.files):
                error = InvalidInput(
                    f"no file was found in {folder.path}, so no document of it was removed; check "
                    "the path, or remove documents by name with `memstore rm`"
                )
                self.failed.append(console.report(error))
                continue
            for document in lost:
                self.memory.forget(document.name)
                self.forgotten.append(document.name)
                if not self.quiet:
                    console.say(f"{console.one_line(document.name)}: removed, its file is gone")

    def to_dict(self) -> dict[str, Any]:
        """The results of all files, as plain values."""
        more = {"forgotten": self.forgotten, "failed": self.failed}
        return {"documents": self.results, **{name: one for name, one in more.items() if one}}

    def summary(self) -> str:
        """The same in one line."""
        counts = Counter(result["status"] for result in self.results)
        counts |= {"removed": len(self.forgotten), "not read": len(self.failed)}
        return _files_line(len(self.results) + len(self.failed), counts)


def _result(
    document: "Document", status: str, resumed_at: int = 0, seconds: float = 0.0
) -> dict[str, Any]:
    """The result of a document, as plain values. resumed_at: the first token read now."""
    return {
        "name": document.name,
        "status": status,
        "resumed_at": resumed_at,
        "blocks": document.blocks,
        "tokens": document.tokens,
        "bytes": document.bytes,
        "seconds": seconds,
        **({"notes": document.notes} if document.notes else {}),
    }


def _result_line(result: dict[str, Any]) -> str:
    status = result["status"]
    if status == "resumed":
        status += f" at token {result['resumed_at']:,}"
    blocks = console.count(result["blocks"], "block")
    tokens = console.count(result["tokens"], "token")
    figures = f"{blocks}, {tokens}, {console.stored(result['bytes'], result['tokens'])}"
    notes = "".join(f"\n  note: {console.one_line(note)}" for note in result.get("notes", ()))
    name = console.one_line(result["name"])
    return f"{name}: {status}; {figures}, {result['seconds']:.1f} s{notes}"


def _files_line(files: int, counts: Mapping[str, int]) -> str:
    """The number of files, and the counts of their outcomes."""
    parts = [f"{count:,} {status}" for status, count in counts.items() if count]
    return f"{console.count(files, 'file')}: {', '.join(parts) or 'nothing'}"


# On a Ray cluster


def _ingest_with_ray(
    found: "Files",
    url: str,
    model_options: ModelOptions,
    codec: str | None,
    keep: "Keep | None",
    replace: bool,
    address: str | None,
    as_json: bool,
) -> None:
    """Read files on a Ray cluster, and publish them. Raises typer.Exit for a refused file."""
    from memstore.documents.folder import STDIN
    from memstore.library import library_ingest
    from memstore.library.ray_engine import RayEngine
    from memstore.library.reading import Job

    if any(str(file.path) == STDIN for file in found.files):
        raise typer.BadParameter("--to cannot read standard input; name files")
    model, codec = _model_and_codec(url, model_options, codec)
    job = Job(url, model, model_options.compute, codec, keep, replace)
    failed: list[dict[str, Any]] = [console.report(error) for error in found.refused]
    notes: list[dict[str, Any]] = []
    with (
        redirect_stdout(sys.stderr),  # where Ray reports its processes
        RayEngine(address, gpus=model_options.device != "cpu") as engine,
        console.waiting("reading") as show,
    ):

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
    told: dict[str, Any] = {"url": url, "number": number, **counts, "passages": progress.passages}
    told |= {"tokens": progress.tokens, "seconds": round(progress.seconds, 3), "failed": failed}
    text = (
        f"{_files_line(len(found.files) + len(found.refused), counts)}; "
        f"{progress.passages:,} passages, {progress.tokens:,} tokens in "
        f"{console.duration(progress.seconds)}, {progress.tokens_per_second:,.0f} a second; "
        f"manifest {number}"
    )
    console.result(told | ({"notes": notes} if notes else {}), text, as_json)
    if number:
        with console.working("index", "tokens") as indexing:
            library_ingest.index_library(url, indexing)
    if failed:
        raise typer.Exit(1)


def _model_and_codec(url: str, options: ModelOptions, codec: str | None) -> tuple[str, str | None]:
    """The model and codec of the memory published at a URL, else of the options. Raises what
    `name_of` raises for a published memory's model.
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
        model = str(Path(model).absolute())  # workers have other working directories
    return model, codec


COMMANDS = (ingest,)
