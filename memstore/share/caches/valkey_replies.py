"""Replies of a Valkey or Redis server (RESP2), received into the places where their bytes belong.

A value that has the size that is expected of it is written by the system itself where it is wanted,
without a parser's buffer and a copy between: what is to come is known to the byte, so one call
receives many values and the few bytes between them, which are compared with what they must be. From
the first that is otherwise (nothing, an error, another size) replies are read one by one, until one
is as expected again.
"""

import select
import socket
import ssl
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from memstore.share.calls.failures import Failure, Reason
from memstore.share.objects.sizes import most_record_bytes

Parts = list[memoryview]  # where a value of their size goes, piece after piece
Reply = bytes | bytearray | Failure | None
"""A value that did not go there, an error, or that there is none."""


class Received(list[Parts]):
    """Values that are where they belong."""


Run = Received | Sequence[Reply]  # replies that follow each other

_END = b"\r\n"
_TOGETHER = 64  # values that are received by one call, at most
_BUFFERS = 512  # of one call, at most: the system has a limit
_READ = 64 << 10  # bytes, of replies that are read one by one
_DIGITS = 10  # of its size, at most: int() refuses thousands with an error of its own
_WANTS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_ERRORS: dict[bytes, Reason] = {
    b"NOAUTH": "denied",
    b"WRONGPASS": "denied",
    b"NOPERM": "denied",
    b"OOM": "full",
}


class Replies:
    """What comes over one connection, in its order, until a deadline."""

    def __init__(self, stream: socket.socket, until: float, shown: str) -> None:
        """stream: connected; it does not block from now on. until: time.monotonic. shown: the name
        of the server in messages.
        """
        stream.setblocking(False)
        self._stream, self._until, self._shown = stream, until, shown
        self._held, self._at = b"", 0  # what came, and is not told yet from byte `at` on
        self._can_scatter = not isinstance(stream, ssl.SSLSocket)
        self._ended = False  # what comes next is not read

    def send(self, data: bytes) -> None:
        """Send a request. Raises Failure."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._stream.send(left) :]
            except _WANTS as error:
                self._wait(error, select.POLLOUT)
            except OSError as error:
                raise self._broken(error) from error

    def receive(self, wanted: Sequence[Parts | None], size: int) -> Iterator[tuple[range, Run]]:
        """The replies to as many GET commands as are wanted, run by run, as they come.

        wanted: of each where its value goes if it has `size` bytes; None: anywhere. What is written
        there is of use only where the reply says so. A value that is larger than a record can be is
        not read: the reply is a Failure. Raises Failure, as for all replies after such a value, and
        nothing more can be received then.
        """
        at, expected = 0, b"$%d\r\n" % size
        while at < len(wanted):
            held = self._held[self._at : self._at + len(expected)]
            some = _before_none(wanted[at : at + _TOGETHER])
            if some and expected.startswith(held) and not self._ended:
                for run in self._receive_there(some, size, expected):
                    yield range(at, at + len(run)), run
                    at += len(run)
            else:
                yield range(at, at + 1), [self._reply(most_record_bytes(size))]
                at += 1

    def _receive_there(
        self, wanted: Sequence[Parts], size: int, expected: bytes
    ) -> Iterator[Received]:
        """Receive into their places as many as are as expected; hold what has come after them."""
        # A value has the end of the one before and its own size before it: `each` bytes, in `heads`
        # for all of them and the last end; that of the first is there already.
        each, count = len(_END) + len(expected), len(wanted)
        texts = (_END + expected) * count + _END
        heads = memoryview(bytearray(_END + bytes(len(texts) - len(_END))))
        buffers = [heads[len(_END) : each]]
        for parts, start in zip(wanted, range(each, len(texts), each)):
            buffers += parts
            buffers.append(heads[start : start + each])
        told, stride, ends = 0, each + size, list[int]()
        got = len(_END) + self._into(buffers[:_BUFFERS])
        while True:
            done, more = divmod(got, stride)  # values that are there, and what came after them
            came = done * each + min(more, each)
            if heads[:came] != texts[:came]:
                same = next(at for at in range(came) if heads[at] != texts[at]) // each
                if same > told:
                    yield Received(wanted[told:same])
                self._hold_again(buffers, max(len(_END), same * stride), got)
                if same:
                    self._end()
                return
            if done > told:
                yield Received(wanted[told:done])
                told = done
            if got == count * stride + len(_END):
                return
            ends = ends or _ends(buffers)
            current = bisect_right(ends, got)
            some = buffers[current : current + _BUFFERS]
            some[0] = some[0][got - ends[current] :]  # what is left of it
            got += self._into(some)

    def _hold_again(self, buffers: Sequence[memoryview], start: int, end: int) -> None:
        """Hold these bytes of what was received, before what is held still."""
        parts: list[bytes | memoryview] = []
        ends = _ends(buffers)
        for number in range(bisect_right(ends, start), len(buffers)):
            first = ends[number] - len(buffers[number])
            if first >= end:
                break
            parts.append(buffers[number][max(0, start - first) : end - first])
        self._held, self._at = b"".join([*parts, self._held[self._at :]]), 0

    # One by one

    def _reply(self, most: int) -> Reply:
        if self._ended:
            raise Failure("closed", f"{self._shown}: what follows a value too large is not read")
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            name = rest.split(b" ", 1)[0]
            told = name.decode("ascii", "replace")[:40]
            return Failure(_ERRORS.get(name, "refused"), f"{self._shown} answers {told}")
        if line == b"$-1":
            return None
        if kind != b"$" or not rest.isdigit() or len(rest) > _DIGITS:
            raise Failure("unreachable", f"{self._shown} does not answer as a Valkey server does")
        if int(rest) > most:
            self._ended = True
            what = f"{self._shown} has {int(rest):,} bytes for a record, of {most:,} at most"
            return Failure("damaged", what)
        value = self._exactly(int(rest))
        self._end()
        return value

    def _line(self) -> bytes:
        while (end := self._held.find(_END, self._at)) < 0:
            if len(self._held) - self._at > _READ:
                raise Failure(
                    "unreachable", f"{self._shown} does not answer as a Valkey server does"
                )
            self._more()
        line = self._held[self._at : end]
        self._at = end + len(_END)
        return line

    def _exactly(self, size: int) -> bytearray:
        value = bytearray(self._held[self._at : self._at + size])
        self._at += len(value)
        if len(value) < size:
            there = len(value)
            value += bytes(size - there)
            rest = memoryview(value)
            while there < size:
                there += self._into([rest[there:]])
        return value

    def _end(self) -> None:
        while len(self._held) - self._at < len(_END):
            self._more()
        if not self._held.startswith(_END, self._at):
            raise Failure("unreachable", f"{self._shown} does not answer as a Valkey server does")
        self._at += len(_END)

    def _more(self) -> None:
        held = self._held[self._at :]
        self._held, self._at = b"", 0
        buffer = bytearray(_READ)
        came = self._into([memoryview(buffer)])
        self._held = held + buffer[:came]

    # The connection

    def _into(self, buffers: Sequence[memoryview]) -> int:
        """Bytes that were received into these, one after the other: more than none."""
        if self._at < len(self._held):
            return self._take(buffers)
        while True:
            try:
                if self._can_scatter:
                    came = self._stream.recvmsg_into(buffers)[0]
                else:
                    came = self._stream.recv_into(next(filter(len, buffers)))
            except _WANTS as error:
                self._wait(error, select.POLLIN)
            except OSError as error:
                raise self._broken(error) from error
            else:
                if not came:
                    raise Failure("unreachable", f"{self._shown} has ended the connection")
                return came

    def _take(self, buffers: Sequence[memoryview]) -> int:
        took = 0
        for buffer in buffers:
            part = self._held[self._at : self._at + len(buffer)]
            buffer[: len(part)] = part
            self._at += len(part)
            took += len(part)
        return took

    def _wait(self, error: OSError, event: int) -> None:
        """Wait until bytes can be sent or received. Raises Failure."""
        if isinstance(error, ssl.SSLWantReadError):
            event = select.POLLIN
        elif isinstance(error, ssl.SSLWantWriteError):
            event = select.POLLOUT
        left = self._until - time.monotonic()
        poll = select.poll()
        poll.register(self._stream, event)
        if left <= 0 or not poll.poll(1000 * left):
            raise Failure("late", f"{self._shown}: no answer in time")

    def _broken(self, error: OSError) -> Failure:
        return Failure("unreachable", f"{self._shown}: {type(error).__name__}")


def requests(keys: Sequence[str]) -> bytes:
    """A GET command for each of some keys, which are ASCII."""
    return "".join([f"*2\r\n$3\r\nGET\r\n${len(key)}\r\n{key}\r\n" for key in keys]).encode("ascii")


def is_idle(stream: socket.socket) -> bool:
    """Is a connection open still, and has it nothing to tell?"""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return not poll.poll(0)


def _ends(buffers: Sequence[memoryview]) -> list[int]:
    """Where each buffer ends, behind an end that is there already."""
    return list(accumulate(map(len, buffers), initial=len(_END)))[1:]


def _before_none(wanted: Sequence[Parts | None]) -> list[Parts]:
    """The first of these, up to one that may go anywhere."""
    some: list[Parts] = []
    for parts in wanted:
        if parts is None:
            break
        some.append(parts)
    return some
