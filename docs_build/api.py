"""The reference page of the Python API: signatures and docstrings of memstore.__all__."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import memstore

_FIRST = ("open", "Memory", "Answer", "Source")


def api_page() -> str:
    """Markdown: a section for each name, `memstore.open` first."""
    others = [name for name in memstore.__all__ if name not in (*_FIRST, "__version__")]
    parts = [
        "# Python API",
        "",
        "`memstore.open` is enough for most programs; the other names are for what it does not do.",
        "",
    ]
    for name in (*_FIRST, *others):
        parts += _section(name, getattr(memstore, name))
    return "\n".join(parts)


def _section(name: str, what: Any) -> Iterator[str]:
    yield f"## memstore.{name}\n"
    if inspect.isclass(what):
        yield from _about(f"{name}", what if not issubclass(what, BaseException) else None, what)
        for member, function in _members(what):
            yield f"### {name}.{member}\n"
            if isinstance(function, property):
                yield f"{inspect.getdoc(function) or ''}\n"
            else:
                yield from _about(f"{name}.{member}", function, function)
    else:
        yield from _about(f"memstore.{name}", what, what)


def _about(called: str, signature_of: Any, documented: Any) -> Iterator[str]:
    if signature_of is not None:
        yield f"```python\n{called}{_signature(signature_of)}\n```\n"
    yield f"{inspect.getdoc(documented) or ''}\n"


def _signature(what: Any) -> str:
    """The signature without the modules of its types; one parameter a line if it is long."""
    try:
        signature = inspect.signature(what)
    except (TypeError, ValueError):
        return "(...)"
    shown = [p for p in signature.parameters.values() if p.name != "self"]
    signature = signature.replace(parameters=shown)
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", str(signature))
    text = re.sub(r"<function .+? at 0x[0-9a-f]+>|<object object[^>]*>", "...", text)
    text = re.sub(r"\*?<class '(\w+)'>", r"\1", text)
    text = re.sub(r"(: |-> )'([^']+)'", r"\1\2", text)  # types that are quoted
    if len(text) <= 90 or not shown:
        return text
    inside, _, returned = text[1:].rpartition(")")
    return "(\n    " + _broken(inside) + "\n)" + returned


def _broken(parameters: str) -> str:
    """Parameters on a line each: at commas outside brackets."""
    depth, text = 0, ""
    for sign in parameters:
        depth += (sign in "([{") - (sign in ")]}")
        text += ",\n   " if sign == "," and depth == 0 else sign
    return text


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring, of the class and its bases in memstore."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if not base.__module__.startswith("memstore"):
            continue
        for name, member in vars(base).items():
            plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            known = inspect.isfunction(plain) or isinstance(plain, property)
            if known and not name.startswith("_") and inspect.getdoc(plain):
                found.setdefault(name, plain)
    yield from found.items()
