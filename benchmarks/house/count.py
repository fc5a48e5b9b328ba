"""How large is this house, and where is it crowded?

Statements are `ast.stmt` nodes without docstrings. Of the package: files over 300 lines, functions
with more than six parameters besides self (kernels apart), the longest function, the fullest room
(files that lie in one folder), and Protocols that at most one class fulfils, by the names of its
methods and attributes.

    python -m benchmarks.house.count [ROOT]
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.common.tables import table
from benchmarks.house.sources import ROOT, Function, Module, dotted, functions, modules

FOLDERS = ("memstore", "benchmarks", "tests")
_LINES, _PARAMETERS = 300, 6


def statements(tree: ast.AST) -> int:
    """Of a module, its docstrings left out."""
    return sum(isinstance(node, ast.stmt) and not _docstring(node) for node in ast.walk(tree))


def _docstring(node: ast.stmt) -> bool:
    """Strings that stand alone: of a module, a class, a function, or behind a constant."""
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def parameters(function: Function) -> int:
    """That a caller can give."""
    given = function.args
    names = [one.arg for one in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    more = sum(one is not None for one in (given.vararg, given.kwarg))
    return len(names) + more - (names[:1] in (["self"], ["cls"]))


def length(function: Function) -> int:
    """Lines, from `def` to the last one."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def members(of: ast.ClassDef) -> set[str]:
    """Names of its methods and attributes, private ones left out."""
    found = {node.name for node in of.body if isinstance(node, Function)}
    for node in ast.walk(of):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Name) and node in of.body:
                    found.add(one.id)
                if isinstance(one, ast.Attribute) and dotted(one) == f"self.{one.attr}":
                    found.add(one.attr)
    return {name for name in found if not name.startswith("_") or name == "__call__"}


def lonely_protocols(package: Iterable[Module]) -> list[tuple[str, list[str]]]:
    """Protocols that no class of the package fulfils, or one; and which."""
    classes = {
        node.name: node
        for module in package
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    bases = {name: [dotted(b).split(".")[-1] for b in of.bases] for name, of in classes.items()}

    def every(name: str) -> set[str]:
        if name not in classes:
            return set()
        return members(classes[name]).union(*(every(base) for base in bases[name]))

    protocols = {name for name in classes if "Protocol" in bases[name]}
    ends = {name: every(name) for name in classes.keys() - protocols}
    parents = {base for of in bases.values() for base in of}
    found = []
    for name in sorted(protocols):
        wanted = every(name)
        fulfil = sorted(n for n, has in ends.items() if wanted <= has and n not in parents)
        if len(fulfil) <= 1 and wanted != {"__call__"}:
            found.append((name, fulfil))
    return found


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("root", nargs="?", type=Path, default=ROOT, help="of another checkout")
    root = options.parse_args().root
    every = {folder: modules(folder, root) for folder in FOLDERS}
    print(
        table(
            ["folder", "files", "statements"],
            [
                [folder, len(of), f"{sum(statements(module.tree) for module in of):,}"]
                for folder, of in every.items()
            ],
        )
    )
    package = every["memstore"]
    long = {str(m.path): m.text.count("\n") for m in package if m.text.count("\n") > _LINES}
    print(f"\nfiles over {_LINES} lines: {len(long)}")
    for path, lines in sorted(long.items(), key=lambda one: -one[1]):
        print(f"  {lines} {path}")
    named = [(f"{m.path}:{f.name}", f) for m in package for f in functions(m.tree)]
    wide = [
        (parameters(f), where) for where, f in named if not where.startswith("memstore/kernels")
    ]
    wide = sorted((one for one in wide if one[0] > _PARAMETERS), reverse=True)
    print(f"functions with more than {_PARAMETERS} parameters: {len(wide)}")
    for count, where in wide:
        print(f"  {count} {where}")
    longest = sorted(((length(f), where) for where, f in named), reverse=True)[:5]
    print("longest functions: " + ", ".join(f"{where} {lines}" for lines, where in longest))
    rooms = Counter(str(module.path.parent) for module in package)
    print("fullest rooms: " + ", ".join(f"{room} {n}" for room, n in rooms.most_common(5)))
    alone = lonely_protocols(package)
    print(f"Protocols that at most one class fulfils: {len(alone)}")
    for name, fulfil in alone:
        print(f"  {name}: {', '.join(fulfil) or 'none'}")


if __name__ == "__main__":
    main()
