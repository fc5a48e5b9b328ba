"""The reference page of commands and options, generated from the command line."""

from collections.abc import Iterator
from typing import Any

import typer

from docs_build.markdown import cell, code, table
from memstore.cli.main import app

_ABOUT = """Every command and option, as `memstore COMMAND --help` shows them. Sizes take `KB`,
`MB`, `GB`. Exit status: 0; 1 (failed: one line on stderr says why and what to do); 2 (wrong
usage or input); 130 (Ctrl-C) and 143 (SIGTERM), after which the same command resumes an ingest.
Without `--store` and `$MEMSTORE_STORE` the memory is `./memory`.
"""


def commands(group: Any = None, path: str = "memstore") -> Iterator[tuple[str, Any]]:
    """Every command with its full name ("memstore share push"), without groups."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        elif not command.hidden:
            yield f"{path} {name}", command


def option_names(command: Any) -> set[str]:
    """The options that a command takes, with their dashes."""
    names = (name for parameter in command.params for name in _typed(parameter))
    return {"--help", *(name for name in names if name.startswith("-"))}


def commands_page() -> str:
    """Markdown: a section for each command."""
    return "\n".join(["# Commands", "", _ABOUT, *(_section(path, one) for path, one in commands())])


def _section(path: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join([path, *(_usage(one) for one in arguments), "[OPTIONS]" if options else ""])
    about, _, example = (command.help or "").partition("\b\nExample:\n")
    example = example or (command.epilog or "").partition("Example:\n")[2]
    rows = [[f"`{_usage(one)}`", "", _about(one)] for one in arguments]
    rows += [[f"`{', '.join(_typed(one))}`", _kind(one), _about(one)] for one in options]
    shown = "\n".join(line.strip() for line in example.strip().splitlines())
    parts = [f"## {path}", "", about.strip(), "", f"```text\n{usage.strip()}\n```", ""]
    parts += [table(["", "takes", ""], rows)]
    if shown:
        parts += [f"```sh\n{shown}\n```", ""]
    return "\n".join(parts)


def _typed(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    shown = f"{name}..." if argument.nargs != 1 and not name.endswith("...") else name
    return shown if argument.required else f"[{shown}]"


def _kind(option: Any) -> str:
    if option.is_flag:
        return ""
    return code(option.metavar or option.type.name.upper())


def _about(parameter: Any) -> str:
    said = [cell(parameter.help or "")]
    default = parameter.default
    if isinstance(default, int | float | str) and not isinstance(default, bool) and default != "":
        said.append(f"Default: `{default}`.")
    if isinstance(parameter.envvar, str):
        said.append(f"Or `${parameter.envvar}`.")
    return " ".join(said)
