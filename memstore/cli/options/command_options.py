"""Options that several commands have, and how what is given to one is understood."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from memstore.cli.terminal import console
from memstore.share.objects.object_errors import without_credentials
from memstore.share.publication_options import is_url

if TYPE_CHECKING:
    from memstore.serve.metrics import Metrics
    from memstore.store.open_options import OpenOptions

DEFAULT_STORE = "memory"  # the directory of a command that is told of none


def parse_directory(text: str) -> Path:
    """A directory for an option. Raises typer.BadParameter for a URL."""
    if is_url(text):
        raise typer.BadParameter(
            f"{without_credentials(text)} is a published memory, which is only read; `memstore "
            "share pull` makes a copy in a directory"
        )
    return Path(text)


def parse_size(text: str) -> int:
    """`console.parse_size` for an option. Raises typer.BadParameter."""
    try:
        return console.parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def metrics_served(port: int | None) -> "Iterator[Metrics]":
    """`memstore.serve.metrics.serve`, that says on stderr where."""
    from memstore.serve.metrics import ADDRESS, serve

    with serve(port) as metrics:
        if port is not None:
            console.note(f"metrics at http://{ADDRESS}:{metrics.port}/metrics")
        yield metrics


def option(flag: str, metavar: str, help: str, **more: Any) -> Any:
    """An option that takes a value."""
    return typer.Option(flag, metavar=metavar, help=help, **more)


_STORE: dict[str, Any] = {
    "envvar": "MEMSTORE_STORE",
    "default_factory": lambda: DEFAULT_STORE,
    "show_default": f"./{DEFAULT_STORE}",
}
Store = Annotated[
    Path, option("--store", "DIR", "Directory of the memory.", parser=parse_directory, **_STORE)
]
ReadStore = Annotated[
    str,
    option(
        "--store",
        "DIR|URL",
        "Directory of the memory, or the URL of a published one (s3://...).",
        **_STORE,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
Documents = Annotated[
    list[str] | None,
    option("--document", "N", "Ask this document only (repeatable); default: all."),
]
MetricsPort = Annotated[
    int | None,
    option(
        "--metrics-port",
        "PORT",
        "Serve Prometheus metrics on 127.0.0.1 (0: any free port).",
        min=0,
        max=65535,
    ),
]
TopK = Annotated[
    int | None, option("--top-k", "K", "Blocks read by a lookup; default: the model's.")
]
ScoreRange = Annotated[
    float | None,
    option(
        "--score-range",
        "B",
        "Of these, read only blocks that score within B of the best; default: the model's.",
    ),
]
Seed = Annotated[int | None, option("--seed", "S", "Makes random choices repeatable.")]
IndexKind = Annotated[
    str | None,
    option("--index", "KIND", "How landmarks are searched: auto (default), packed, faiss-ivf-sq8."),
]


AtLeast = Annotated[
    int | None,
    option(
        "--at-least",
        "N",
        "Of a published memory: refuse a manifest older than number N, and no other; default: "
        "refuse what is older than was read before, as far as the local cache remembers.",
        min=1,
    ),
]


def asked_for(at_least: int | None) -> "OpenOptions":
    """Settings of MemoryStore.open for AtLeast."""
    return cast("OpenOptions", {} if at_least is None else {"at_least": at_least})
