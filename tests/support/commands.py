"""Running commands as users type them, in this process or another, and checks of their results."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from memstore.__main__ import main as command_line
from memstore.cli.main import main
from memstore.model.landmark.landmark_model import SHIPPED, save_checkpoint
from memstore.model.landmark.transformer import ModelConfig, Transformer
from memstore.model.tokenizer import Tokenizer
from support.forked import forked
from support.paths import ROOT
from support.synthetic_documents import is_whole

STORY = (
    "The red fox lives in the old mill. The code of the red fox is 4711. Nobody else knows it.\n"
    * 24
)
OTHER = "A quite different text about boats and the harbour where they lie at night.\n" * 30


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout, which must be one JSON object on one line."""
        assert self.out.count("\n") == 1 and self.out.endswith("\n")
        return json.loads(self.out)


def run(*arguments: object, stdin: str | bytes = b"") -> Result:
    """The command in this process, as `memstore ARGUMENTS` would run."""
    out, err = io.StringIO(), io.StringIO()
    kept = sys.argv, sys.stdin
    sys.argv = ["memstore", *map(str, arguments)]
    sys.stdin = io.TextIOWrapper(
        io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), encoding="utf-8"
    )
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main()
    finally:
        sys.argv, sys.stdin = kept
    return Result(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def start(
    *arguments: object,
    fresh: bool = False,
    program: Callable[[], object] = command_line,
    env: Mapping[str, str] = {},
    **options: Any,
) -> "subprocess.Popen[str]":
    """The command in a process of its own, where SIGINT is what it is on a terminal, however the
    tests were started; env: variables that it has beside those of this process. fresh: Python
    starts anew, not as a fork of this process, which calls `program`.
    """
    words = [*map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    if not fresh:
        return forked(program, ["memstore", *words], text=True, env=variables, **options)
    return subprocess.Popen(
        [sys.executable, "-m", "memstore", *words],
        text=True,
        env=variables,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def run_forked(prepare: Callable[[], object], *arguments: object) -> Result:
    """The command in a forked child, after `prepare` has taken something from the child alone."""

    def prepared() -> None:
        prepare()
        command_line()

    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = forked(prepared, ["memstore", *map(str, arguments)], text=True, **streams)
    out, err = process.communicate()
    return Result(process.returncode, out, err)


def become_nobody() -> None:
    """Root may write anywhere; nobody may not."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def refused(result: Result, *words: str, status: int = 2) -> None:
    """The command printed one line on stderr with these words, and nothing on stdout."""
    assert (result.status, result.out) == (status, "")
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    for word in words:
        assert word in result.err


def intact(store: Path, *names: str) -> None:
    """The memory holds these documents, ready and undamaged."""
    documents = run("ls", "--store", store, "--json").json["documents"]
    assert {document["name"]: document["state"] for document in documents} == dict.fromkeys(
        names, "ready"
    )
    assert is_whole(store)


def write_model(directory: Path, seed: int = 0, **shape: Any) -> Path:
    """A tiny model's checkpoint, of random weights; returns its directory."""
    config = ModelConfig(
        vocab_size=2048,
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        mlp_size=64,
        **shape,
    )
    model = Transformer(config)
    model.initialise(torch.Generator().manual_seed(seed))
    save_checkpoint(model, Tokenizer.load(SHIPPED / "tokenizer.json"), directory)
    return directory
