"""The command line: one command a verb of the library, each with --json; what needs torch is
imported by its command.

Exit status: 0, 1 (failed, with one line on stderr), 2 (wrong usage), 130 (Ctrl-C), 143 (SIGTERM).
"""

import errno
import io
import os
import sys
from collections.abc import Iterable
from typing import Annotated, cast

import typer

from memstore import __version__
from memstore.cli import adapt_command as adapt
from memstore.cli import ask_command as ask
from memstore.cli import demo
from memstore.cli import documents_command as documents
from memstore.cli import index_command as index
from memstore.cli import ingest_command as ingest
from memstore.cli import mcp_command as mcp
from memstore.cli import serve_command as serve
from memstore.cli import share_command as share
from memstore.cli import train_command as train
from memstore.cli.command import Command, abandon_stdout
from memstore.cli.terminal import console
from memstore.disk.files import occupy_standard_streams

# click's UsageError, of whichever click this typer is built on
UsageError = cast(type[typer.BadParameter], typer.BadParameter.mro()[1])


def main() -> None:
    """Entry point of `memstore`."""
    occupy_standard_streams()
    # Python has None for a stream that was closed when it began; to print to that is to print to
    # another one.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        given = sys.argv[1:] or ["--help"]
        status = _with(given[0])(given, prog_name="memstore", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        console.note(_wrong(error, *sys.argv[1:2]))
        status = 2
    except typer.Abort:
        status = 130
    except OSError as error:
        status = 1
        if error.errno != errno.EPIPE:
            console.note(f"error: stdout: {error.strerror}")
        abandon_stdout()
    sys.exit(status if isinstance(status, int) else 0)


def _with(verb: str) -> typer.Typer:
    """Of all commands what a command line begins with: to declare the others takes some
    milliseconds of each. Everything where it begins with none.
    """
    commands = [command for command in app.registered_commands if command.name == verb]
    groups = [group for group in app.registered_groups if group.name == verb]
    if not commands and not groups:
        return app
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.registered_callback = app.registered_callback
    alone.registered_commands, alone.registered_groups = commands, groups
    return alone


_NOW = {"docs": "ls", "forget": "rm", "publish": "share push", "pull": "share pull"}
_NOW |= {"unpublish": "share rm", "remove": "rm", "delete": "rm", "list": "ls", "query": "ask"}
_QUOTED = ("ask", "search")  # what takes one text


def _wrong(error: typer.BadParameter, verb: str = "") -> str:
    """What is wrong with a command line, in one line, and whose help says more."""
    said = console.one_line(error.format_message())
    if verb in _NOW:
        said = f"memstore {verb} is memstore {_NOW[verb]}"
    elif verb in _QUOTED and "unexpected extra argument" in said:
        said += f'; put the text in quotes: memstore {verb} "..."'
    return f"error: {said} (see {error.ctx.command_path if error.ctx else 'memstore'} --help)"


app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


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
    """A memory for a transformer: it reads documents once, and any later process asks about
    them.
    """


def _add(group: typer.Typer, commands: Iterable[Command]) -> None:
    for command in commands:
        group.command(command.name, epilog=command.epilog)(command.run)


_add(
    app,
    (
        *ingest.COMMANDS,
        *ask.COMMANDS,
        *documents.COMMANDS,
        *index.COMMANDS,
        *serve.COMMANDS,
        *mcp.COMMANDS,
        *train.COMMANDS,
        *adapt.COMMANDS,
        *demo.COMMANDS,
    ),
)
_share = typer.Typer(help="Publish a memory to an object store, and take from there.")
_add(_share, share.COMMANDS)
app.add_typer(_share, name="share")
