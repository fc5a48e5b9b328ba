"""The command line: one command a verb of the library, each with --json; what needs torch is
imported by its command.

Exit status: 0, 1 (failed, with one line on stderr), 2 (wrong usage), 130 (interrupted).
"""

import errno
import io
import os
import sys
from typing import Annotated, cast

import typer

from memstore import __version__
from memstore.cli import adapt_command as adapt
from memstore.cli import ask_command as ask
from memstore.cli import bench_command as bench
from memstore.cli import demo_command as demo
from memstore.cli import documents_command as documents
from memstore.cli import ingest_command as ingest
from memstore.cli import mcp_command as mcp
from memstore.cli import publish_command as share
from memstore.cli import serve_command as serve
from memstore.cli import train_command as train
from memstore.cli.command import abandon_stdout
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
        status = app(sys.argv[1:] or ["--help"], prog_name="memstore", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        console.note(f"error: {console.one_line(error.format_message())} (see memstore --help)")
        status = 2
    except typer.Abort:
        status = 130
    except OSError as error:
        status = 1
        if error.errno != errno.EPIPE:
            console.note(f"error: stdout: {error.strerror}")
        abandon_stdout()
    sys.exit(status if isinstance(status, int) else 0)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


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


for _command in (
    *ingest.COMMANDS,
    *ask.COMMANDS,
    *documents.COMMANDS,
    *share.COMMANDS,
    *serve.COMMANDS,
    *mcp.COMMANDS,
    *train.COMMANDS,
    *adapt.COMMANDS,
    *demo.COMMANDS,
):
    app.command(_command.name, epilog=_command.epilog)(_command.run)

_bench = typer.Typer(help="Measure the tiers on this machine.")
for _command in bench.COMMANDS:
    _bench.command(_command.name, epilog=_command.epilog)(_command.run)
app.add_typer(_bench, name="bench")
