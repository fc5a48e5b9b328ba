"""How long does one bad body of JSON stop a server for everybody, and what does it take?

A server of an empty memory gets one body of a size and a shape, while another client asks for a
file of the page again and again: the longest that it waited, and by how much the server's main
memory grew at most. A server that is given up after a minute is killed.

    python -m benchmarks.speed.bodies --out docs/results/bodies.json
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common.main_memory import status_bytes
from benchmarks.common.options import add, plain_parser
from benchmarks.common.results import write
from benchmarks.common.tables import table

MIB, SECONDS = 1 << 20, 60


def filled(head: str, unit: str, tail: str) -> Callable[[int], bytes]:
    """Makes a body of so many bytes."""
    return lambda size: (head + unit * ((size - len(head + tail)) // len(unit)) + tail).encode()


def unknown(size: int) -> bytes:
    """As many keys as go into it that nobody knows."""
    count = size // 13
    return ('{"model": "m"' + "".join(f',"{n:08x}":1' for n in range(count)) + "}").encode()


CHAT, TOOL = '{"model": "m", "messages": [', '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", '
SHAPES = {
    "messages of numbers": ("/v1/chat/completions", filled(CHAT, "1,", "1]}")),
    "messages of lists": ("/v1/chat/completions", filled(CHAT, "[],", "1]}")),
    "input of objects": ("/v1/responses", filled('{"model": "m", "input": [', "{},", "1]}")),
    "unknown keys": ("/v1/chat/completions", unknown),
    "an agent's documents": (
        "/mcp",
        filled(
            TOOL + '"params": {"name": "ask", "arguments": {"question": "a", "documents": [',
            "1,",
            "1]}}}",
        ),
    ),
    "one text": (
        "/v1/chat/completions",
        filled(CHAT + '{"role": "user", "content": "', "\\n,", '"}]}'),
    ),
}


def measure(shape: str, size: int) -> dict[str, Any]:
    """The longest that another client waited (seconds), growth (bytes), and the status (None: no
    answer within a minute).
    """
    path, make = SHAPES[shape]
    body = make(size)
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "memstore", "serve", "--store", f"{directory}/memory"]
        server = subprocess.Popen(
            [*command, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        place = urlsplit(json.loads(server.stdout.readline())["url"]).netloc
        waits, ended = [0.0], threading.Event()

        def ask() -> None:
            other = HTTPConnection(place, timeout=SECONDS)
            while not ended.wait(0.002):
                began = time.perf_counter()
                try:
                    other.request("GET", "/page/page.js")
                    other.getresponse().read()
                except (OSError, HTTPException):
                    ended.set()
                waits.append(time.perf_counter() - began)

        def peak() -> int:
            return status_bytes("VmHWM", server.pid)

        asking = threading.Thread(target=ask)
        try:
            time.sleep(1)
            asking.start()
            time.sleep(0.3)
            waits[:], before, status = [0.0], peak(), None
            connection = HTTPConnection(place, timeout=SECONDS)
            try:
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                status = answer.status
                answer.read()
            except OSError:  # refused while it was sent, or given up
                pass
            time.sleep(0.1)
            ended.set()
            asking.join()
            return {"seconds": max(waits), "bytes": peak() - before, "status": status}
        finally:
            server.kill()
            server.wait()


def main() -> None:
    """The command."""
    arguments = plain_parser(__doc__)
    add(arguments, "--sizes", [0.25, 1.0, 4.0, 16.0, 60.0], "MiB")
    add(arguments, "--shapes", list(SHAPES))
    options = arguments.parse_args()
    found: dict[str, dict[str, Any]] = {}
    rows = []
    for shape in options.shapes:
        by_size = {f"{size:g}": measure(shape, int(size * MIB)) for size in options.sizes}
        found[shape] = by_size
        cells = [f"{at['seconds']:.2f} s, {at['bytes'] / 1e6:.0f} MB" for at in by_size.values()]
        rows.append([shape, *cells])
    print(table(["", *(f"{size:g} MiB" for size in options.sizes)], rows))
    write(options, {"by_shape": found})


if __name__ == "__main__":
    main()
