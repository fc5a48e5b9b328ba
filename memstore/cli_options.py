"""What commands share: how they are declared, how a failure becomes one line and an exit status, common options."""

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from memstore import console
from memstore.errors import InvalidInput, MemstoreError, StorageFull

P = ParamSpec("P")
ASK_BUDGET = 1 << 30  # bytes of main memory for blocks


@dataclass(frozen=True)
class Command:
    """A command to be registered: `run` returns nothing and ends by typer.Exit where it fails."""

    name: str
    run: Callable[..., None]
    epilog: str


def command(name: str, *examples: str, interrupted: str = "interrupted") -> Callable[[Callable[P, None]], Command]:
    """Declare a command with its examples; what goes wrong in it becomes one line on stderr and exit status 1.

    With --json stdout then gets {"error": {"name", "message"}}. interrupted: what Ctrl-C says (exit status 130).
    """

    def declare(function: Callable[P, None]) -> Command:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            as_json = bool(kwargs.get("as_json"))
            try:
                function(*args, **kwargs)
            except BrokenPipeError:
                abandon_stdout()  # whoever read our output has seen enough
                raise typer.Exit(1) from None
            except (MemstoreError, OSError) as error:
                _fail(_named(error), as_json)
            except KeyboardInterrupt:
                console.note(interrupted)
                raise typer.Exit(130) from None

        return Command(name, run, "\b\nExample:\n" + "\n".join(f"  {example}" for example in examples))

    return declare


def _named(error: MemstoreError | OSError) -> MemstoreError:
    if isinstance(error, MemstoreError):
        return error
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageFull(f"{what}; make room and try again")
    return InvalidInput(what)


def _fail(error: MemstoreError, as_json: bool) -> NoReturn:
    message = console.one_line(str(error))
    console.note(f"error: {message}")
    if as_json:
        console.emit({"error": {"name": type(error).__name__, "message": message}})
    raise typer.Exit(1) from None


def abandon_stdout() -> None:
    """Nobody reads it any more: what is still buffered must not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_size(text: str) -> int:
    """`console.parse_size` for an option. Raises typer.BadParameter."""
    try:
        return console.parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _option(flag: str, metavar: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, **more)


Store = Annotated[Path, _option("--store", "DIR", "Directory of the memory.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Model = Annotated[
    str | None,
    _option("--model", "PATH", "Directory of a model; default: the one that ships.", envvar="MEMSTORE_MODEL"),
]
Documents = Annotated[
    list[str] | None, _option("--document", "N", "Ask this document only (repeatable); default: all.")
]
HostBudget = Annotated[
    int | None, _option("--host-budget", "SIZE", "Main memory for blocks, such as 512MB.", parser=parse_size)
]
MaxNewTokens = Annotated[int, _option("--max-new-tokens", "N", "Longest answer, in tokens.")]
TopK = Annotated[int | None, _option("--top-k", "K", "Blocks read by a lookup; default: the model's.")]
Cutoff = Annotated[
    float | None, _option("--cmt-cutoff", "C", "Skip lookups whose gate is below C (0 = none); default: the model's.")
]
Granularity = Annotated[
    str | None, _option("--granularity", "G", "Choose blocks per_token_per_head, per_token, per_head or shared.")
]
Temperature = Annotated[float, _option("--temperature", "T", "0 takes the likeliest token; above samples.")]
Seed = Annotated[int | None, _option("--seed", "S", "Makes random choices repeatable.")]
