"""Groups of options that commands which ask a memory have in common, each a typed object."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from memstore.cli.options.command_options import (
    AtLeast,
    Documents,
    IndexKind,
    ReadStore,
    ScoreRange,
    Seed,
    TopK,
    option,
    parse_size,
)
from memstore.cli.options.model_options import ModelOptions
from memstore.share.publication_options import is_url

if TYPE_CHECKING:
    from memstore.store.open_options import OpenOptions
    from memstore.tiers.tier_options import Predictor

ASK_BUDGET = 1 << 30  # bytes of main memory for blocks


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
        float | None,
        option(
            "--cmt-cutoff",
            "C",
            "Skip lookups whose gate is below C (0 = none); default: the model's.",
        ),
    ] = None
    caution: Annotated[
        float | None,
        option(
            "--caution",
            "C",
            "How sure a passage model has to be that a passage answers, from 0 (answer always) "
            "to 1 (refuse most of what nothing answers); default: 0.85.",
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
    """Which memory is asked, by which model, and how much is shown: an option a field."""

    store: ReadStore
    by: ModelOptions
    document: Documents = None
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Also show weights, characters, tiers, lookups and seconds."),
    ] = False


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
