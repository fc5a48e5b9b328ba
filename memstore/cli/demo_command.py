"""The command that shows the whole of it."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from memstore.cli.command import command
from memstore.cli.options.command_options import Json
from memstore.cli.options.demo_options import DemoOptions
from memstore.cli.readers import reader_for_new
from memstore.cli.terminal import console
from memstore.errors import InvalidInput, MemoryExists
from memstore.temporary import temporary_directory

if TYPE_CHECKING:
    from memstore.model.passages.passage_api import PassageAPI


@command("demo", "memstore demo", "memstore demo --text book.txt", "memstore demo --landmarks")
def demo(*, options: DemoOptions, as_json: Json = False) -> None:
    """Read chapters of a real book once, and ask a new process about them.

    The answers are shown with their sources and seconds, beside the same model with BM25's best
    passage as text. --text FILE reads yours, and asks what you type. With --landmarks facts are
    hidden in a long text, which the landmark model finds again.
    """
    if options.landmarks:
        from memstore.cli.demo.planted_facts import print_planted, run_planted

        result = run_planted(options)
        show = print_planted
    else:
        from memstore.cli.demo.real_book import print_real_book

        result, show = _real(options, quiet=as_json), print_real_book
    if as_json:
        console.emit(result)
    elif options.landmarks or options.text is None:
        show(result)


def _real(options: DemoOptions, *, quiet: bool) -> dict[str, Any]:
    """The demonstration with a real model. Raises InvalidInput where there is none."""
    if options.planted.seed is not None or options.planted.tokens is not None:
        raise typer.BadParameter("--seed and --tokens go with --landmarks")
    if options.text is not None and not options.text.is_file():
        raise InvalidInput(f"--text: there is no file {options.text}")
    if options.store is not None and options.store.exists() and any(options.store.iterdir()):
        raise MemoryExists(
            f"{options.store} is not empty; name a new directory, or leave --store out"
        )
    with ExitStack() as stack:
        store = options.store
        if store is None:
            folder = stack.enter_context(temporary_directory("memstore-demo-"))
            store = folder / "memory"
        reader = _passage_model(options, store)
        if options.text is not None:
            from memstore.cli.demo.own_book import run_own_book

            return run_own_book(reader, options.by, options.text, store, quiet=quiet)
        from memstore.cli.demo.real_book import ASKED, run_real_book

        return run_real_book(reader, options.by, store, options.questions or ASKED)


def _passage_model(options: DemoOptions, store: Path) -> "PassageAPI":
    from memstore.model.passages.passage_api import PassageAPI

    reader = reader_for_new(store, options.by)
    if not isinstance(reader, PassageAPI):
        raise InvalidInput(
            "the demonstration asks everyday questions, which takes a real model: `make models`, "
            "or --model; for a landmark model: memstore demo --landmarks"
        )
    return reader


COMMANDS = (demo,)
