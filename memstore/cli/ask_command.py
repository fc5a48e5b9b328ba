"""The commands that ask a memory: ask, chat, search."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import (
    Documents,
    Json,
    MetricsPort,
    ReadStore,
    metrics_served,
)
from memstore.cli.options.model_options import ModelOptions
from memstore.cli.options.option_groups import Answering, Asked, Lookup, Opening
from memstore.cli.readers import opened
from memstore.cli.terminal import answers, console
from memstore.errors import InvalidInput

if TYPE_CHECKING:
    from memstore.model.answer import Answer

Show = Callable[..., None]
"""`answers.print_answer`, as it was asked for."""


@command(
    "ask",
    'memstore ask "What is the pass key? The pass key is"',
    "memstore ask - --json < questions.txt",
)
def ask(
    question: Annotated[
        str, typer.Argument(help="Taken as typed, and continued; - reads one a line from stdin.")
    ],
    *,
    asked: Asked,
    answering: Answering,
    lookup: Lookup,
    opening: Opening,
    as_json: Json = False,
) -> None:
    """Answer a question from a memory, and show what was read.

    With "-" every line of stdin is a question with a session of its own; --json then prints
    {"answers": [...]}. One that cannot be asked is said, and keeps no other from being asked (exit
    status 1).
    """
    questions = [line for line in console.read_lines() if line] if question == "-" else [question]
    if not questions:
        raise InvalidInput("standard input holds no question")
    show = None if as_json else partial(answers.print_answer, stats=asked.stats)
    began = time.monotonic()
    settings = {"documents": asked.document, **asdict(answering), **asdict(lookup)}
    options = opening.options(asked.store)
    with opened(asked.store, asked.by, options, documents=asked.document) as (reader, memory):
        open_seconds = round(time.monotonic() - began, 3)
        asking = partial(reader.ask, store=memory, **settings)
        if question == "-":
            # what is wrong with all of them is the command's own error
            reader.answering.changed(**asdict(answering))
            reader.lookup.changed(**asdict(lookup))
            memory.ready(asked.document, to="ask")
            told = {"answers": _all_answered(questions, asking, show)}
        else:
            told = _answered(question, asking, show)
    if as_json:
        console.emit(told | {"open_seconds": open_seconds})
    _end(told)


@command("chat", "memstore chat")
def chat(
    *,
    asked: Asked,
    answering: Answering,
    lookup: Lookup,
    opening: Opening,
    metrics_port: MetricsPort = None,
    as_json: Json = False,
) -> None:
    """Ask one question a line in one session; Ctrl-D ends.

    With --json the whole conversation is printed at its end, as {"answers": [...]}.
    """
    show = None if as_json else partial(answers.print_answer, stats=asked.stats)
    options = opening.options(asked.store)
    with (
        metrics_served(metrics_port) as metrics,
        opened(asked.store, asked.by, options, documents=asked.document) as (reader, memory),
        reader.chat(memory, asked.document, **asdict(lookup)) as conversation,
    ):
        metrics.store = memory
        reader.answering.changed(**asdict(answering))  # as above
        asking = partial(conversation.ask, **asdict(answering))
        lines = console.read_lines(prompt="> ")
        told = {"answers": _all_answered(filter(None, lines), asking, show)}
    if as_json:
        console.emit(told)
    _end(told)


@dataclass(frozen=True)
class SearchOptions:
    """What is looked for, and what is shown of it: an option a field."""

    by_model: ModelOptions
    document: Documents = None
    by: Annotated[
        Literal["passage", "document"],
        typer.Option("--by", help="Rank places, or documents by their best place."),
    ] = "passage"
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="N", min=1, help="How many of them to show.")
    ] = 5
    shortlist: Annotated[
        int | None,
        typer.Option(
            "--shortlist",
            metavar="N",
            min=1,
            help="Blocks that are compared with the phrase word by word.",
        ),
    ] = None
    stats: Annotated[
        bool, typer.Option("--stats", help="Show their characters and tiers, too.")
    ] = False


@command(
    "search",
    'memstore search "the silver lighthouse"',
    'memstore search "the silver lighthouse" --by document',
)
def search(
    phrase: Annotated[str, typer.Argument(help="What to look for.")],
    store: ReadStore,
    *,
    shown: SearchOptions,
    opening: Opening,
    as_json: Json = False,
) -> None:
    """Show where in a memory a phrase is found.

    The percentage says how like the passage's words are to the phrase's, each in its context: where
    they are the same mostly 60-90%, where nothing is alike 10-30%. A model that chooses with a
    selector shows the score of that instead.
    """
    options = opening.options(store)
    with opened(store, shown.by_model, options, documents=shown.document) as (reader, memory):
        find = reader.search if shown.by == "passage" else reader.search_documents
        settings = {} if shown.shortlist is None else {"shortlist": shown.shortlist}
        with console.waiting("searching"):
            matches = find(phrase, memory, documents=shown.document, top_k=shown.top_k, **settings)
        score = answers.share if reader.keeps is None else answers.weight
    found, absent = [asdict(match) for match in matches], list(matches.absent)
    if as_json:
        console.emit({"sources" if shown.by == "passage" else "documents": found, "absent": absent})
    else:
        sources = found if shown.by == "passage" else [match["best"] for match in found]
        answers.print_sources(sources, score=score, stats=shown.stats)
        answers.print_absent(absent)


def _all_answered(
    questions: Iterable[str], ask: Callable[..., "Answer"], show: Show | None
) -> list[dict[str, Any]]:
    """Each of the questions as `_answered` tells it, or with the error that it alone met; an empty
    line after each that is shown.
    """
    told = []
    for question in questions:
        try:
            told.append(_answered(question, ask, show))
            if show is not None:
                console.say("")
        except InvalidInput as error:
            message = console.one_line(str(error))
            console.note(f"error: {message}")
            told.append(
                {"question": question, "error": {"name": type(error).__name__, "message": message}}
            )
    return told


def _end(told: dict[str, Any]) -> None:
    """With exit status 1 where a question was not answered."""
    if any("error" in answer for answer in told.get("answers", ())):
        raise typer.Exit(1)


def _answered(question: str, ask: Callable[..., "Answer"], show: Show | None) -> dict[str, Any]:
    """One question asked; the answer streams on a terminal, and `show` shows it. Plain values."""
    with console.stream(show is not None) as on_text:
        answer = ask(question, on_text=on_text)
    told = {"question": question, **answer.to_dict()}
    if show is not None:
        show(told, streamed=on_text is not None)
    return told


COMMANDS = (ask, chat, search)
