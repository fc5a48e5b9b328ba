"""This repository's modules as syntax trees: what the scripts of this room count and search."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of Python: its path from the root, its text and its tree."""

    path: Path
    text: str
    tree: ast.Module


def modules(folder: str, root: Path = ROOT) -> list[Module]:
    """Those below a folder of the root, by path."""
    files = sorted((root / folder).rglob("*.py"))
    texts = [(file.relative_to(root), file.read_text(encoding="utf-8")) for file in files]
    return [Module(path, text, ast.parse(text)) for path, text in texts]


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, those inside others too."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def dotted(node: ast.AST) -> str:
    """The name that a decorator or a base has: "torch.no_grad" of `torch.no_grad()`."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
