"""Valkey or Redis servers for tests marked `services`: each a process of its own, on its port."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.services import free_port

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")


class Server:
    """One server; `kill` and `start` again at the same port, with nothing in it."""

    def __init__(self, folder: Path, *options: str) -> None:
        if BINARY is None:
            pytest.skip("neither valkey-server nor redis-server is installed: make services")
        self.port, self._folder, self._options = free_port(), folder, options
        folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert BINARY is not None
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._folder), *self._options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, **quiet)
        for _ in range(300):
            try:
                if self.tell("PING").startswith("+PONG"):
                    return
            except OSError:
                pass
            time.sleep(0.02)
        raise RuntimeError("the server did not start")

    def tell(self, line: str) -> str:
        """The first part of a command's answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(f"{line}\r\n".encode())
            return connection.recv(1 << 16).decode()

    def hang(self) -> None:
        """Let it answer nothing any more; it ends by `kill`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def valkey_server(folder: Path, *options: str) -> Iterator[Server]:
    """A server with these options."""
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.kill()
