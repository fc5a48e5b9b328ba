"""Asking a memory from a process that has read nothing."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memstore.child import python_command
from memstore.cli.options.model_options import ModelOptions
from memstore.errors import MemstoreError


def ask_in_new_process(
    store: Path, by: ModelOptions, questions: Sequence[str], *arguments: str
) -> dict[str, Any]:
    """What `memstore ask - --json` answers: {"answers", "open_seconds"}; every question gets a
    session of its own there. Raises MemstoreError.
    """
    given = ["--device", by.device, "--dtype", by.dtype, "--weights", by.weights]
    given += ["--model", by.model] if by.model else []
    done = subprocess.run(
        python_command("memstore", "ask", "-", "--store", str(store), "--json", *given, *arguments),
        input="\n".join(questions),
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise MemstoreError(f"the process that asks ended with status {done.returncode}")
    replies: dict[str, Any] = json.loads(done.stdout)
    return replies
