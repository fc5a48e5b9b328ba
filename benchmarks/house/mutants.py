"""Do the tests notice when code that commits, checks, locks or counts is wrong?

One thing is changed at a time in a copy of the repository: a comparison, a condition, a number, a
call that is left out. The tests of the rooms that hold such code run on each copy, until one fails
or hangs. What survives is printed with its place: either no test protects it, or it changes nothing
(an equivalent mutant, which a reader has to tell). --seed draws others.

    python -m benchmarks.house.mutants --count 50 --seed 0
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.common.options import add, plain_parser
from benchmarks.common.tables import table
from benchmarks.house.sources import ROOT, functions

SUBJECTS = {
    "commit": ["memstore/store/write/commits.py", "memstore/disk/lmdb/transaction.py"],
    "checksum": [
        "memstore/disk/format/record.py",
        "memstore/store/transfer/exports.py",
        "memstore/disk/lmdb/meta_pages.py",
    ],
    "lock": [
        "memstore/disk/lmdb/locks.py",
        "memstore/disk/lmdb/registry.py",
        "memstore/store/write/admission.py",
    ],
    "counting": ["memstore/disk/tables/passage_table.py", "memstore/disk/tables/changes.py"],
}
TESTS = ("tests/disk", "tests/store", "tests/tiers", "tests/share")
_COPIED = ("memstore", "benchmarks", "tests", "docs", "docs_build", "pyproject.toml", "README.md")
_OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
HANGS = 120  # seconds, of one test


@dataclass(frozen=True)
class Mutant:
    """A change of one file: where, what, and the file's text with it."""

    file: str
    line: int
    what: str
    text: str


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """Every one of a file, in the order of the text."""
    for at in range(sum(1 for _ in _changes(ast.parse(text)))):
        tree = ast.parse(text)
        line, what, change = list(_changes(tree))[at]
        change()
        yield Mutant(file, line, what, ast.unparse(tree))


def _changes(tree: ast.Module) -> Iterator[tuple[int, str, "Change"]]:
    """What can be changed inside functions: line, description, and the deed."""
    inside = {id(node) for function in functions(tree) for node in _body(function)}
    for node in ast.walk(tree):
        if id(node) not in inside:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            other = _OTHER[type(node.ops[0])]
            what = f"{ast.unparse(node)}: {other.__name__}"
            yield node.lineno, what, Change(node, ops=[other()])
        elif isinstance(node, ast.BoolOp):
            flipped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            what = f"{ast.unparse(node)}: {type(flipped).__name__}"
            yield node.lineno, what, Change(node, op=flipped)
        elif isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield node.lineno, f"not ({ast.unparse(node.test)})", Change(node, test=negated)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            what = f"{node.value} is {node.value + 1}"
            yield node.lineno, what, Change(node, value=node.value + 1)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            turned = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield (
                node.lineno,
                f"{ast.unparse(node)}: {type(turned).__name__}",
                Change(node, op=turned),
            )
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            what = f"without {ast.unparse(node)}"
            yield node.lineno, what, Change(node, value=ast.Constant(None))


class Change:
    """Other fields of a node, once it is called."""

    def __init__(self, node: ast.AST, **fields: object) -> None:
        self.node, self.fields = node, fields

    def __call__(self) -> None:
        for name, value in self.fields.items():
            setattr(self.node, name, value)
        ast.fix_missing_locations(self.node)


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """What is run when a function is called, and not its defaults or annotations."""
    for statement in function.body:
        yield from ast.walk(statement)


def drawn(count: int, seed: int, root: Path = ROOT) -> list[tuple[str, Mutant]]:
    """As many of each subject as of any other, by chance: subject and mutant."""
    random = Random(seed)
    found = []
    for number, (subject, files) in enumerate(SUBJECTS.items()):
        of_all = [one for file in files for one in mutants(file, (root / file).read_text("utf-8"))]
        some = count // len(SUBJECTS) + (number < count % len(SUBJECTS))
        found += [(subject, one) for one in random.sample(of_all, min(some, len(of_all)))]
    return found


def killed_by(mutant: Mutant, copy: Path, tests: tuple[str, ...]) -> str | None:
    """The first test that fails or hangs, or None. copy: a copy of the repository."""
    file = copy / mutant.file
    before = file.read_text("utf-8")
    file.write_text(mutant.text, "utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--no-header",
             "--tb=no", "-rfE", "--timeout", str(HANGS), *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
    finally:
        file.write_text(before, "utf-8")
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else f"exit {done.returncode}"


def main() -> None:
    options = read_options()
    lines, survived = [], 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in _COPIED:
            where = ROOT / name
            (shutil.copytree if where.is_dir() else shutil.copy)(where, copy / name)
        for subject, mutant in drawn(options.count, options.seed)[options.skip :]:
            began = time.perf_counter()
            killer = killed_by(mutant, copy, tuple(options.tests))
            survived += killer is None
            place = f"{mutant.file}:{mutant.line}"
            print(f"{place} {mutant.what}: {killer or 'SURVIVED'}", flush=True)
            seconds = f"{time.perf_counter() - began:.0f}"
            lines.append([subject, place, mutant.what[:60], killer or "**survived**", seconds])
    print("\n" + table(["subject", "where", "changed", "killed by", "seconds"], lines))
    print(f"\n{survived} of {len(lines)} survived")


def read_options() -> argparse.Namespace:
    options = plain_parser(__doc__)
    add(options, "--count", 50, "mutants")
    add(options, "--skip", 0, "of these mutants, those that an earlier run has tried")
    add(options, "--tests", list(TESTS), "files or folders of tests, the quickest to fail first")
    return options.parse_args()


if __name__ == "__main__":
    main()
