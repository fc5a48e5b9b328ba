"""The command line: one command a verb of the library, each with --json; what needs torch is imported by its command.

Exit status: 0, 1 (failed, with one line on stderr), 2 (wrong usage), 130 (interrupted).
"""

import errno
import io
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from memstore import __version__, cli_bench, cli_ingest, cli_memory, console
from memstore.cli_options import (
    ASK_BUDGET,
    Cutoff,
    Documents,
    Granularity,
    Json,
    MaxNewTokens,
    MetricsPort,
    Model,
    ScoreRange,
    Seed,
    Store,
    Temperature,
    Tiers,
    TopK,
    abandon_stdout,
    command,
    metrics_served,
)
from memstore.errors import InvalidInput

if TYPE_CHECKING:
    from memstore.model.landmark_model import LandmarkModel
    from memstore.store import MemoryStore

# click's UsageError, of whichever click this typer is built on
UsageError = cast(type[typer.BadParameter], typer.BadParameter.mro()[1])


def main() -> None:
    """Entry point of `memstore`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="memstore", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        console.note(f"error: {console.one_line(error.format_message())} (see memstore --help)")
        status = 2
    except typer.Abort:
        status = 130
    except OSError as error:
        status = 1
        if error.errno != errno.EPIPE:
            console.note(f"error: stdout: {error.strerror}")
        abandon_stdout()
    sys.exit(status if isinstance(status, int) else 0)


# Asking


@command(
    "ask",
    'memstore ask "What is the pass key? The pass key is" --store mem',
    "memstore ask - --store mem --json < questions.txt",
)
def ask(
    question: Annotated[str, typer.Argument(help="Taken as typed, and continued; - reads one a line from stdin.")],
    store: Store,
    document: Documents = None,
    max_new_tokens: MaxNewTokens = 24,
    top_k: TopK = None,
    score_range: ScoreRange = None,
    cmt_cutoff: Cutoff = None,
    granularity: Granularity = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    model: Model = None,
    *,
    tiers: Tiers,
    as_json: Json = False,
) -> None:
    """Answer a question from a memory, and show what was read.

    With "-" every line of stdin is a question with a session of its own; --json then prints {"answers": [...]}.
    """
    questions = [line for line in console.read_lines() if line] if question == "-" else [question]
    if not questions:
        raise InvalidInput("standard input holds no question")
    began = time.monotonic()
    answers = []
    with _opened(store, model, tiers) as (reader, memory):
        opened = round(time.monotonic() - began, 3)
        for text in questions:
            with console.stream(not as_json) as on_token:
                answer = reader.ask(
                    text, memory, documents=document, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
                    on_token=on_token, top_k=top_k, score_range=score_range, cmt_cutoff=cmt_cutoff,
                    granularity=granularity,
                )  # fmt: skip
            answers.append({"question": text, **answer.to_dict()})
            if not as_json:
                console.print_answer(answers[-1], streamed=on_token is not None)
    if as_json:
        console.emit(({"answers": answers} if question == "-" else answers[0]) | {"open_seconds": opened})


@command("chat", "memstore chat --store mem")
def chat(
    store: Store,
    document: Documents = None,
    max_new_tokens: MaxNewTokens = 24,
    top_k: TopK = None,
    score_range: ScoreRange = None,
    cmt_cutoff: Cutoff = None,
    granularity: Granularity = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    model: Model = None,
    *,
    tiers: Tiers,
    metrics_port: MetricsPort = None,
    as_json: Json = False,
) -> None:
    """Ask one question a line in one session; Ctrl-D ends.

    With --json the whole conversation is printed at its end, as {"answers": [...]}.
    """
    answers = []
    with (
        metrics_served(metrics_port) as metrics,
        _opened(store, model, tiers) as (reader, memory),
        reader.chat(
            memory, document, top_k=top_k, score_range=score_range, cmt_cutoff=cmt_cutoff, granularity=granularity
        ) as conversation,
    ):
        metrics.store = memory
        for text in console.read_lines(prompt="> "):
            if not text:
                continue
            with console.stream(not as_json) as on_token:
                answer = conversation.ask(
                    text, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, on_token=on_token
                )
            answers.append({"question": text, **answer.to_dict()})
            if not as_json:
                console.print_answer(answers[-1], streamed=on_token is not None)
    if as_json:
        console.emit({"answers": answers})


@command(
    "search",
    'memstore search "the silver lighthouse" --store mem',
    'memstore search "the silver lighthouse" --store mem --by document',
)
def search(
    phrase: Annotated[str, typer.Argument(help="What to look for.")],
    store: Store,
    document: Documents = None,
    by: Annotated[
        Literal["passage", "document"], typer.Option("--by", help="Rank places, or documents by their best place.")
    ] = "passage",
    results: Annotated[int, typer.Option("--results", metavar="N", help="How many of them to show.")] = 5,
    shortlist: Annotated[
        int | None,
        typer.Option("--shortlist", metavar="N", help="Blocks that are compared with the phrase word by word."),
    ] = None,
    model: Model = None,
    *,
    tiers: Tiers,
    as_json: Json = False,
) -> None:
    """Show where in a memory a phrase is found.

    The weight says how much of the phrase is found there: 1 is all of it, word for word.
    """
    with _opened(store, model, tiers) as (reader, memory):
        find = reader.search if by == "passage" else reader.search_documents
        settings = {} if shortlist is None else {"shortlist": shortlist}
        found = [asdict(one) for one in find(phrase, memory, documents=document, top_k=results, **settings)]
    if as_json:
        console.emit({"sources" if by == "passage" else "documents": found})
    else:
        console.print_sources(found if by == "passage" else [match["best"] for match in found])


class _opened:
    """The model, and a memory of its own that is only read."""

    def __init__(self, path: Path, model: str | None, tiers: Tiers) -> None:
        from memstore.model.landmark_model import load_model_for_command
        from memstore.store import MemoryStore

        self._reader = load_model_for_command(model)
        self._memory = MemoryStore.open(path, self._reader.signature, read_only=True, **tiers.options(ASK_BUDGET))

    def __enter__(self) -> tuple["LandmarkModel", "MemoryStore"]:
        return self._reader, self._memory

    def __exit__(self, *_: object) -> None:
        self._memory.close()


# Training and showing


@command(
    "train",
    "memstore train books.jsonl.zst --out run1 --minutes 60",
    "memstore train books.jsonl.zst --out run1 --minutes 60 --resume",
    "memstore train books.jsonl.zst --out run2 --init run1 --from-stage finish",
    interrupted="interrupted; a checkpoint was saved, and --resume goes on from it",
)
def train(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Files of text: .txt or .jsonl.zst.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory of the checkpoint and its metrics.")],
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", metavar="NAME",
            help="Shape: test, books, small, medium or paper; default: that of --init, else test.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", metavar="M", help="Wall clock; default: the whole plan.")
    ] = None,
    seed: Seed = 0,
    init: Annotated[
        Path | None, typer.Option("--init", metavar="DIR", help="Start from these weights of the same shape.")
    ] = None,
    from_stage: Annotated[
        str | None, typer.Option("--from-stage", metavar="NAME", help="Begin the plan at this stage (with --init).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run in DIR.")] = False,
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, help="CPU cores to use.")] = 1,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where to compute: cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Train a model on text; the directory can be given to --model."""
    from memstore.model.checkpoint import load_checkpoint
    from memstore.model.config import PRESETS
    from memstore.model.curriculum import stages_from
    from memstore.model.train import TrainConfig
    from memstore.model.train import train as run_training

    if preset is not None and preset not in PRESETS:
        raise typer.BadParameter(f"no preset {preset!r}; choose one of {', '.join(PRESETS)}")
    if minutes is not None and not minutes > 0:
        raise typer.BadParameter(f"--minutes must be above 0, is {minutes}")
    lines: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> None:
        lines.append(line)
        console.note(", ".join(f"{name} {value}" for name, value in line.items()))

    model = PRESETS[preset or "test"] if preset or init is None else load_checkpoint(init)[0].config
    config = TrainConfig(
        out=out, model=model, stages=stages_from(from_stage), minutes=minutes, seed=seed or 0,
        threads=threads, device=device, init=init,
    )  # fmt: skip
    run_training(config, texts, resume=resume, report=report)
    if as_json:
        console.emit({"out": str(out), "metrics": lines[-1] if lines else None})
    else:
        print(f"trained; ask with --model {out}")


@command("demo", "memstore demo", "memstore demo --text book.txt --seed 7")
def demo(
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="A long text; default: Python's own.")
    ] = None,
    seed: Seed = None,
    questions: Annotated[int, typer.Option("--questions", metavar="N", min=1, max=25, help="Facts to hide.")] = 20,
    store: Annotated[
        Path | None, typer.Option("--store", metavar="DIR", help="Keep the memory here; default: none.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=1, help="Length of the text to read.")
    ] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Hide facts in a long text, read it once, ask a new process.

    The answers, their sources and costs are shown, and at last how many facts were right.
    """
    from memstore.demo import print_demo, run_demo

    result = run_demo(text=text, seed=seed, questions=questions, store=store, tokens=tokens, model=model)
    if as_json:
        console.emit(result)
    else:
        print_demo(result)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"memstore {__version__}")
        raise typer.Exit


@app.callback()
def memstore(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A memory for a transformer: it reads documents once, and any later process asks about them."""


for _command in (cli_ingest.ingest, cli_ingest.index, ask, chat, search, *cli_memory.COMMANDS, train, demo):
    app.command(_command.name, epilog=_command.epilog)(_command.run)

_bench = typer.Typer(help="Measure the tiers on this machine.")
for _command in cli_bench.COMMANDS:
    _bench.command(_command.name, epilog=_command.epilog)(_command.run)
app.add_typer(_bench, name="bench")
