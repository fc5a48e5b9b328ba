"""The command that shows the whole of it."""

from pathlib import Path
from typing import Annotated

import typer

from memstore.cli.command import command
from memstore.cli.command_options import Json, Model, Seed
from memstore.cli.terminal import console


@command("demo", "memstore demo", "memstore demo --text book.txt --seed 7")
def demo(
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="A long text; default: Python's own."),
    ] = None,
    seed: Seed = None,
    questions: Annotated[
        int, typer.Option("--questions", metavar="N", min=1, max=25, help="Facts to hide.")
    ] = 20,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", help="Keep the memory here; default: none."),
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
    from memstore.cli.demo_facts import print_demo, run_demo

    result = run_demo(
        text=text, seed=seed, questions=questions, store=store, tokens=tokens, model=model
    )
    if as_json:
        console.emit(result)
    else:
        print_demo(result)


COMMANDS = (demo,)
