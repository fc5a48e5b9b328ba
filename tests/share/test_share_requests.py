"""Requests that hang: Ctrl-C interrupts them, and they end at their deadline."""

import os
import signal
import socket
import subprocess
import sys

import pytest

pytest.importorskip("obstore")

from memstore.errors import StoreUnavailable
from memstore.share.open_object_store import open_object_store
from support.services import S3_ENVIRONMENT


def test_ctrl_c_ends_a_request_to_a_store_that_hangs() -> None:
    code = (
        "from memstore.store.memory_store import MemoryStore\n"
        "MemoryStore.open('s3://bucket/x', deadline=600)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        environment = os.environ | S3_ENVIRONMENT
        environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", code]
        with subprocess.Popen(
            command,
            env=environment,
            stderr=subprocess.PIPE,
            # a shell's background process ignores it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as process:
            connection, _ = server.accept()
            assert connection.recv(1)  # it waits for the answer
            process.send_signal(signal.SIGINT)
            try:
                _, said = process.communicate(timeout=180)
            finally:
                process.kill()
            assert said.strip().endswith(b"KeyboardInterrupt")


def test_a_store_that_does_not_answer_costs_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in S3_ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(StoreUnavailable):
            open_object_store("s3://bucket/x", timeout=0.5).get("a")
