"""What can be chosen about the demonstration on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memstore.cli.options.command_options import Model, Seed


@dataclass(frozen=True)
class DemoOptions:
    """What the demonstration does: an option a field."""

    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="A long text; default: Python's own."),
    ] = None
    seed: Seed = None
    questions: Annotated[
        int, typer.Option("--questions", metavar="N", min=1, max=25, help="Facts to hide.")
    ] = 20
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", help="Keep the memory here; default: none."),
    ] = None
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=1, help="Length of the text to read.")
    ] = None
    model: Model = None
