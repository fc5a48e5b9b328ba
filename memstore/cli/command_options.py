"""Options that several commands have, and how what is given to one is understood."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from memstore.cli.terminal import console
from memstore.share.objects.object_errors import without_credentials
from memstore.share.publication_options import is_url

if TYPE_CHECKING:
    from memstore.serve.metrics import Metrics
    from memstore.store.open_options import OpenOptions
    from memstore.tiers.tier_options import Predictor

ASK_BUDGET = 1 << 30  # bytes of main memory for blocks


def parse_directory(text: str) -> Path:
    """A directory for an option. Raises typer.BadParameter for a URL."""
    if is_url(text):
        raise typer.BadParameter(
            f"{without_credentials(text)} is a published memory, which is only read; `memstore "
            "pull` makes a copy in a directory"
        )
    return Path(text)


def parse_cutoff(text: str) -> float | dict[str, float]:
    """A number, or numbers by tier."""
    try:
        if "=" not in text:
            return float(text)
        parts = (part.partition("=") for part in text.split(","))
        return {tier.strip(): float(value) for tier, _, value in parts}
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is neither a number nor numbers by tier, such as host=.05,remote=.3"
        ) from error


def parse_size(text: str) -> int:
    """`console.parse_size` for an option. Raises typer.BadParameter."""
    try:
        return console.parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_budget(text: str) -> int | str:
    """The same, or "none". Raises typer.BadParameter."""
    return text if text == "none" else parse_size(text)


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


Store = Annotated[
    Path, option("--store", "DIR", "Directory of the memory.", parser=parse_directory)
]
ReadStore = Annotated[
    str,
    option(
        "--store", "DIR|URL", "Directory of the memory, or the URL of a published one (s3://...)."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
Model = Annotated[
    str | None,
    option(
        "--model",
        "MODEL",
        "A model's directory or GGUF file, its name on the Hugging Face hub, or smollm2; default: "
        "the one that ships.",
        envvar="MEMSTORE_MODEL",
    ),
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


@dataclass(frozen=True)
class Answering:
    """How a command that asks generates its answers: an option a field."""

    max_new_tokens: Annotated[
        int | None,
        option("--max-new-tokens", "N", "Longest answer, in tokens; default: the model's."),
    ] = None
    temperature: Annotated[
        float, option("--temperature", "T", "0 takes the likeliest token; above samples.")
    ] = 0.0
    seed: Seed = None


@dataclass(frozen=True)
class Lookup:
    """How a command that asks looks up: an option a field; None leaves it to the model."""

    top_k: TopK = None
    score_range: ScoreRange = None
    cmt_cutoff: Annotated[
        object | None,
        option(
            "--cmt-cutoff",
            "C",
            "Skip lookups whose gate is below C (0 = none), or by tier, as "
            "host=.05,disk=.16,remote=.3; default: the model's.",
            parser=parse_cutoff,
        ),
    ] = None
    granularity: Annotated[
        str | None,
        option(
            "--granularity", "G", "Choose blocks per_token_per_head, per_token, per_head or shared."
        ),
    ] = None


@dataclass(frozen=True)
class Tiers:
    """How a command that reads blocks opens the tiers and the index of a memory: an option a
    field.
    """

    host_budget: Annotated[
        int | None,
        option(
            "--host-budget", "SIZE", "Main memory for blocks, such as 512MB.", parser=parse_size
        ),
    ] = None
    policy: Annotated[
        str | None, option("--policy", "NAME", "Which blocks leave main memory first: arc or lru.")
    ] = None
    prefetch: Annotated[
        str | None, option("--prefetch", "P", "Blocks read ahead: off or speculative.")
    ] = None
    trace: Annotated[
        Path | None,
        option("--trace", "FILE", "Record every lookup here, for `memstore bench tiers --replay`."),
    ] = None

    index: IndexKind = None

    def options(self, host_budget: int) -> "OpenOptions":
        """Settings of MemoryStore.open and create; host_budget: bytes, where none are given."""
        options: OpenOptions = {
            "host_budget": host_budget if self.host_budget is None else self.host_budget
        }
        if self.policy is not None:
            options["policy"] = self.policy
        if self.prefetch is not None:
            options["prefetch"] = cast("Predictor", self.prefetch)
        if self.trace is not None:
            options["trace"] = self.trace
        if self.index is not None:
            options["index"] = self.index
        return options


@dataclass(frozen=True)
class Away:
    """How a command reads a published memory: an option a field."""

    local_cache: Annotated[
        Path | None,
        option("--local-cache", "DIR", "Of a published memory: keep what was read here."),
    ] = None
    local_budget: Annotated[
        int | None,
        option(
            "--local-budget",
            "SIZE",
            "Bytes that the local cache may hold, such as 20GB; default 8 GiB.",
            parser=parse_size,
        ),
    ] = None
    valkey: Annotated[
        str | None,
        option(
            "--valkey",
            "URL",
            "Of a published memory: a Valkey or Redis server that readers share as a cache.",
            envvar="MEMSTORE_VALKEY",
        ),
    ] = None
    deadline: Annotated[
        float | None,
        option(
            "--deadline", "S", "Of a published memory: a read that takes longer fails; default 20."
        ),
    ] = None
    refresh: Annotated[
        float | None,
        option(
            "--refresh",
            "S",
            "Of a published memory: look for a newer manifest so often; default 5.",
        ),
    ] = None
    at_least: AtLeast = None
    allow_partial: Annotated[
        bool,
        typer.Option(
            "--allow-partial",
            help="Of a published memory: leave out documents that cannot be read, and say which.",
        ),
    ] = False

    def options(self, store: str) -> "OpenOptions":
        """Settings of MemoryStore.open. The server of the environment is of published memories
        alone.
        """
        given = {  # 0 among them, which is refused by its name
            name: value
            for name, value in vars(self).items()
            if value is not None and value is not False
        }
        if not is_url(store) and os.environ.get("MEMSTORE_VALKEY") == self.valkey:
            given.pop("valkey", None)
        return cast("OpenOptions", given)


@dataclass(frozen=True)
class Asked:
    """Which memory is asked, and by which model: an option a field."""

    store: ReadStore
    document: Documents = None
    model: Model = None


@dataclass(frozen=True)
class Opening:
    """How a memory that is asked is opened: directory or published."""

    tiers: Tiers
    away: Away

    def options(self, store: str) -> "OpenOptions":
        """Settings of MemoryStore.open."""
        options = self.tiers.options(ASK_BUDGET)
        options.update(self.away.options(store))
        return options
