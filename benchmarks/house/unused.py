"""What is defined in memstore/ and used nowhere but in tests, or only by benchmarks?

What stands in a module (functions, classes, constants) is used where that module reads it, or
another one imports it from there. What stands in a class (methods, fields, class attributes) is
used where an attribute of that name is read, of whatever: methods of one name hide each other.
Names in strings (getattr, entry points, names of settings) count for both; what a definition says
of itself counts for neither. Somebody looks at what is listed before it goes. Left out: names with
two underscores, what a decorator hands to others (commands, routes), and what a base class outside
the package calls (`CALLED_FROM_OUTSIDE`).

    python -m benchmarks.house.unused [--benchmarks] [ROOT]
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.house.sources import ROOT, Function, Module, dotted, modules

CALLED_FROM_OUTSIDE = {
    "torch": ("forward backward"),
    "html.parser, lxml": ("handle_starttag handle_endtag handle_data comment"),
    "transformers' caches and templates": (
        "get_seq_length get_query_offset get_mask_sizes has_previous_state reorder_cache crop tags"
    ),
    "LangChain, LlamaIndex, llm": (
        "MemstoreRetriever model_post_init _get_relevant_documents model_id can_stream"
    ),
    "uvicorn, asyncio": (
        "connection_made connection_lost handle_events on_response_complete startup"
    ),
    "pydantic, and what requests may name": ("model_config ranker safety_identifier"),
    "prometheus_client": ("collect"),
}
_PLAIN = {
    "property", "cached_property", "functools.cached_property", "staticmethod", "classmethod",
    "contextmanager", "abstractmethod", "dataclass", "torch.no_grad", "cache", "lru_cache",
    "functools.cache", "functools.lru_cache", "override", "final", "runtime_checkable",
    "triton.jit", "asynccontextmanager",
}  # fmt: skip
_KNOWN = set(" ".join(CALLED_FROM_OUTSIDE.values()).split())
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Definition:
    """Something with a name, where it stands, and the module that it can be imported from ("" for
    what stands in a class).
    """

    name: str
    where: str
    module: str
    node: ast.AST


def definitions(module: Module) -> Iterator[Definition]:
    """Of a module and its classes; what is defined inside functions is left to ruff."""
    yield from _of(module, module.tree.body, "", _dotted_path(module))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            yield from _of(module, node.body, f"{node.name}.", "")


def _dotted_path(module: Module) -> str:
    return ".".join(module.path.with_suffix("").parts).removesuffix(".__init__")


def _of(module: Module, body: list[ast.stmt], owner: str, path: str) -> Iterator[Definition]:
    for node in body:
        names: list[str] = []
        if isinstance(node, Function | ast.ClassDef):
            if all(dotted(one) in _PLAIN for one in node.decorator_list):
                names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [one.id for one in node.targets if isinstance(one, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        for name in names:
            if not name.startswith("__") and name not in _KNOWN:
                yield Definition(name, f"{module.path}:{node.lineno} {owner}{name}", path, node)


class Uses:
    """What is used below a node: (module, name) of what is imported or read where it stands, and
    names of attributes and in strings.
    """

    def __init__(self, module: Module, tree: ast.AST) -> None:
        self.names: Counter[tuple[str, str]] = Counter()
        self.attributes: Counter[str] = Counter()
        self.strings: Counter[str] = Counter()
        own = _dotted_path(module)
        aliases = _aliases(module.tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.names[own, node.id] += 1
            elif isinstance(node, ast.ImportFrom):
                self.names.update((node.module or "", one.name) for one in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self.attributes[node.attr] += 1
                if isinstance(node.value, ast.Name) and node.value.id in aliases:
                    self.names[aliases[node.value.id], node.attr] += 1
            elif isinstance(node, ast.MatchClass):
                self.attributes.update(node.kwd_attrs)
            elif isinstance(node, ast.Constant) and " " not in str(node.value):
                # a name, or a path of names; and no docstring
                self.strings.update(_WORD.findall(str(node.value)))

    def of(self, one: Definition) -> int:
        """How often a definition is used here."""
        named = self.names[one.module, one.name] if one.module else self.attributes[one.name]
        return named + self.strings[one.name]


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Modules by the name that a file has for them."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {one.asname: one.name for one in node.names if one.asname}
    return found


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("root", nargs="?", type=Path, default=ROOT, help="of another checkout")
    options.add_argument(
        "--benchmarks", action="store_true", help="list also what only benchmarks use"
    )
    chosen = options.parse_args()
    package = modules("memstore", chosen.root)
    others = [] if chosen.benchmarks else modules("benchmarks", chosen.root)
    used = [Uses(module, module.tree) for module in [*package, *others]]
    named = set(_WORD.findall((chosen.root / "pyproject.toml").read_text(encoding="utf-8")))
    listed = [
        one.where
        for module in package
        for one in definitions(module)
        if one.name not in named
        and sum(every.of(one) for every in used) <= Uses(module, one.node).of(one)
    ]
    print("\n".join(listed))
    print(f"{len(listed)} definitions without a user")


if __name__ == "__main__":
    main()
