"""Calls of another machine end by their deadline, stop while the machine does not
answer, and keep neither Ctrl-C nor the end of the process.
"""

import _thread
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("obstore")

from memstore.share.calls import Calls, Failure, at_once
from memstore.tiers.stats import TierCounter
from support.services import S3_ENVIRONMENT

# Deadlines


def test_calls_end_by_the_deadline_and_then_the_server_is_skipped_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memstore.share.calls._SKIPPED", 600.0)
    calls = Calls(TierCounter(), name="test")
    go = threading.Event()
    began = time.monotonic()
    found = calls.gather([lambda: go.wait(60), lambda: 5], began + 0.1)
    assert isinstance(found[0], Failure) and found[0].reason == "late" and found[1] == 5
    assert time.monotonic() - began < 20

    def denied() -> None:
        raise Failure("denied", "403")

    for work, reason in ((denied, "denied"), (lambda: go.wait(60), "late"), (denied, "closed")):
        with pytest.raises(Failure) as failed:
            calls.call(work, time.monotonic() + (0.1 if reason == "late" else 60))
        assert failed.value.reason == reason
    go.set()
    calls.skips_until = 0.0
    assert calls.call(lambda: 7, time.monotonic() + 60) == 7
    assert calls.counter.failures() == {"late": 2, "denied": 1, "closed": 1}


# Threads and interrupts


@pytest.mark.parametrize("way", ["at once", "until"])
def test_an_interrupt_that_comes_as_a_wait_begins_ends_it(way: str) -> None:
    """Such an interrupt is noted, and wakes no wait: as interrupt_main does it."""
    given = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, _thread.interrupt_main).start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            if way == "at once":
                at_once(lambda _: given.wait(60), [1, 2])
            else:
                calls = Calls(TierCounter(), name="test")
                calls.call(lambda: given.wait(60), time.monotonic() + 60)
    finally:
        given.set()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "how",
    ["MemoryStore.open(url, deadline=600)", "Published.open(open_object_store(url, timeout=600))"],
)
def test_an_interrupt_leaves_a_store_that_does_not_answer(how: str) -> None:
    code = f"""
from memstore.share.published import Published
from memstore.share.open_object_store import open_object_store
from memstore.store.memory_store import MemoryStore
url = "s3://bucket/x"
{how}
"""
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
