"""The commands that measure: `memstore bench tiers`."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import Json, MetricsPort, Seed, metrics_served
from memstore.cli.readers import landmark_reader
from memstore.cli.terminal import console

if TYPE_CHECKING:
    from memstore.cli.bench_replay import Settings


@dataclass(frozen=True)
class Source:
    """What is asked or replayed: an option a field."""

    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Books, .txt or .jsonl.zst (repeatable); default: Python's own.",
        ),
    ] = None
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", help="Ask this memory instead; it is only read."),
    ] = None
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay", metavar="TRACE", help="Replay recorded lookups instead, without a model."
        ),
    ] = None


@dataclass(frozen=True)
class Varied:
    """What is compared: an option a field."""

    budgets: Annotated[
        str | None,
        typer.Option("--budgets", metavar="LIST", help="Shares of all blocks, such as 2%,10%,50%."),
    ] = None
    policies: Annotated[
        str | None,
        typer.Option("--policies", metavar="LIST", help="Such as arc,lru; default: all."),
    ] = None
    prefetch: Annotated[
        str | None,
        typer.Option(
            "--prefetch",
            metavar="LIST",
            help="Of off and speculative (--replay: off and recorded).",
        ),
    ] = None

    def settings(self, *, replaying: bool) -> "Settings":
        """The settings, the usual ones where none are given. Raises typer.BadParameter."""
        from memstore.cli import bench_replay as bench

        live = bench.LIVE_BUDGETS, bench.LIVE_PREFETCH
        usual = (bench.REPLAY_BUDGETS, bench.REPLAY_PREFETCH) if replaying else live
        return bench.Settings(
            budgets=_shares(self.budgets) or usual[0],
            policies=_names(self.policies) or bench.ALL_POLICIES,
            prefetch=_names(self.prefetch) or usual[1],
        )


@dataclass(frozen=True)
class Asking:
    """How much is asked, by which model: an option a field."""

    books: Annotated[int, typer.Option("--books", metavar="N", min=1, help="Books to read.")] = 4
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=256, help="Most to read of a book.")
    ] = 1 << 14
    questions: Annotated[
        int, typer.Option("--questions", metavar="N", min=1, help="Asked in every run.")
    ] = 10
    seed: Seed = 0
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="DIR", help="A landmark model; default: the one that ships."
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Record one more run here, for --replay."),
    ] = None
    metrics_port: MetricsPort = None


@command(
    "tiers",
    "memstore bench tiers --text book.txt --text other.txt",
    "memstore bench tiers --store memory --budgets 5%,20% --policies arc,lru --trace lookups.zst",
    "memstore bench tiers --replay lookups.zst",
)
def tiers(*, of: Source, varied: Varied, asking: Asking, as_json: Json = False) -> None:
    """Compare budgets, policies and prefetchers, by asking or by replaying.

    Asking: passages of books and questions about them, the same in every run. Replaying: the
    lookups of a trace, with Belady's optimum as the bound.
    """
    if sum(given is not None for given in (of.text or None, of.store, of.replay)) > 1:
        raise typer.BadParameter("--text, --store and --replay exclude each other")
    if of.replay is not None and (asking.trace is not None or asking.metrics_port is not None):
        raise typer.BadParameter("--replay asks nothing that --trace or --metrics-port could show")
    settings = varied.settings(replaying=of.replay is not None)
    if of.replay is not None:
        from memstore.cli.bench_replay import print_replay as show
        from memstore.cli.bench_replay import run_replay

        result = run_replay(of.replay, settings)
    else:
        from memstore.cli.bench_tiers import print_live as show

        result = _asked(of, settings, asking)
    if as_json:
        console.emit(result)
    else:
        show(result)


def _asked(of: Source, settings: "Settings", asking: Asking) -> dict[str, Any]:
    """What asking a memory, or books, gives."""
    from memstore.cli.bench_tiers import PREDICTORS, books_memory, run_live
    from memstore.tiers.lookup_trace import check_trace

    settings.check(PREDICTORS)  # before anything is read
    if asking.trace is not None:
        check_trace(asking.trace)
    reader = landmark_reader(of.store, asking.model)
    with ExitStack() as stack:
        metrics = stack.enter_context(metrics_served(asking.metrics_port))
        store = of.store
        if store is None:
            books = books_memory(reader, of.text or (), asking.books, asking.tokens)
            store = stack.enter_context(books)
        return run_live(
            reader,
            store,
            settings,
            questions=asking.questions,
            seed=asking.seed or 0,
            trace=asking.trace,
            metrics=metrics,
        )


def _shares(text: str | None) -> list[float]:
    """ "2%,10%" -> [0.02, 0.1]. Raises typer.BadParameter."""
    try:
        return (
            [float(part.strip().removesuffix("%")) / 100 for part in text.split(",")]
            if text
            else []
        )
    except ValueError:
        raise typer.BadParameter(
            f"--budgets takes shares such as 2%,10%,50%, not {text!r}"
        ) from None


def _names(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


COMMANDS = (tiers,)
