"""A chat template, rendered as transformers does, by jinja2 alone: for a process with bounds."""

import json
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from memstore.hf.checks.loading import first_line
from memstore.hf.checks.trial import MOST_RENDERED, Asked, Told


def render(asked: Asked) -> Told:
    """What the template writes, or that it raises or writes too much."""
    try:
        template = _environment(asked.date).from_string(asked.template)
        parts, length = [], 0
        for part in template.generate(
            messages=asked.messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **asked.tokens,
        ):
            parts.append(part)
            length += len(part)
            if length > MOST_RENDERED:
                return Told(refused="it writes too much")
        return Told("".join(parts))
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, and raises what it likes
        return Told(raised=first_line(error))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which transformers marks what an assistant says, changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> Any:
        return caller()


class _Namespace(Namespace):
    """Without names by which a template would come at what Python keeps in objects."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *values = args
        attributes = dict(*values, **named)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name} cannot be stored")


class _Dict:
    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment(date: str) -> ImmutableSandboxedEnvironment:
    """That of transformers.utils.chat_template_utils, on one day."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: date,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment
