"""The commands `serve` (HTTP) and `mcp` (one agent, over stdin and stdout)."""

import os
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Annotated

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import Json, Lookup, Opening, ReadStore, flag, opened, option, parse_size
from memstore.errors import InvalidInput, install_extra
from memstore.serve.settings import ServeSettings


@command(
    "serve",
    "memstore serve",
    "memstore serve --host 0.0.0.0 --api-key-file keys.txt --allow-host memory.lan",
    "memstore serve --store s3://team/library --local-cache cache",
    interrupted="stopped",
)
def serve(
    store: ReadStore,
    *,
    host: Annotated[
        str, option("--host", "ADDR", "Address to listen on; any but loopback needs keys.")
    ] = "127.0.0.1",
    port: Annotated[
        int, option("--port", "PORT", "Port to listen on; 0: a free one.", min=0, max=65535)
    ] = ServeSettings.port,
    api_key_file: Annotated[
        Path | None,
        option("--api-key-file", "FILE", "API keys, one a line: KEY [read|write] [only=PATTERN]."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, option("--allow-host", "NAME", "Another name of the server (repeatable).")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        option("--allow-origin", "URL", "Web origin that may call the server (repeatable)."),
    ] = None,
    active: Annotated[
        int, option("--active", "N", "Questions answered at once.")
    ] = ServeSettings.active,
    waiting: Annotated[
        int, option("--waiting", "N", "Questions that may wait; more get status 429.")
    ] = ServeSettings.waiting,
    max_body: Annotated[
        int | None,
        option("--max-body", "SIZE", "Largest upload; default: 64MiB.", parser=parse_size),
    ] = None,
    opening: Opening,
    lookup: Lookup,
    as_json: Json = False,
) -> None:
    """Serve a memory over HTTP: page, OpenAI's API, documents, MCP.

    A memory that does not exist is created; a published memory is read-only. Ctrl-C or SIGTERM
    stops the server: running answers finish, and an interrupted ingest resumes when the document is
    uploaded again. --json prints one object when the server is ready.
    """
    try:
        from memstore.serve.access import read_keys
        from memstore.serve.app import check_exposed
        from memstore.serve.app import serve as run_server
        from memstore.serve.service import Service
    except ImportError as error:
        raise _missing(error) from None
    settings = ServeSettings(
        host=host,
        port=port,
        active=active,
        waiting=waiting,
        body_bytes=ServeSettings.body_bytes if max_body is None else max_body,
        hosts=tuple(allow_host or ()),
        origins=tuple(url.rstrip("/").lower() for url in allow_origin or ()),  # as browsers do
    )
    keys = {} if api_key_file is None else read_keys(api_key_file)
    check_exposed(settings, keys)
    with opened(store, opening, read_only=False, make=True) as (model, memory):
        lookup.give(model)
        known = model.signature.model
        name = "memstore" if known is None else Path(known.title).name
        service = Service(model, memory, settings, keys=keys, name=name)

        def ready(url: str) -> None:
            told = {"url": url, "store": str(store), "model": name}
            text = f"serving {store} at {url} (model {name}); Ctrl-C stops it"
            console.result(told, text, as_json)

        try:
            run_server(service, ready)
        finally:
            service.worker.stop()


@command("mcp", "memstore mcp")
def mcp(
    store: ReadStore,
    read_only: Annotated[
        bool, flag("--read-only", "Offer no tools that change the memory.")
    ] = False,
    *,
    opening: Opening,
    lookup: Lookup,
) -> None:
    """Serve a memory to an agent: MCP over stdin and stdout.

    Tools: ask, search and documents; also ingest (of a text) and forget, unless the memory is
    published or --read-only is given. `memstore ingest` can add files concurrently.
    """
    try:
        import anyio

        from memstore.serve.access import Access
        from memstore.serve.mcp_server import mcp_server, serve_stdio
        from memstore.serve.service import Service
    except ImportError as error:
        raise _missing(error) from None
    resources = ExitStack()
    with redirect_stdout(sys.stderr):  # stdout carries MCP; libraries may print
        model, memory = resources.enter_context(opened(store, opening, read_only=read_only))
    with resources:
        lookup.give(model)
        service = Service(model, memory)
        write = not memory.read_only

        def end(signal_number: int) -> None:
            try:
                service.worker.stop()
                memory.close()
                console.note("interrupted; what was read is stored")
            finally:
                os._exit(128 + signal_number)  # a thread blocks on stdin and cannot be stopped

        server = mcp_server(service, lambda request: Access(write), write=write)
        try:
            anyio.run(serve_stdio, server, end)
        finally:
            service.worker.stop()


def _missing(error: ImportError) -> InvalidInput:
    return InvalidInput(f"serving needs the package {error.name}: {install_extra('serve')}")


COMMANDS = (serve, mcp)
