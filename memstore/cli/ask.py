"""The commands that ask a memory: ask, chat, search."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memstore.cli import console
from memstore.cli.options import (
    ASK_BUDGET,
    Documents,
    Json,
    Lookup,
    MaxNewTokens,
    MetricsPort,
    Model,
    Seed,
    Store,
    Temperature,
    Tiers,
    command,
    metrics_served,
)
from memstore.errors import InvalidInput

if TYPE_CHECKING:
    from memstore.model.landmark_model import LandmarkModel
    from memstore.store.memory_store import MemoryStore


@command(
    "ask",
    'memstore ask "What is the pass key? The pass key is" --store mem',
    "memstore ask - --store mem --json < questions.txt",
)
def ask(
    question: Annotated[
        str, typer.Argument(help="Taken as typed, and continued; - reads one a line from stdin.")
    ],
    store: Store,
    document: Documents = None,
    max_new_tokens: MaxNewTokens = 24,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    model: Model = None,
    *,
    lookup: Lookup,
    tiers: Tiers,
    as_json: Json = False,
) -> None:
    """Answer a question from a memory, and show what was read.

    With "-" every line of stdin is a question with a session of its own; --json then prints
    {"answers": [...]}.
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
                    text,
                    memory,
                    documents=document,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=seed,
                    on_token=on_token,
                    **asdict(lookup),
                )
            answers.append({"question": text, **answer.to_dict()})
            if not as_json:
                console.print_answer(answers[-1], streamed=on_token is not None)
    if as_json:
        console.emit(
            ({"answers": answers} if question == "-" else answers[0]) | {"open_seconds": opened}
        )


@command("chat", "memstore chat --store mem")
def chat(
    store: Store,
    document: Documents = None,
    max_new_tokens: MaxNewTokens = 24,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    model: Model = None,
    *,
    lookup: Lookup,
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
        reader.chat(memory, document, **asdict(lookup)) as conversation,
    ):
        metrics.store = memory
        for text in console.read_lines(prompt="> "):
            if not text:
                continue
            with console.stream(not as_json) as on_token:
                answer = conversation.ask(
                    text,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    seed=seed,
                    on_token=on_token,
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
        Literal["passage", "document"],
        typer.Option("--by", help="Rank places, or documents by their best place."),
    ] = "passage",
    results: Annotated[
        int, typer.Option("--results", metavar="N", help="How many of them to show.")
    ] = 5,
    shortlist: Annotated[
        int | None,
        typer.Option(
            "--shortlist",
            metavar="N",
            help="Blocks that are compared with the phrase word by word.",
        ),
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
        found = [
            asdict(one)
            for one in find(phrase, memory, documents=document, top_k=results, **settings)
        ]
    if as_json:
        console.emit({"sources" if by == "passage" else "documents": found})
    else:
        console.print_sources(found if by == "passage" else [match["best"] for match in found])


class _opened:
    """The model, and a memory of its own that is only read."""

    def __init__(self, path: Path, model: str | None, tiers: Tiers) -> None:
        from memstore.model.landmark_model import load_model_for_command
        from memstore.store.memory_store import MemoryStore

        self._reader = load_model_for_command(model)
        self._memory = MemoryStore.open(
            path, self._reader.signature, read_only=True, **tiers.options(ASK_BUDGET)
        )

    def __enter__(self) -> tuple["LandmarkModel", "MemoryStore"]:
        return self._reader, self._memory

    def __exit__(self, *_: object) -> None:
        self._memory.close()


COMMANDS = (ask, chat, search)
