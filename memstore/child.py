"""Run one of our modules in a Python process that ignores the working directory and the
environment's additions to Python's path, and that ends with its parent process.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

# The package is taken from where this process has it. Its directory comes last on the path, for
# what is installed beside it: nothing there stands before an installed module, or one of Python's.
_BEGIN = """\
import importlib.util, runpy, sys
where, module = sys.argv[1:3]
package = f"{where}/memstore"
spec = importlib.util.spec_from_file_location(
    "memstore", f"{package}/__init__.py", submodule_search_locations=[package]
)
sys.modules["memstore"] = memstore = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memstore)
sys.path.append(where)
sys.argv[1:] = sys.argv[3:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m module`, isolated from the working directory, PYTHONPATH and
    the user's own packages.
    """
    where = str(Path(__file__).resolve().parents[1])
    return [sys.executable, "-I", "-c", _BEGIN, where, module, *arguments]


def run_tied(module: str, *arguments: str, given: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run a module in a process that ends when this one ends, even if this one is killed.

    The module must pass its first argument, which is added before `arguments`, to
    `end_with_parent`. given: its standard input. Returns its exit status, stdout and stderr. Raises
    OSError.
    """
    watched, held = os.pipe()  # which no other child inherits
    try:
        return subprocess.run(
            python_command(module, str(watched), *arguments),
            input=given,
            capture_output=True,
            pass_fds=[watched],
            check=False,
        )
    finally:
        os.close(watched)
        os.close(held)


def end_with_parent(watched: str) -> None:
    """End this process when the other end of a pipe is closed."""

    def watch() -> None:
        os.read(int(watched), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
