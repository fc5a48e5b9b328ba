"""A command that needs no model imports nothing that only models and lookups need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memstore.store.memory_store import MemoryStore
from support.paths import ROOT
from support.synthetic_documents import SIGNATURE, ingest

HEAVY = ("torch", "faiss", "triton", "transformers", "tokenizers", "safetensors")
RUN = """
import atexit, json, sys
@atexit.register
def say():
    print(json.dumps([name for name in {names!r} if name in sys.modules]), file=sys.stderr)
{code}
"""


def imported(code: str, names: tuple[str, ...] = HEAVY, status: int = 0) -> list[str]:
    """Which of the modules a new process has imported at its end."""
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(names=names, code=code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


def command(*arguments: object) -> str:
    program = ["memstore", *map(str, arguments)]
    return f"import sys; sys.argv = {program!r}\nfrom memstore.cli.main import main\nmain()"


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "m"
    with MemoryStore.create(path, SIGNATURE) as store:
        ingest(store, "book", 100)
    return path


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ask", "--help"], []])
def test_help_imports_neither_torch_nor_lmdb(arguments: list[str]) -> None:
    assert imported(command(*arguments), (*HEAVY, "numpy", "lmdb")) == []


def test_commands_that_need_no_model_import_no_torch(memory: Path, tmp_path: Path) -> None:
    file = tmp_path / "book.memstore"
    other = tmp_path / "other"
    commands: list[list[object]] = [
        ["ls", "--store", memory],
        ["stats", "--store", memory],
        ["stats", "--store", memory, "--json"],
        ["export", "book", file, "--store", memory],
        ["import", file, "--store", other],
        ["rm", "book", "--store", other],
        ["compact", "--store", other],
        ["verify", "--store", memory],
    ]
    every = "\n".join(
        f"sys.argv = {['memstore', *map(str, words)]!r}\ntry: main()\n"
        "except SystemExit as end: assert not end.code, sys.argv\n"
        "assert 'torch' not in sys.modules, sys.argv"
        for words in commands
    )
    assert imported(f"import sys\nfrom memstore.cli.main import main\n{every}") == []


def test_importing_memstore_imports_nothing_heavy() -> None:
    assert imported("import memstore", (*HEAVY, "numpy", "lmdb")) == []
    assert imported("from memstore import MemoryStore") == []


def test_documents_are_converted_by_another_process() -> None:
    converters = ("lxml", "pypdfium2", "mammoth", "markdown_it")
    assert imported("import memstore.documents", (*HEAVY, *converters, "numpy", "lmdb")) == []
    code = "from memstore.documents import read\n"
    code += "assert read(b'# A', 'a.md').places and read(b'<html><p>x', 'a').text == 'x\\n'"
    assert imported(code, (*HEAVY, *converters, "numpy", "lmdb")) == []
