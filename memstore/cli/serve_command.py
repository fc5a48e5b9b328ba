"""The command that serves a memory over HTTP."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from memstore.cli.command import command
from memstore.cli.options.command_options import Json, ReadStore
from memstore.cli.options.config_file import option_file
from memstore.cli.options.model_options import ModelOptions
from memstore.cli.options.option_groups import Away, Opening, Tiers
from memstore.cli.options.serve_options import ServerOptions
from memstore.cli.readers import opened
from memstore.cli.terminal import console
from memstore.errors import InvalidInput, install_extra


def _check(values: Mapping[str, Any]) -> None:
    """Raises MemstoreError for what a server, or a memory when it is opened, would refuse."""
    from memstore.index import make_index
    from memstore.share.publication_options import take_share_options
    from memstore.tiers.tier_options import check_options

    def of(kind: type) -> dict[str, Any]:
        return {f.name: values[f.name] for f in fields(kind) if f.name in values}

    ServerOptions(**of(ServerOptions)).settings()
    options = Opening(Tiers(**of(Tiers)), Away(**of(Away))).options(str(values.get("store")))
    check_options(options)
    take_share_options(dict(options))
    if "index" in options:
        make_index(options["index"], num_kv_heads=1, head_dim=1)


@command(
    "serve",
    "memstore serve",
    "memstore serve --host 0.0.0.0 --api-key-file keys.txt --allow-host memory.lan",
    "memstore serve --config memory.toml",
    "memstore serve --store s3://team/library --local-cache cache",
    interrupted="stopped in order",
)
def serve(
    store: ReadStore,
    *,
    config: Annotated[Path | None, option_file(_check)] = None,
    by: ModelOptions,
    server: ServerOptions,
    opening: Opening,
    as_json: Json = False,
) -> None:
    """Serve a memory over HTTP: OpenAI's chat endpoint, documents, the page, MCP. A directory is
    made if there is none; a published memory is read-only.

    Ctrl-C or SIGTERM ends it: answers finish; a document that is being ingested goes on where it
    was when it is uploaded again. With --json one object is printed when it answers.
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
        service = Service(reader, memory, settings, keys=keys, name=name)
        try:
            run(service, ready)
        finally:
            service.close()


COMMANDS = (serve,)
