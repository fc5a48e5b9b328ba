"""What can be chosen about a server on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memstore.cli.options.command_options import parse_directory, parse_size

if TYPE_CHECKING:
    from memstore.serve.settings import ServeSettings

PORT = 8741


@dataclass(frozen=True)
class ServerOptions:
    """How a memory is served: an option a field."""

    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            parser=parse_directory,
            help="Where conversations, vector stores and uploads are kept; default: in the "
            "memory's directory, or, of a published memory, nowhere.",
        ),
    ] = None
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDR", help="Address to listen on; beyond loopback, keys are needed."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option("--port", metavar="PORT", min=0, max=65535, help="0 takes any that is free."),
    ] = PORT
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="Keys, one a line: KEY [read|write] [only=PATTERN].",
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="NAME", help="A name it may be called by (repeatable)."
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="URL",
            help="A web page's origin that may call it, https://host (repeatable); default: none.",
        ),
    ] = None
    active: Annotated[
        int, typer.Option("--active", metavar="N", help="Questions answered at once.")
    ] = 8
    waiting: Annotated[
        int, typer.Option("--waiting", metavar="N", help="Questions that may wait; beyond it, 429.")
    ] = 512
    wait_seconds: Annotated[
        float,
        typer.Option(
            "--wait-seconds", metavar="S", help="For so long; who would wait longer gets 429."
        ),
    ] = 60.0
    body: Annotated[
        int | None,
        typer.Option(
            "--max-body", metavar="SIZE", parser=parse_size, help="Largest upload; default: 64MiB."
        ),
    ] = None
    json_body: Annotated[
        int | None,
        typer.Option(
            "--max-json",
            metavar="SIZE",
            parser=parse_size,
            help="Largest request that is no upload; default: 4MiB.",
        ),
    ] = None
    files: Annotated[
        int, typer.Option("--files", metavar="N", help="Most uploaded files of one key.")
    ] = 10_000
    files_quota: Annotated[
        int | None,
        typer.Option(
            "--files-quota",
            metavar="SIZE",
            parser=parse_size,
            help="Most that they take together; default: 4GiB.",
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="TOKENS",
            help="Longest prompt that is read as one; the rest becomes a document.",
        ),
    ] = None
    warm: Annotated[
        int, typer.Option("--warm", metavar="N", help="Conversations kept in memory.")
    ] = 16
    warm_seconds: Annotated[
        float, typer.Option("--warm-seconds", metavar="S", help="For so long after their last use.")
    ] = 600.0
    keep_days: Annotated[
        float | None,
        typer.Option(
            "--keep-days",
            metavar="D",
            help="Forget conversations that were not used for so long; default: never.",
        ),
    ] = None
    conversations: Annotated[
        int,
        typer.Option(
            "--conversations",
            metavar="N",
            help="Most of one key that are stored; beyond it its longest unused are forgotten.",
        ),
    ] = 10_000
    conversations_quota: Annotated[
        int | None,
        typer.Option(
            "--conversations-quota",
            metavar="SIZE",
            parser=parse_size,
            help="Most that they take, with what they remember; default: 4GiB.",
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            help="Of the model; default: 1 for a small one, else the machine's.",
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="S", help="Seconds that answers have to finish when it is ended."
        ),
    ] = 5.0
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Serve Prometheus metrics at /metrics.")
    ] = False
    telemetry: Annotated[
        bool,
        typer.Option(
            "--telemetry", help="Tell OpenTelemetry of every question (gen_ai spans, no text)."
        ),
    ] = False

    def settings(self) -> "ServeSettings":
        """What the server is told."""
        from memstore.serve.settings import ServeSettings

        return ServeSettings(
            host=self.host,
            port=self.port,
            active=self.active,
            waiting=self.waiting,
            wait_seconds=self.wait_seconds,
            body_bytes=64 << 20 if self.body is None else self.body,
            json_bytes=4 << 20 if self.json_body is None else self.json_body,
            files=self.files,
            files_bytes=4 << 30 if self.files_quota is None else self.files_quota,
            window_tokens=self.window,
            warm_sessions=self.warm,
            warm_seconds=self.warm_seconds,
            keep_seconds=None if self.keep_days is None else self.keep_days * 86400,
            conversations=self.conversations,
            conversations_bytes=4 << 30
            if self.conversations_quota is None
            else self.conversations_quota,
            hosts=tuple(self.allow_host or ()),
            origins=tuple(self.allow_origin or ()),
            grace=self.grace,
            metrics=self.metrics,
            telemetry=self.telemetry,
        )
