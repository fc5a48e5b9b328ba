"""Which modules a new process has imported at its end."""

import json
import subprocess
import sys

from support.paths import ROOT

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
