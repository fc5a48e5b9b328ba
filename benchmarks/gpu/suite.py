"""The tests of this repository that run on a CUDA device where there is one."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.part import Case, Row, Setting

ROOT = Path(__file__).parents[2]
# by themselves they choose the device; the first are what nothing else here covers
CHOSEN = {
    "training": ["tests/training/test_training.py", "-k", "gpu"],
    "memory kernels": ["tests/kernels/test_memory_kernels.py"],
    "grouped softmax": ["tests/kernels/test_grouped_softmax.py"],
}
TINY = {"memory kernels": ["tests/kernels/test_memory_kernels.py", "-k", "topk_of_some_heads"]}


def cases(setting: Setting) -> list[Case]:
    chosen = TINY if setting.tiny else CHOSEN
    return [(name, partial(tested, name, given)) for name, given in chosen.items()]


def tested(name: str, given: list[str]) -> Iterator[Row]:
    """One line of pytest's, and which failed."""
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        yield Row(name, "pytest", note="pytest and hypothesis are not installed")
        return
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rf"]
    said = []
    with subprocess.Popen(
        [*command, *given], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:  # into the log as it comes: the time may run out
            print(line, end="", flush=True)
            said.append(line.strip())
    failed = [line.removeprefix("FAILED ")[:120] for line in said if line.startswith("FAILED ")]
    last = said[-1].strip("= ") if said else "nothing said"
    note = "; ".join([last, *failed[:6]])
    yield Row(f"tests: {name}", "pytest", right=running.returncode == 0, note=note)
