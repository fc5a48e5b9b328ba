"""Declare a command, and turn its failure into one line and an exit status."""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, cast

import typer

from memstore import errors
from memstore.cli import console
from memstore.disk.files import NO_SPACE
from memstore.errors import InvalidInput, MemstoreError, StorageFull, WrongModel
from memstore.paths import expanded

# errors of the user's input: a file, a folder, a model, a memory, a document, a setting
_WRONG_INPUT = (
    InvalidInput,
    errors.InvalidConfig,
    errors.InvalidWeights,
    errors.BudgetExceeded,
    errors.MemoryNotFound,
    errors.MemoryExists,
    errors.DocumentNotFound,
    errors.DocumentExists,
    WrongModel,
)


@dataclass(frozen=True)
class Command:
    """A command to be registered. `run` raises typer.Exit if the command fails."""

    name: str
    run: Callable[..., None]
    epilog: str


def command(
    name: str, *examples: str, interrupted: str = "interrupted"
) -> Callable[[Callable[..., None]], Command]:
    """Declare a command with its examples. An error becomes one line on stderr and an exit status:
    2 for a wrong input, 1 for a failure.

    A parameter that is a dataclass of options (such as Tiers) becomes an option for each of its
    fields. With --json stdout gets {"error": {"name", "message"}} for a failure. interrupted: the
    message on Ctrl-C (exit status 130) and SIGTERM (143).
    """

    def declare(function: Callable[..., None]) -> Command:
        parameters = inspect.signature(function, eval_str=True).parameters.values()

        @wraps(function)
        def run(context: typer.Context, **options: Any) -> None:
            as_json = bool(options.get("as_json"))
            try:
                options = {name: _expanded(value) for name, value in options.items()}
                function(**{p.name: _argument(p, options) for p in parameters})
            except typer.BadParameter as error:
                error.ctx = error.ctx or cast(Any, context)
                raise
            except BrokenPipeError:
                abandon_stdout()
                raise typer.Exit(1) from None
            except (MemstoreError, OSError) as error:
                _fail(_named(error), as_json)
            except KeyboardInterrupt as interrupt:
                console.note(interrupted)
                raise typer.Exit(exit_status(interrupt)) from None

        options = [option for p in parameters for option in _options(p)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter("context", keyword, annotation=typer.Context))
        cast(Any, run).__signature__ = inspect.Signature(options)
        run.__annotations__ = {option.name: option.annotation for option in options}
        return Command(
            name, run, "\b\nExample:\n" + "\n".join(f"  {example}" for example in examples)
        )

    return declare


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """The options of a command's parameter: itself, or the fields of its dataclass."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    if not is_dataclass(parameter.annotation):
        yield parameter.replace(kind=keyword)
        return
    for field in fields(parameter.annotation):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield inspect.Parameter(field.name, keyword, default=default, annotation=field.type)


def _argument(parameter: inspect.Parameter, options: dict[str, Any]) -> Any:
    """The value of a command's parameter from the values of its options."""
    kind = parameter.annotation
    if not is_dataclass(kind):
        return options[parameter.name]
    return cast(Any, kind)(**{field.name: options[field.name] for field in fields(kind)})


def _expanded(value: Any) -> Any:
    """The value of an option, with ~ expanded in paths."""
    if isinstance(value, list):
        return [_expanded(one) for one in value]
    return expanded(value) if isinstance(value, Path) else value


def _named(error: MemstoreError | OSError) -> MemstoreError:
    if isinstance(error, MemstoreError):
        return error
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    if error.errno in NO_SPACE:
        return StorageFull(f"{what}; make room and try again")
    return InvalidInput(what)


def _fail(error: MemstoreError, as_json: bool) -> NoReturn:
    described = console.report(error)
    if as_json:
        if isinstance(error, WrongModel):
            described["differences"] = error.differences
        with suppress(OSError):  # of stdout, which may be what failed
            console.emit({"error": described})
    raise typer.Exit(2 if isinstance(error, _WRONG_INPUT) else 1) from None


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """128 and the number of the signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + int(interrupt.args[0] if interrupt.args else signal.SIGINT)


def abandon_stdout() -> None:
    """Drop what stdout still buffers: its reader has closed it, and a flush at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
