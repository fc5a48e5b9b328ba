"""Compiles Triton kernels for a GPU that this machine need not have: their launches compile and do
not run.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

H200 = GPUTarget("cuda", 90, 32)
# of a multiprocessor; and the most shared memory one program may have
REGISTERS, SHARED = 65536, 232448


@dataclass(frozen=True)
class Compiled:
    """A kernel as ptxas left it: registers of a thread, bytes it spills (stores and loads), bytes
    of shared memory.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    warps: int

    @property
    def programs(self) -> int:
        """How many run side by side on a multiprocessor, as far as registers and shared memory
        decide it.
        """
        return min(REGISTERS // (self.registers * self.warps * 32), SHARED // max(1, self.shared))

    @property
    def resources(self) -> dict[str, int]:
        """As columns of a table."""
        return {
            "registers": self.registers,
            "spilled": self.spilled,
            "shared": self.shared,
            "warps": self.warps,
            "programs": self.programs,
        }


class _Absent:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return H200

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled() -> Iterator[list[Compiled]]:
    """Inside, a launch of a kernel on tensors of any device compiles it as it would for these, into
    the list.
    """
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(
        kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> Any:
        built = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        found.append(_resources(kernel.fn.__name__, built))
        return built

    before = driver._active
    driver.set_active(_Absent())
    try:
        with patch.object(JITFunction, "run", compile_only):
            yield found
    finally:
        driver._active = before


def _resources(name: str, built: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(built.asm["ptx"])
        command = [
            get_ptxas(90).path,  # the one that Triton writes for
            "-v",
            "--gpu-name=sm_90a",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = int(re.findall(r"Used (\d+) registers", said)[-1])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    return Compiled(name, registers, spilled, built.metadata.shared, built.metadata.num_warps)
