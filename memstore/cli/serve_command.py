"""The command that serves a memory over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from memstore.cli.command_options import (
    ASK_BUDGET,
    Away,
    Json,
    Model,
    ReadStore,
    Tiers,
    command,
    parse_directory,
    parse_size,
)
from memstore.cli.readers import reader_for_command
from memstore.cli.terminal import console
from memstore.errors import InvalidInput, MemoryNotFound, install_extra
from memstore.share.publication_options import is_url

PORT = 8741


@command(
    "serve",
    "memstore serve --store mem",
    "memstore serve --store mem --host 0.0.0.0 --api-key-file keys.txt --allow-host memory.lan",
    "memstore serve --store s3://team/library --state served --local-cache cache",
    interrupted="stopped in order",
)
def serve(
    store: ReadStore,
    model: Model = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            parser=parse_directory,
            help="Where conversations, vector stores and uploads are kept; default: in the "
            "memory's directory, or, of a published memory, nowhere.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDR", help="Address to listen on; beyond loopback, keys are needed."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", metavar="PORT", min=0, max=65535, help="0 takes any that is free."),
    ] = PORT,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="Keys, one a line: KEY [read|write] [only=PATTERN].",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="NAME", help="A name it may be called by (repeatable)."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="URL",
            help="A web page's origin that may call it, https://host (repeatable); default: none.",
        ),
    ] = None,
    active: Annotated[
        int, typer.Option("--active", metavar="N", help="Questions answered at once.")
    ] = 8,
    waiting: Annotated[
        int, typer.Option("--waiting", metavar="N", help="Questions that may wait; beyond it, 429.")
    ] = 512,
    wait_seconds: Annotated[
        float,
        typer.Option(
            "--wait-seconds", metavar="S", help="For so long; who would wait longer gets 429."
        ),
    ] = 60.0,
    body: Annotated[
        int | None,
        typer.Option(
            "--max-body", metavar="SIZE", parser=parse_size, help="Largest upload; default: 64MiB."
        ),
    ] = None,
    json_body: Annotated[
        int | None,
        typer.Option(
            "--max-json",
            metavar="SIZE",
            parser=parse_size,
            help="Largest request that is no upload; default: 4MiB.",
        ),
    ] = None,
    files: Annotated[
        int, typer.Option("--files", metavar="N", help="Most uploaded files of one key.")
    ] = 10_000,
    files_quota: Annotated[
        int | None,
        typer.Option(
            "--files-quota",
            metavar="SIZE",
            parser=parse_size,
            help="Most that they take together; default: 4GiB.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="TOKENS",
            help="Longest prompt that is read as one; the rest becomes a document.",
        ),
    ] = None,
    warm: Annotated[
        int, typer.Option("--warm", metavar="N", help="Conversations kept in memory.")
    ] = 16,
    warm_seconds: Annotated[
        float, typer.Option("--warm-seconds", metavar="S", help="For so long after their last use.")
    ] = 600.0,
    keep_days: Annotated[
        float | None,
        typer.Option(
            "--keep-days",
            metavar="D",
            help="Forget conversations that were not used for so long; default: never.",
        ),
    ] = None,
    conversations: Annotated[
        int,
        typer.Option(
            "--conversations",
            metavar="N",
            help="Most of one key that are stored; beyond it its longest unused are forgotten.",
        ),
    ] = 10_000,
    conversations_quota: Annotated[
        int | None,
        typer.Option(
            "--conversations-quota",
            metavar="SIZE",
            parser=parse_size,
            help="Most that they take, with what they remember; default: 4GiB.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            help="Of the model; default: 1 for a small one, else the machine's.",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="S", help="Seconds that answers have to finish when it is ended."
        ),
    ] = 5.0,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Serve Prometheus metrics at /metrics.")
    ] = False,
    telemetry: Annotated[
        bool,
        typer.Option(
            "--telemetry", help="Tell OpenTelemetry of every question (gen_ai spans, no text)."
        ),
    ] = False,
    *,
    tiers: Tiers,
    away: Away,
    as_json: Json = False,
) -> None:
    """Serve a memory over HTTP: OpenAI's endpoints, the page, MCP. A directory is made if there is
    none; a published memory is only read.

    Ctrl-C or SIGTERM ends it: answers finish, an upload that is being read goes on at the next
    start. With --json one object is printed when it answers.
    """
    try:
        from memstore.serve.api_keys import Keys
        from memstore.serve.http.run import check_exposed
        from memstore.serve.http.run import serve as run
        from memstore.serve.service import Service
        from memstore.serve.settings import ServeSettings
    except ImportError as error:
        raise InvalidInput(
            f"serving needs the package {error.name}: {install_extra('serve')}"
        ) from None
    from memstore.store.memory_store import MemoryStore

    settings = ServeSettings(
        host=host,
        port=port,
        active=active,
        waiting=waiting,
        wait_seconds=wait_seconds,
        body_bytes=64 << 20 if body is None else body,
        json_bytes=4 << 20 if json_body is None else json_body,
        files=files,
        files_bytes=4 << 30 if files_quota is None else files_quota,
        window_tokens=window,
        warm_sessions=warm,
        warm_seconds=warm_seconds,
        keep_seconds=None if keep_days is None else keep_days * 86400,
        conversations=conversations,
        conversations_bytes=4 << 30 if conversations_quota is None else conversations_quota,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        grace=grace,
        metrics=metrics,
        telemetry=telemetry,
    )
    keys = Keys() if api_key_file is None else Keys.of_file(api_key_file)
    check_exposed(settings, keys)
    reader = reader_for_command(model)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    options = tiers.options(ASK_BUDGET)
    options.update(away.options(store))
    try:
        memory = MemoryStore.open(store, reader.signature, **options)
    except MemoryNotFound:
        if is_url(store):
            raise
        memory = MemoryStore.create(
            store, reader.signature, codec=reader.codec, selector=reader.keeps, **options
        )

    def ready(url: str) -> None:
        if as_json:
            console.emit({"url": url, "store": str(store), "model": name})
        else:
            console.say(f"memstore at {url} (model {name}); Ctrl-C ends it")

    name = Path(model).name if model else "memstore"
    with memory:
        if state is not None:
            _make(state)
        service = Service(reader, memory, settings, keys=keys, model=name, directory=state)
        try:
            run(service, ready)
        finally:
            service.close()


def _make(state: Path) -> None:
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"--state: {state} cannot be made ({error.strerror}); name another directory"
        ) from None


COMMANDS = (serve,)
