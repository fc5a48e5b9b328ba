"""Servers for tests marked `services`: each a process of its own, on a free port, with nothing in
it. What is not installed is skipped with one line.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from random import SystemRandom

import pytest

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "never-to-be-printed",
    "AWS_REGION": "us-east-1",
}


def free_port(*, beside: int = 0) -> int:
    """A port of this machine that nobody listens at, nor at the one that is `beside` above it.

    It is none of those that connections are given by the system (from 32768 on), which one of them
    could have taken before the server does.
    """
    random = SystemRandom()
    while True:
        port = random.randrange(10_000, 22_000)
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            if beside:
                second.bind(("127.0.0.1", port + beside))
            return port


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3 server; yields its endpoint."""
    if find_spec("moto") is None or find_spec("flask") is None:
        pytest.skip("moto is not installed: make services")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet, env=os.environ | S3_ENVIRONMENT) as server:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{endpoint}/moto-api/data.json", timeout=5).read()
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.1)
            else:
                raise RuntimeError("moto's server did not start")
            yield endpoint
        finally:
            server.kill()


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
