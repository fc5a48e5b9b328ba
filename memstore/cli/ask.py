"""The commands that ask a memory: ask, chat, search."""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memstore.cli import console
from memstore.cli.command import command
from memstore.cli.options import (
    Answering,
    Documents,
    Json,
    Lookup,
    Opening,
    ReadStore,
    Stats,
    flag,
    opened,
    option,
)
from memstore.errors import DocumentNotFound, InvalidInput

if TYPE_CHECKING:
    from memstore.model.answer import Answer


@command(
    "ask", 'memstore ask "How much is the monthly rent?"', "memstore ask - --json < questions.txt"
)
def ask(
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="The question; - reads one a line from stdin.")
    ],
    store: ReadStore,
    document: Documents = None,
    stats: Stats = False,
    *,
    opening: Opening,
    answering: Answering,
    lookup: Lookup,
    as_json: Json = False,
) -> None:
    """Answer a question from a memory, with sources.

    Each source is a document, its page or heading, and the sentence that holds the answer or is
    most similar to it. If the memory does not seem to hold an answer, the probability of that and
    the closest passages are shown instead.

    With "-" each line of stdin that is not empty is a question; --json then prints
    {"answers": [...]}. A question that cannot be asked is reported, and the others are answered
    (exit status 1).
    """
    questions = [line for line in console.read_lines() if line] if question == "-" else [question]
    if not questions:
        raise InvalidInput("standard input holds no question")
    show = None if as_json else partial(console.print_answer, stats=stats)
    began = time.monotonic()
    with opened(store, opening, documents=document) as (model, memory):
        open_seconds = round(time.monotonic() - began, 3)
        lookup.give(model)
        answer = partial(model.ask, store=memory, documents=document, **asdict(answering))
        if question == "-":
            # check settings here, so that a wrong one is one error of the command
            model.answering.changed(**asdict(answering))
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
    opening: Opening,
    answering: Answering,
    lookup: Lookup,
    as_json: Json = False,
) -> None:
    """Ask questions in one conversation, one a line; Ctrl-D ends it.

    A question may refer to earlier ones. A line "exit" or "quit" ends it, too. --json prints the
    whole conversation at its end, as {"answers": [...]}.
    """
    show = None if as_json else partial(console.print_answer, stats=stats)
    with opened(store, opening, documents=document) as (model, memory):
        lookup.give(model)
        model.answering.changed(**asdict(answering))  # raises for a wrong setting
        with model.chat(memory, document) as conversation:
            answer = partial(conversation.ask, **asdict(answering))
            lines = console.read_lines(prompt="> ")
            asked = takewhile(lambda line: line not in ("exit", "quit"), filter(None, lines))
            result = {"answers": _all_answered(asked, answer, show)}
    if as_json:
        console.emit(result)
    _exit(result)


@command("search", 'memstore search "the silver lighthouse"')
def search(
    phrase: Annotated[str, typer.Argument(metavar="PHRASE", help="The words to look for.")],
    store: ReadStore,
    document: Documents = None,
    by: Annotated[
        Literal["passage", "document"],
        typer.Option("--by", help="Show passages, or only the best passage of each document."),
    ] = "passage",
    top_k: Annotated[int, option("--top-k", "N", "Maximum results to show.", min=1)] = 5,
    stats: Annotated[bool, flag("--stats", "Also show characters and tiers.")] = False,
    *,
    opening: Opening,
    as_json: Json = False,
) -> None:
    """Find passages of a memory by a phrase or a question, best first.

    The selector gives each passage a score; words in common can raise it above 1. For a landmark
    model it is the similarity of the words: mostly 0.6 to 0.9 for the same, 0.1 to 0.3 for
    unrelated ones. If no passage seems to answer the phrase, the first line says so.
    """
    with (
        opened(store, opening, documents=document) as (model, memory),
        console.waiting("searching"),
    ):
        matches = model.search(phrase, memory, documents=document, top_k=top_k, by=by)
    found = [asdict(match) for match in matches]
    if as_json:
        console.emit({"answered": matches.answered, "sources": found})
        return
    if not matches.answered:
        console.say(f"{console.refusal({'sources': found})}\n")
    console.print_sources(found, scored=True, stats=stats)


def _all_answered(
    questions: Iterable[str], answer: "Callable[..., Answer]", show: Callable[..., None] | None
) -> list[dict[str, Any]]:
    """Answer each question; return its answer or its own error. Piped questions are shown."""
    results = []
    for question in questions:
        if show is not None and not sys.stdin.isatty():
            console.say(f"> {console.one_line(question)}")
        try:
            results.append(_answered(question, answer, show))
            if show is not None:
                console.say("")
        except (InvalidInput, DocumentNotFound) as error:
            results.append({"question": question, "error": console.report(error)})
    return results


def _answered(
    question: str, answer: "Callable[..., Answer]", show: Callable[..., None] | None
) -> dict[str, Any]:
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
