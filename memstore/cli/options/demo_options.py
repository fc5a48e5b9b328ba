"""What can be chosen about the demonstration on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from memstore.cli.options.command_options import Seed
from memstore.cli.options.model_options import ModelOptions


@dataclass(frozen=True)
class PlantedOptions:
    """What is planted with --landmarks: an option a field."""

    seed: Seed = None
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", metavar="N", min=1, help="With --landmarks: length of the text to read."
        ),
    ] = None


@dataclass(frozen=True)
class DemoOptions:
    """What the demonstration does: an option a field."""

    planted: PlantedOptions
    by: ModelOptions
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="A text of your own, about which you then ask."
        ),
    ] = None
    landmarks: Annotated[
        bool,
        typer.Option(
            "--landmarks",
            help="Hide facts in a long text and ask for them, by the landmark model that ships.",
        ),
    ] = False
    questions: Annotated[
        int | None,
        typer.Option(
            "--questions",
            metavar="N",
            min=1,
            max=30,
            help="How many to ask; default: 15, and 20 (of 25 at most) with --landmarks.",
        ),
    ] = None
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="DIR", help="Keep the memory here; default: none."),
    ] = None
