"""Servers for tests marked `services`: each an empty process on a free port. Tests of a missing
program are skipped.
"""

import hmac
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from random import SystemRandom

import pytest

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "never-to-be-printed",
    "AWS_REGION": "us-east-1",
}


def free_port() -> int:
    """A port of this machine that nobody listens at.

    It is none of those that connections are given by the system (from 32768 on), which one of them
    could have taken before the server does.
    """
    random = SystemRandom()
    while True:
        port = random.randrange(10_000, 22_000)
        with suppress(OSError), socket.socket() as first:
            first.bind(("127.0.0.1", port))
            return port


# moto checks the condition of a put and stores the object without holding anything in between; in
# S3 both are one step. So its requests are answered one after another.
ATOMIC_MOTO = """
import sys, threading
from moto import server

one_at_a_time = threading.Lock()

class Application(server.DomainDispatcherApplication):
    def __call__(self, environ, start_response):
        with one_at_a_time:
            return super().__call__(environ, start_response)

server.DomainDispatcherApplication = Application
server.main(sys.argv[1:])
"""


def wait_until(ready: Callable[[], object]) -> None:
    """Until a server that was started answers."""
    for _ in range(600):
        with suppress(OSError):
            ready()
            return
        time.sleep(0.1)
    raise RuntimeError("the server did not start")


@contextmanager
def running(
    command: Sequence[str], ready: Callable[[], object], env: Mapping[str, str] = {}
) -> Iterator[None]:
    """A server's process, once it answers, to be killed at the end."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet, env={**os.environ, **env}) as server:
        try:
            wait_until(ready)
            yield
        finally:
            server.kill()


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3 server; yields its endpoint."""
    if find_spec("moto") is None or find_spec("flask") is None:
        pytest.skip("moto is not installed: make services")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", ATOMIC_MOTO, "-H", "127.0.0.1", "-p", str(port)]

    def answers() -> None:
        urllib.request.urlopen(f"{endpoint}/moto-api/data.json", timeout=5).read()

    with running(command, answers, S3_ENVIRONMENT):
        yield endpoint


AZURE_ENVIRONMENT = {  # the account that every Azurite has, and says so
    "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
    "AZURE_STORAGE_ACCOUNT_KEY": (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    ),
}


@contextmanager
def azure_server() -> Iterator[str]:
    """Azurite's server of blobs (npm install -g azurite); yields its endpoint."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed: npm install -g azurite")
    port = free_port()
    command = [program, "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    command += ["--skipApiVersionCheck", "--silent"]
    with running(command, lambda: socket.create_connection(("127.0.0.1", port)).close()):
        yield f"http://127.0.0.1:{port}/{AZURE_ENVIRONMENT['AZURE_STORAGE_ACCOUNT_NAME']}"


def make_container(endpoint: str, name: str) -> None:
    """A new container of an Azure server. Its own key signs the request, as Azure's REST API says
    (Authorize with Shared Key).
    """
    account, key = AZURE_ENVIRONMENT.values()
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{header}:{value}\n" for header, value in headers.items())
    resource = f"/{account}/{account}/{name}\nrestype:container"
    digest = hmac.digest(b64decode(key), f"PUT{12 * chr(10)}{signed}{resource}".encode(), "sha256")
    headers["Authorization"] = f"SharedKey {account}:{b64encode(digest).decode()}"
    url = f"{endpoint}/{name}?restype=container"
    request = urllib.request.Request(url, headers=headers, method="PUT")
    urllib.request.urlopen(request, timeout=30).read()


def make_bucket(endpoint: str, name: str) -> None:
    """A new bucket of an S3 server."""
    import boto3  # which moto brings

    key, secret, region = S3_ENVIRONMENT.values()
    boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
    ).create_bucket(Bucket=name)


class Server:
    """One Valkey or Redis server; `kill` and `start` again at the same port, with nothing in it."""

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
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._folder), *self._options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, **quiet)
        wait_until(lambda: self.tell("PING"))

    def tell(self, line: str) -> str:
        """The first part of a command's answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(f"{line}\r\n".encode())
            return connection.recv(1 << 16).decode()

    def hang(self) -> None:
        """Stops the process, which then answers nothing until `kill` ends it."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def valkey_server(folder: Path, *options: str) -> Iterator[Server]:
    """A Valkey server with these options."""
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.kill()
