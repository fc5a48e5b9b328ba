"""The command that serves a memory over HTTP."""

from pathlib import Path

from memstore.cli.command import command
from memstore.cli.options.command_options import Json, ReadStore
from memstore.cli.options.model_options import ModelOptions
from memstore.cli.options.option_groups import Opening
from memstore.cli.options.serve_options import ServerOptions
from memstore.cli.readers import opened
from memstore.cli.terminal import console
from memstore.errors import InvalidInput, install_extra


@command(
    "serve",
    "memstore serve",
    "memstore serve --host 0.0.0.0 --api-key-file keys.txt --allow-host memory.lan",
    "memstore serve --store s3://team/library --state served --local-cache cache",
    interrupted="stopped in order",
)
def serve(
    store: ReadStore,
    *,
    by: ModelOptions,
    server: ServerOptions,
    opening: Opening,
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
    except ImportError as error:
        raise InvalidInput(
            f"serving needs the package {error.name}: {install_extra('serve')}"
        ) from None
    settings = server.settings()
    keys = Keys() if server.api_key_file is None else Keys.of_file(server.api_key_file)
    check_exposed(settings, keys)

    def ready(url: str) -> None:
        if as_json:
            console.emit({"url": url, "store": str(store), "model": name})
        else:
            console.say(f"memstore at {url} (model {name}); Ctrl-C ends it")

    with opened(store, by, opening.options(store), read_only=False, make=True) as found:
        reader, memory = found
        if server.threads is not None:
            import torch

            torch.set_num_threads(server.threads)
        called = reader.signature.model
        name = "memstore" if called is None else Path(called.title).name
        if server.state is not None:
            _make(server.state)
        service = Service(reader, memory, settings, keys=keys, model=name, directory=server.state)
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
