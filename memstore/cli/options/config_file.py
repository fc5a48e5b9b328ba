"""A file of options in the place of a command line: TOML, whose keys are the options' names without
their dashes. What the command line says wins; the file goes before the environment.
"""

import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from memstore.errors import MemstoreError
from memstore.share.publication_options import is_url

# What TOML has for a type of click's, of whichever version.
_TRUTH, _WHOLE = ((bool,), "true or false"), ((int,), "a whole number")
_NUMBER, _TEXT = ((int, float), "a number"), ((str,), "a text")
_KINDS = {
    **dict.fromkeys(("bool", "boolean"), _TRUTH),
    **dict.fromkeys(("int", "integer"), _WHOLE),
    "float": _NUMBER,
    **dict.fromkeys(("str", "text", "path", "filename"), _TEXT),
}
PATHS = ("store", "state", "api-key-file", "local-cache", "trace")  # options that name one
_PARSED = ((str, int, float), "a text or a number")  # by the option's own parser


def option_file(check: Callable[[Mapping[str, Any]], None]) -> Any:
    """The option --config FILE.

    check: takes the file's values, as the command gets them, by its parameters' names; raises
    MemstoreError for one that is out of range.
    """

    def read(context: typer.Context, file: Path | None) -> Path | None:
        if file is not None and not context.resilient_parsing:
            context.default_map = _values(context, file, check)
        return file

    return typer.Option(
        "--config",
        metavar="FILE",
        callback=read,
        is_eager=True,
        help="Options in TOML, by their names without dashes (port = 8000); the command line wins.",
    )


def _values(
    context: typer.Context, file: Path, check: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """The file's values by their parameters' names. Raises typer.BadParameter, which names the
    file.
    """
    options: dict[str, Any] = {
        flag.removeprefix("--"): option
        for option in context.command.params
        for flag in option.opts
        if flag.startswith("--") and flag not in ("--config", "--help")
    }
    values, taken = {}, {}
    try:
        for key, value in tomllib.loads(file.read_text(encoding="utf-8")).items():
            name = key.replace("_", "-")
            if name not in options:
                near = get_close_matches(name, options, 1)
                meant = f"; did you mean {near[0]}?" if near else ""
                raise typer.BadParameter(f"there is no option {key!r}{meant}")
            option = options[name]
            values[option.name] = _plain(key, option, _beside(file, name, value))
            taken[option.name] = _taken(context, key, option, values[option.name])
            option.envvar = None  # the file goes before it
        check(taken)
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from None
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{file}: {error.message}") from None
    except (ValueError, MemstoreError) as error:  # ValueError: no TOML, or no UTF-8
        raise typer.BadParameter(f"{file}: {error}") from None
    return values


def _beside(file: Path, name: str, value: Any) -> Any:
    """A path of the file's, which is told from the file's directory; no other value is another."""
    if name not in PATHS or not isinstance(value, str) or is_url(value):
        return value
    return str(file.parent / Path(value).expanduser())


def _plain(key: str, option: Any, value: Any) -> Any:
    """A value of the kind that its option takes, as click converts it."""
    kinds, named = _KINDS.get(option.type.name.removesuffix(" range"), _PARSED)
    if option.multiple and type(value) is not list:
        raise typer.BadParameter(f"{key} takes a list, each of it {named}, not {value!r}")
    for part in value if option.multiple else [value]:
        if type(part) not in kinds:
            raise typer.BadParameter(f"{key} takes {named}, not {part!r}")
    return str(value) if kinds is _PARSED[0] else value


def _taken(context: typer.Context, key: str, option: Any, value: Any) -> Any:
    """The same as the command gets it."""
    try:
        return option.type_cast_value(context, value)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{key}: {error.message}") from None
