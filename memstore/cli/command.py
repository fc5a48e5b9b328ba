"""How a command is declared, and how a failure becomes one line and an exit status."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, cast

import typer

from memstore.cli.terminal import console
from memstore.disk.files import NO_SPACE
from memstore.errors import InvalidInput, MemstoreError, StorageFull, WrongModel
from memstore.paths import expanded


@dataclass(frozen=True)
class Command:
    """A command to be registered: `run` returns nothing and ends by typer.Exit where it fails."""

    name: str
    run: Callable[..., None]
    epilog: str


def command(
    name: str, *examples: str, interrupted: str = "interrupted"
) -> Callable[[Callable[..., None]], Command]:
    """Declare a command with its examples; what goes wrong in it becomes one line on stderr and
    exit status 1.

    A parameter that is a dataclass of options (such as Tiers) stands for its fields, and one of
    these for its own. With --json stdout gets {"error": {"name", "message"}} for a failure.
    interrupted: what Ctrl-C says (exit status 130).
    """

    def declare(function: Callable[..., None]) -> Command:
        given = inspect.signature(function, eval_str=True).parameters.values()

        @wraps(function)
        def run(context: typer.Context, **kwargs: Any) -> None:
            as_json = bool(kwargs.get("as_json"))
            kwargs = {name: _expanded(value) for name, value in kwargs.items()}
            try:
                function(**{p.name: _taken(p.name, p.annotation, kwargs) for p in given})
            except typer.BadParameter as error:
                error.ctx = error.ctx or cast(Any, context)
                raise
            except BrokenPipeError:
                abandon_stdout()  # whoever read our output has seen enough
                raise typer.Exit(1) from None
            except (MemstoreError, OSError) as error:
                _fail(_named(error), as_json)
            except KeyboardInterrupt:
                console.note(interrupted)
                raise typer.Exit(130) from None

        context = inspect.Parameter(
            "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        )
        options = [option for p in given for option in _options(p.name, p.annotation, p.default)]
        options.append(context)
        cast(Any, run).__signature__ = inspect.Signature(options)
        run.__annotations__ = {option.name: option.annotation for option in options}
        return Command(
            name, run, "\b\nExample:\n" + "\n".join(f"  {example}" for example in examples)
        )

    return declare


def _options(name: str, kind: Any, default: Any) -> Iterator[inspect.Parameter]:
    """The options that a parameter of a command stands for."""
    if is_dataclass(kind):
        for field in fields(kind):
            yield from _options(field.name, field.type, field.default)
    else:
        if default is MISSING:
            default = inspect.Parameter.empty
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, keyword, default=default, annotation=kind)


def _taken(name: str, kind: Any, options: dict[str, Any]) -> Any:
    """What a parameter of a command is, of what was given for the options that it stands for."""
    if not is_dataclass(kind):
        return options[name]
    found: Any = cast(Any, kind)
    return found(**{f.name: _taken(f.name, f.type, options) for f in fields(kind)})


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
    message = console.one_line(str(error))
    console.note(f"error: {message}")
    if as_json:
        what: dict[str, Any] = {"name": type(error).__name__, "message": message}
        if isinstance(error, WrongModel):
            what["differences"] = error.differences
        console.emit({"error": what})
    raise typer.Exit(1) from None


def abandon_stdout() -> None:
    """Nobody reads it any more: what is still buffered must not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
