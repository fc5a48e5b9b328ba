"""The reference page of settings: fields of dataclasses and TypedDicts with their comments."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple, get_type_hints

from docs_build.markdown import cell, code, table
from memstore.model.lookup_settings import AnswerSettings, LookupSettings
from memstore.serve.settings import ServeSettings
from memstore.share.publication_options import ShareOptions
from memstore.store.open_options import OpenOptions
from memstore.tiers.policy import TierOptions

SETTINGS = (
    (TierOptions, "Tiers", "`options=` of `memstore.open`; `MemoryStore.open` and `create`."),
    (ShareOptions, "Published memories", "The same, for a memory at a URL."),
    (OpenOptions, "Index", "The same."),
    (
        LookupSettings,
        "Lookups",
        "`ask`, `search` and sessions take them; a model has its defaults.",
    ),
    (AnswerSettings, "Answers", "`ask` and every turn of a chat take them."),
    (ServeSettings, "Server", "Options of `memstore serve`, with `-` for `_`."),
)


class Setting(NamedTuple):
    """A field: its name, its type and its default as in the code, and its comment."""

    name: str
    kind: str
    default: str
    about: str


def settings_page() -> str:
    """Markdown: a section for each class."""
    parts = ["# Settings", ""]
    for kind, title, about in SETTINGS:
        rows = [
            [f"`{one.name}`", code(one.kind), code(one.default), cell(one.about)]
            for one in settings(kind)
        ]
        head = ["", "type", "default", ""]
        parts += [f"## {title}", "", f"`{kind.__name__}`. {about}", "", table(head, rows)]
    return "\n".join(parts)


def settings(kind: type) -> Iterator[Setting]:
    """The fields of a class without its bases, in order. A field's comment is on its line, or on
    the lines above it.
    """
    source = inspect.cleandoc("\n" + inspect.getsource(kind))
    comments, alone = _comments(source)
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    hints = get_type_hints(kind)
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            default = _default(kind, field)
            about = [
                comments[line] for line in (field.lineno, field.end_lineno) if line in comments
            ]
            line = field.lineno - 1
            while not comments.get(field.lineno) and line in alone:
                about.insert(0, alone[line])
                line -= 1
            unique = dict.fromkeys(about)
            yield Setting(
                field.target.id, _plain(hints[field.target.id]), default, " ".join(unique)
            )


def _default(kind: type, field: ast.AnnAssign) -> str:
    """The expression in the code; the value of a constant."""
    if isinstance(field.value, ast.Name) and isinstance(field.target, ast.Name):
        return repr(getattr(kind, field.target.id))
    return "" if field.value is None else ast.unparse(field.value)


def _plain(hint: object) -> str:
    """A type without the modules of its names."""
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", inspect.formatannotation(hint))


def _comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Comments by line number: after code, and alone on their line."""
    after: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            kind = alone if token.line.lstrip().startswith("#") else after
            kind[token.start[0]] = token.string.lstrip("# ")
    return after, alone
