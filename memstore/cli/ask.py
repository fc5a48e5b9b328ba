"""The commands that ask a memory: ask, chat, search."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.opening import opened
from memstore.cli.options import (
    Answering,
    Documents,
    Json,
    Lookup,
    ModelOptions,
    Published,
    ReadStore,
    Stats,
    Tiers,
    flag,
    open_options,
    option,
)
from memstore.errors import InvalidInput

if TYPE_CHECKING:
    from memstore.model.answer import Answer

Show = Callable[..., None]
"""`console.print_answer`, as the command line wants it."""


@command(
    "ask",
    'memstore ask "What is the pass key? The pass key is"',
    "memstore ask - --json < questions.txt",
)
def ask(
    question: Annotated[
        str, typer.Argument(help="Taken as typed, and continued; - reads one a line from stdin.")
    ],
    store: ReadStore,
    document: Documents = None,
    stats: Stats = False,
    *,
    model_options: ModelOptions,
    answering: Answering,
    lookup: Lookup,
    tiers: Tiers,
    published: Published,
    as_json: Json = False,
) -> None:
    """Answer a question from a memory, and show what was read.

    With "-" every line of stdin is a question with a session of its own; --json then prints
    {"answers": [...]}. A question that cannot be asked is reported, the others are answered (exit
    status 1).
    """
    questions = [line for line in console.read_lines() if line] if question == "-" else [question]
    if not questions:
        raise InvalidInput("standard input holds no question")
    show = None if as_json else partial(console.print_answer, stats=stats)
    began = time.monotonic()
    options = open_options(store, tiers, published)
    with opened(store, model_options, options, documents=document) as (model, memory):
        open_seconds = round(time.monotonic() - began, 3)
        settings = {"documents": document, **asdict(answering), **asdict(lookup)}
        answer = partial(model.ask, store=memory, **settings)
        if question == "-":
            # a wrong setting is an error of the command, not one of each question
            model.answering.changed(**asdict(answering))
            model.lookup.changed(**asdict(lookup))
            memory.ready(document, to="ask")
            result = {"answers": _all_answered(questions, answer, show)}
        else:
            result = _answered(question, answer, show)
    if as_json:
        console.emit(result | {"open_seconds": open_seconds})
    _exit(result)


@command("chat", "memstore chat")
def chat(
    store: ReadStore,
    document: Documents = None,
    stats: Stats = False,
    *,
    model_options: ModelOptions,
    answering: Answering,
    lookup: Lookup,
    tiers: Tiers,
    published: Published,
    as_json: Json = False,
) -> None:
    """Ask one question a line in one session; Ctrl-D ends.

    With --json the whole conversation is printed at its end, as {"answers": [...]}.
    """
    show = None if as_json else partial(console.print_answer, stats=stats)
    options = open_options(store, tiers, published)
    with (
        opened(store, model_options, options, documents=document) as (model, memory),
        model.chat(memory, document, **asdict(lookup)) as conversation,
    ):
        model.answering.changed(**asdict(answering))  # raises for a wrong setting
        answer = partial(conversation.ask, **asdict(answering))
        lines = console.read_lines(prompt="> ")
        result = {"answers": _all_answered(filter(None, lines), answer, show)}
    if as_json:
        console.emit(result)
    _exit(result)


@command("search", 'memstore search "the silver lighthouse"')
def search(
    phrase: Annotated[str, typer.Argument(help="What to look for.")],
    store: ReadStore,
    document: Documents = None,
    by: Annotated[
        Literal["passage", "document"],
        typer.Option("--by", help="Show passages, or the best passage of each document."),
    ] = "passage",
    top_k: Annotated[int, option("--top-k", "N", "How many of them to show.", min=1)] = 5,
    stats: Annotated[bool, flag("--stats", "Show their characters and tiers, too.")] = False,
    *,
    model_options: ModelOptions,
    tiers: Tiers,
    published: Published,
    as_json: Json = False,
) -> None:
    """Show where in a memory a phrase is found.

    The percentage is how similar the words of the passage are to those of the phrase, each in its
    context: mostly 60-90% for the same words, 10-30% where nothing is alike. For a model that
    chooses with a selector it is the selector's score instead.
    """
    options = open_options(store, tiers, published)
    with opened(store, model_options, options, documents=document) as (model, memory):
        with console.waiting("searching"):
            matches = model.search(phrase, memory, documents=document, top_k=top_k, by=by)
        score = console.share if model.keeps is None else console.weight
    found = [asdict(match) for match in matches]
    if as_json:
        console.emit({"sources": found})
        return
    console.print_sources(found, score=score, stats=stats)


def _all_answered(
    questions: Iterable[str], answer: "Callable[..., Answer]", show: Show | None
) -> list[dict[str, Any]]:
    """What `_answered` returns for each question, or its own error; an empty line after each
    answer that is shown.
    """
    results = []
    for question in questions:
        try:
            results.append(_answered(question, answer, show))
            if show is not None:
                console.say("")
        except InvalidInput as error:
            results.append({"question": question, "error": console.report(error)})
    return results


def _answered(question: str, answer: "Callable[..., Answer]", show: Show | None) -> dict[str, Any]:
    """Answer one question; return plain values. The answer streams to a terminal."""
    with console.stream(show is not None) as on_text:
        result = {"question": question, **answer(question, on_text=on_text).to_dict()}
    if show is not None:
        show(result, streamed=on_text is not None)
    return result


def _exit(result: dict[str, Any]) -> None:
    """Exit status 1 if a question was not answered."""
    if any("error" in answer for answer in result.get("answers", ())):
        raise typer.Exit(1)


COMMANDS = (ask, chat, search)
