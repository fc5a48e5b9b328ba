"""Places with no room left: under a limit, and on a file system of their own."""

import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch

from support.commands import Result, run_forked


class Limited:
    """No file grows beyond what the largest has, and a bit."""

    def __init__(self, scratch: Path) -> None:
        self.path, self._scratch = scratch / "disk", scratch
        self.path.mkdir(exist_ok=True)

    def run_full(self, room: int, grows: Path, *arguments: object) -> Result:
        # what is said goes to a file, too
        most = (grows.stat().st_size if grows.exists() else 1 << 10) + room

        def limit() -> None:
            torch.set_num_threads(1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        return run_forked(limit, self._scratch, *arguments)

    def close(self) -> None:
        """Nothing is held."""


class Mounted(Limited):
    """A file system of its own, filled up."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(self.path)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting is not allowed here")

    def run_full(self, room: int, grows: Path, *arguments: object) -> Result:
        filler = self.path / "filler"
        with filler.open("wb", buffering=0) as out:
            while True:
                status = os.statvfs(self.path)
                left = status.f_bavail * status.f_frsize - room
                if left <= 0:
                    break
                out.write(bytes(min(left, 1 << 20)))
        result = run_forked(lambda: torch.set_num_threads(1), self._scratch, *arguments)
        filler.unlink()
        return result

    def close(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)


def small_disk(scratch: Path) -> Limited:
    """A file system of its own where mounting is allowed, a limit elsewhere."""
    try:
        return Mounted(scratch)
    except pytest.skip.Exception:
        return Limited(scratch)
