"""The command that serves a memory to one agent, by MCP over stdin and stdout."""

import os
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import ReadStore
from memstore.cli.options.model_options import ModelOptions
from memstore.cli.options.option_groups import Opening
from memstore.cli.readers import opened
from memstore.cli.terminal import console
from memstore.errors import InvalidInput, install_extra


@command("mcp", "memstore mcp", "memstore mcp --allow-paths ~/notes")
def mcp(
    store: ReadStore,
    allow_paths: Annotated[
        list[Path] | None,
        typer.Option(
            "--allow-paths",
            metavar="DIR",
            help="A directory whose files the agent may have read (repeatable); default: none.",
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Let it neither ingest nor forget.")
    ] = False,
    *,
    by: ModelOptions,
    opening: Opening,
) -> None:
    """Serve a memory to an agent: MCP over stdin and stdout, until it closes them.

    Tools: ask, search, documents, and ingest and forget where the memory is no published one; every
    document is a resource.
    """
    try:
        import anyio

        from memstore.serve.api_keys import Access
        from memstore.serve.mcp.stdio import serve_stdio
        from memstore.serve.mcp.tools import Caller
        from memstore.serve.service import Service
    except ImportError as error:
        raise InvalidInput(
            f"MCP needs the package {error.name}: {install_extra('serve')}"
        ) from None
    paths = [_directory(path) for path in allow_paths or ()]
    options = opening.options(store)
    kept_open = ExitStack()
    with redirect_stdout(sys.stderr):  # stdout is the agent's, whatever a library may print there
        reader, memory = kept_open.enter_context(opened(store, by, options, read_only=read_only))
    caller = Caller(Access(write=not read_only), paths)
    with kept_open:
        service = Service(reader, memory)

        def end(number: int) -> None:
            try:
                service.close()
                memory.close()
                console.note("interrupted; what was read is kept")
            finally:
                os._exit(128 + number)  # a thread waits for stdin, whatever becomes of this one

        try:
            anyio.run(serve_stdio, service.tools, caller, end)
        finally:
            service.close()


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise InvalidInput(f"--allow-paths: {path} is no directory")
    return path.resolve()


COMMANDS = (mcp,)
