"""What can be chosen about a server on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memstore.cli.options.command_options import parse_size

if TYPE_CHECKING:
    from memstore.serve.settings import ServeSettings

PORT = 8741


@dataclass(frozen=True)
class ServerOptions:
    """How a memory is served: an option a field."""

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
    ] = 64
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

    def settings(self) -> "ServeSettings":
        """What the server is told."""
        from memstore.serve.settings import ServeSettings

        return ServeSettings(
            host=self.host,
            port=self.port,
            active=self.active,
            waiting=self.waiting,
            body_bytes=64 << 20 if self.body is None else self.body,
            json_bytes=4 << 20 if self.json_body is None else self.json_body,
            hosts=tuple(self.allow_host or ()),
            origins=tuple(self.allow_origin or ()),
            grace=self.grace,
            metrics=self.metrics,
        )
