"""The command line: one command for each verb of the library, each with --json. A command imports
torch only if it needs it.

Exit status: 0; 1, failed; 2, wrong usage or input; 130, Ctrl-C; 143, SIGTERM. Each failure is one
line on stderr.
"""

import errno
import io
import os
import sys
from typing import Annotated, cast

import typer

from memstore import __version__
from memstore.cli import adapt, ask, console, demo, documents, ingest, serve, share, train
from memstore.cli.command import abandon_stdout
from memstore.disk.files import occupy_standard_streams

# click's UsageError, from the click that typer uses
UsageError = cast(type[typer.BadParameter], typer.BadParameter.mro()[1])
_OTHER_NAMES = {"add": "ingest", "delete": "rm", "forget": "rm", "list": "ls", "remove": "rm"}


def main() -> None:
    """Run the command line. Raises SystemExit, KeyboardInterrupt."""
    occupy_standard_streams()
    # streams that were closed at the start are None
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="memstore", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        console.note(_wrong_usage(error, *sys.argv[1:2]))
        status = 2
    except typer.Abort:
        status = 130
    except OSError as error:
        status = 1
        if error.errno != errno.EPIPE:
            console.note(f"error: stdout: {error.strerror}")
        abandon_stdout()
    sys.exit(status if isinstance(status, int) else 0)


_HELP = {"help_option_names": ["--help", "-h"]}
app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=_HELP)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"memstore {__version__}")
        raise typer.Exit


@app.callback()
def memstore(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """A retrieval-memory database for transformers: a model reads documents once, and any later
    process answers questions from them, with sources.
    """


_GROUPS = (ingest, ask, documents, serve, train, adapt, demo)
for _command in (command for group in _GROUPS for command in group.COMMANDS):
    app.command(_command.name, epilog=_command.epilog)(_command.run)
_share = typer.Typer(help="Publish a memory to an object store, and read it from there.")
for _command in share.COMMANDS:
    _share.command(_command.name, epilog=_command.epilog)(_command.run)
app.add_typer(_share, name="share")


def _wrong_usage(error: typer.BadParameter, verb: str = "") -> str:
    """One line with the error of a command line and the command that prints its help."""
    message = console.one_line(error.format_message())
    if verb in _OTHER_NAMES:
        message = f"No such command '{verb}'; it is '{_OTHER_NAMES[verb]}'."
    if verb in ("ask", "search") and "unexpected extra argument" in message:
        message += f'; put the text in quotes: memstore {verb} "..."'
    command = error.ctx.command_path if error.ctx else f"memstore {verb}"
    return f"error: {message} (see {command} --help)"
