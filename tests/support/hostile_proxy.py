"""A proxy whose server's answers are cut, delayed, doubled, changed or swapped, by seed."""

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

KINDS = ("cut", "late", "doubled", "changed", "garbage", "answer", "closed")
S3_ANSWERS = tuple(
    f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    for status, body in (
        ("500 Internal Server Error", "<Error><Code>InternalError</Code></Error>"),
        ("503 Slow Down", "<Error><Code>SlowDown</Code></Error>"),
        ("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>"),
        ("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>"),
        ("200 OK", "another body"),
        ("206 Partial Content", ""),
    )
)
VALKEY_ANSWERS = (
    b"-LOADING not yet\r\n",
    b"-NOPERM no\r\n",
    b"-OOM full\r\n",
    b"$-1\r\n",
    b"$5\r\nhello\r\n",
    b"$600000000\r\n" + bytes(1 << 16),
    b"*3\r\n$1\r\na\r\n",
)


class Proxy:
    """A proxy at a port of its own that spoils the answers of a server. `quiet`: it changes
    nothing.
    """

    def __init__(self, to: int, answers: Sequence[bytes], seed: int, rate: float) -> None:
        """to: the port of the server. answers: sent instead of its answers. rate: the share to
        spoil.
        """
        self._to, self._answers, self._rate = to, answers, rate
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._kinds: list[str] = []  # to come: each once, then all again
        self.quiet, self.done = True, Counter[str]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for work in (self._ask, self._answer):
                    threading.Thread(target=work, args=(near, far), daemon=True).start()

    def _ask(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(1 << 16):
                far.sendall(data)
        _end(near, far)

    def _answer(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while (data := far.recv(1 << 16)) and self._pass_on(near, data):
                pass
        _end(near, far)

    def _pass_on(self, near: socket.socket, data: bytes) -> bool:
        """Send what the server has, or something else; False: and nothing more."""
        with self._lock:
            kind = ""
            if not self.quiet and self._random.random() < self._rate:
                if not self._kinds:
                    self._kinds = self._random.sample(KINDS, len(KINDS))
                kind = self._kinds.pop()
                self.done[kind] += 1
            at, seconds = self._random.randrange(len(data)), self._random.choice((0.01, 0.1, 3.0))
            noise, answer = self._random.randbytes(40), self._random.choice(self._answers)
        if kind == "late":
            time.sleep(seconds)
        elif kind == "doubled":
            near.sendall(data)
        elif kind == "changed":
            data = data[:at] + bytes([data[at] ^ noise[0] or 1]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "garbage":
            data = noise
        elif kind == "answer":
            data = answer
        elif kind == "closed":
            return False
        near.sendall(data)
        return kind not in ("cut", "garbage", "answer")

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@contextmanager
def proxy(to: int, answers: Sequence[bytes], seed: int, rate: float) -> Iterator[Proxy]:
    """A Proxy, as long as the block lasts."""
    made = Proxy(to, answers, seed, rate)
    try:
        yield made
    finally:
        made.close()
