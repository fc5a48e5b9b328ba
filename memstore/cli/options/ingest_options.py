"""What can be chosen about reading documents into a memory on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.cli.options.command_options import MetricsPort, ScoreRange, TopK, parse_size
from memstore.cli.options.model_options import ModelOptions

if TYPE_CHECKING:
    from memstore.disk.format.text_parts import Keep
    from memstore.documents.folder import Files
    from memstore.model.model_api import ModelAPI
    from memstore.store.write.admission import Mode


@dataclass(frozen=True)
class WhichFiles:
    """Which files are read, and under what names: an option a field."""

    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="N",
            help="Name of the document; default: the file's. Of a folder's, what they begin with.",
        ),
    ] = None
    recursive: Annotated[
        bool,
        typer.Option(
            "--recursive",
            "-r",
            help="Read the files in folders; changed ones replace their documents.",
        ),
    ] = False
    sync: Annotated[
        bool,
        typer.Option(
            "--sync", help="Forget documents of these folders whose files are there no more."
        ),
    ] = False

    def find(self, paths: list[str], store: Path | None, mode: "Mode") -> "Files":
        """The files. Raises typer.BadParameter for options that do not go with them."""
        from memstore.documents.folder import find

        several = typer.BadParameter("--name is for one PATH; several are named after their files")
        if self.name is not None and len(paths) > 1:
            raise several
        found = find(paths, recursive=self.recursive, name=self.name, without=store)
        if self.name is not None and len(found.files) > 1 and not found.folders:
            raise several
        if self.sync and not found.folders and not found.refused:
            raise typer.BadParameter("--sync is for folders: name one, with --recursive")
        if mode == "append" and found.folders:
            raise typer.BadParameter("--append continues a document; it is not for folders")
        return found


@dataclass(frozen=True)
class HowRead:
    """How they are read, and kept: an option a field."""

    by: ModelOptions
    append: Annotated[
        bool, typer.Option("--append", help="Continue the document of that name with this text.")
    ] = False
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Put this text in the place of the document of that name."),
    ] = False
    retrieve: Annotated[
        bool, typer.Option("--retrieve", help="Attend to retrieved blocks while reading (slower).")
    ] = False
    top_k: TopK = None
    score_range: ScoreRange = None
    chunk_blocks: Annotated[
        int | None, typer.Option("--chunk-blocks", metavar="N", help="Blocks read at once.")
    ] = None
    quota: Annotated[
        int | None,
        typer.Option(
            "--quota",
            metavar="SIZE",
            parser=parse_size,
            help="Most that the memory's file may take.",
        ),
    ] = None
    codec: Annotated[
        str | None,
        typer.Option(
            "--codec",
            metavar="NAME",
            help="Of a new memory: zstd or raw, lossless; int8, smaller. Default: zstd; "
            "int8 where a selector chooses blocks, as for --model smollm2.",
        ),
    ] = None
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            metavar="kv|text",
            help="text: no keys and values, which a question computes as it needs them (a selector "
            "chooses blocks).",
        ),
    ] = "kv"
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            help="Processes that read, which share the cores; what is stored is the same (a "
            "selector chooses blocks).",
        ),
    ] = 1

    def check(self) -> None:
        """Raises typer.BadParameter for options that do not go together, InvalidConfig for a codec
        that is unknown, whether or not the memory exists.
        """
        from memstore.disk.format.codec import get_codec

        if self.append and self.replace:
            raise typer.BadParameter("--append and --replace exclude each other")
        if self.score_range is not None and not self.retrieve:
            raise typer.BadParameter(
                "--score-range chooses among retrieved blocks; it goes with --retrieve"
            )
        if self.codec is not None:
            get_codec(self.codec)

    @property
    def mode(self) -> "Mode":
        """What becomes of a document that is there already."""
        return "append" if self.append else "replace" if self.replace else "new"

    @property
    def kept(self) -> "Keep":
        """Raises typer.BadParameter for what cannot be kept."""
        if self.keep not in ("kv", "text"):
            raise typer.BadParameter(f"--keep is kv or text, not {self.keep}")
        return "kv" if self.keep == "kv" else "text"

    def lookup(self, reader: "ModelAPI") -> dict[str, Any]:
        """How a model looks up while it reads. Raises InvalidConfig for a setting out of range."""
        reader.lookup.changed(**self._looked_up)
        return self.settings

    @property
    def settings(self) -> dict[str, Any]:
        """What `ModelAPI.ingest` is told."""
        more: dict[str, Any] = {"retrieve": True} if self.retrieve else {}
        return self._looked_up | more | ({"keep": self.keep} if self.keep != "kv" else {})

    @property
    def _looked_up(self) -> dict[str, Any]:
        return {
            "top_k": self.top_k,
            "score_range": self.score_range,
            "chunk_blocks": self.chunk_blocks,
        }


@dataclass(frozen=True)
class OnCluster:
    """Where documents go that many machines read: an option a field."""

    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URL",
            help="Publish there what is read, and keep it nowhere else (--engine ray).",
        ),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="ray", help="Read on every worker of a cluster of Ray's."),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Of the cluster; default: $RAY_ADDRESS, else one that runs here, else a new one "
            "on this machine.",
        ),
    ] = None
    metrics_port: MetricsPort = None

    def check(self, how: HowRead, which: WhichFiles) -> bool:
        """Is a cluster to read? Raises typer.BadParameter for options that do not go together."""
        if self.engine not in (None, "ray"):
            raise typer.BadParameter(f"--engine is ray, not {self.engine}")
        if (self.to is None) != (self.engine is None):
            raise typer.BadParameter(
                "--to and --engine ray go together; one process reads into --store, which "
                "`memstore share push` publishes"
            )
        if self.engine is None:
            for name, given in (("address", self.address), ("metrics-port", self.metrics_port)):
                if given is not None:
                    raise typer.BadParameter(f"--{name} goes with --engine ray")
            return False
        for name, set_there in (
            ("append", how.append),
            ("sync", which.sync),
            ("workers", how.workers != 1),
            ("quota", how.quota is not None),
        ):
            if set_there:
                raise typer.BadParameter(f"--{name} does not go with --engine ray")
        return True
