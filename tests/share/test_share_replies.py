"""Replies of a Valkey server are received where they belong, however they come cut in pieces and
whatever is between them; what breaks off, is late or is no reply ends the connection with a reason.
"""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from memstore.share.caches.valkey_replies import Parts, Received, Replies, Reply, requests
from memstore.share.calls.failures import Failure

SIZE = 200


@contextmanager
def told(data: bytes, rng: random.Random, *, end: bool = False) -> Iterator[socket.socket]:
    """A connection over which these bytes come, in pieces; end: and then its end."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        at = 0
        with suppress(BrokenPipeError, ConnectionResetError):  # nobody listens any more
            while at < len(data):
                size = rng.choice((1, 2, 7, SIZE, 3000))
                theirs.sendall(data[at : at + size])
                at += size
        if end:
            theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield ours
    finally:
        ours.close()
        sender.join()
        theirs.close()


def parts(*sizes: int) -> Parts:
    return [memoryview(bytearray(size)) for size in sizes]


def plain(reply: Reply) -> bytes | None:
    """A reply as what can be compared."""
    if isinstance(reply, Failure):
        return reply.reason.encode()
    return None if reply is None else bytes(reply)


def soon() -> float:
    return time.monotonic() + 20


def test_values_nothing_errors_and_other_sizes_in_any_pieces() -> None:
    for seed in range(120):
        rng = random.Random(seed)
        wanted: list[Parts | None] = []
        data, values = b"", list[bytes | None]()
        for _ in range(rng.randrange(1, 150)):
            cut = rng.randrange(SIZE)
            wanted.append(parts(cut, SIZE - cut) if rng.random() < 0.9 else None)
            value = rng.choice([b"", rng.randbytes(SIZE - 80), *[rng.randbytes(SIZE)] * 20])
            kind = rng.random()
            if kind < 0.05:
                data, values = data + b"$-1\r\n", [*values, None]
            elif kind < 0.1:
                data, values = data + b"-LOADING not yet\r\n", [*values, b"refused"]
            else:
                data += b"$%d\r\n%b\r\n" % (len(value), value)
                values.append(value)
        found: list[bytes | None] = []
        with told(data, rng) as stream:
            for run, replies in Replies(stream, soon(), "it").receive(wanted, SIZE):
                assert [*run] == [*range(len(found), len(found) + len(replies))]
                if isinstance(replies, Received):
                    assert [*replies] == [wanted[number] for number in run]
                    found += [b"".join(one) for one in replies]
                else:
                    found += map(plain, replies)
        assert found == values, seed


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "unreachable"),
        (b"$200\r\nbegun", "unreachable"),
        (b"$200\r\n" + bytes(200) + b"no", "unreachable"),
        (b"$200\r\n" + bytes(200) + b"\r\n*2\r\n", "unreachable"),
        (b"$150\r\n" + bytes(151) + b"\r\n", "unreachable"),
        (b">2\r\n+message\r\n", "unreachable"),
        (b"$999999999999\r\n", "unreachable"),
        (b"$" + b"9" * 5000 + b"\r\n", "unreachable"),
        (b"HTTP/1.1 400 Bad Request\r\n", "unreachable"),
        (bytes(200_000), "unreachable"),
    ],
)
def test_what_is_no_reply_or_ends_is_a_failure(data: bytes, reason: str) -> None:
    with told(data, random.Random(0), end=True) as stream:
        replies = Replies(stream, soon(), "it").receive([parts(SIZE), parts(SIZE)], SIZE)
        with pytest.raises(Failure) as failed:
            for run, _ in replies:
                assert run == range(1)  # never the second
        assert failed.value.reason == reason


@pytest.mark.parametrize("there", [0, 9, 500_000])
def test_a_value_larger_than_any_record_is_not_read(there: int) -> None:
    """Only as much of it comes as is sent together with its size."""
    good = b"$200\r\n" + bytes(200) + b"\r\n"
    data = good + b"$600000000\r\n" + bytes(there)
    with told(data, random.Random(0)) as stream:
        replies = Replies(stream, soon(), "it").receive([parts(SIZE) for _ in range(4)], SIZE)
        run, first = next(replies)
        assert run == range(1) and isinstance(first, Received)
        run, (large,) = next(replies)
        assert run == range(1, 2) and isinstance(large, Failure) and large.reason == "damaged"
        with pytest.raises(Failure) as failed:
            next(replies)
        assert failed.value.reason == "closed"


def test_a_reply_that_trickles_is_late() -> None:
    stop = threading.Event()
    ours, theirs = socket.socketpair()

    def trickle() -> None:
        theirs.sendall(b"$200\r\n")
        while not stop.wait(0.02):
            theirs.sendall(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        began = time.monotonic()
        with pytest.raises(Failure) as failed:
            list(Replies(ours, began + 0.2, "it").receive([parts(SIZE)], SIZE))
        assert failed.value.reason == "late"
    finally:
        stop.set()
        sender.join()
        ours.close()
        theirs.close()


@pytest.mark.parametrize(("answer", "reason"), [("NOAUTH", "denied"), ("OOM", "full")])
def test_errors_have_their_reasons_and_the_connection_goes_on(answer: str, reason: str) -> None:
    data = f"-{answer} secret words\r\n".encode() + b"$1\r\nx\r\n"
    with told(data, random.Random(1)) as stream:
        replies = Replies(stream, soon(), "it")
        ((_, (failure,)), (_, (value,))) = list(replies.receive([None, None], SIZE))
        assert isinstance(failure, Failure) and failure.reason == reason
        assert "secret" not in str(failure) and value == b"x"


def test_requests_are_commands() -> None:
    assert (
        requests(["a:1", "b"]) == b"*2\r\n$3\r\nGET\r\n$3\r\na:1\r\n*2\r\n$3\r\nGET\r\n$1\r\nb\r\n"
    )
