"""Reading records of the cache that readers share: received in the slots that they are wanted in,
checked there as they come, within a deadline, and not asked for while the server does not answer.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotInTime
from typing import TypeVar

from memstore.disk.read.batch import Batch, Wanted, joined_digests
from memstore.disk.tables.block_table import BlockTable
from memstore.share.caches.answers import Answers, Filled, Found
from memstore.share.caches.valkey import Valkey
from memstore.share.caches.valkey_replies import Parts, Received
from memstore.share.calls.failures import Failure
from memstore.share.calls.rest import Rest
from memstore.share.objects.daemon_threads import begin
from memstore.tiers.stats import TierCounter

T = TypeVar("T")

_TIMEOUT = 2.0  # seconds that the server has; a tenth of the deadline at most


class SharedReads:
    """Reads from the server. Safe for several threads."""

    def __init__(
        self, server: Valkey, counter: TierCounter, table: BlockTable, deadline: float
    ) -> None:
        """counter: told of failures; table: of the records; deadline: seconds of a whole read."""
        self._server, self._counter = server, counter
        self._form, self._raw = table.form, table.codec == "raw"
        self._timeout = min(_TIMEOUT, 0.1 * deadline)
        self.rest = Rest()  # whether the server is asked

    def read(
        self,
        batch: Batch,
        wanted: Sequence[Wanted],
        names: Sequence[str],
        until: float,
        fill: Callable[[Sequence[Found]], Filled],
    ) -> Answers:
        """What the server has of some records. When this returns, nothing is written into slots any
        more.

        names: their keys. fill: checks records and copies them into their slots.
        """
        answers = Answers([], [], [], [])
        if not self.rest.over:
            self._counter.failed("closed")
            answers.unread.extend(wanted)
            return answers
        for failure in self._read(answers, batch, wanted, names, until, fill):
            self._counter.failed(failure.reason)
            self.rest.told(failure.reason)
        return answers

    def _read(
        self,
        answers: Answers,
        batch: Batch,
        wanted: Sequence[Wanted],
        names: Sequence[str],
        until: float,
        fill: Callable[[Sequence[Found]], Filled],
    ) -> set[Failure]:
        """Fill answers; why some could not be read."""
        until = min(until, time.monotonic() + self._timeout)
        places = self._places(batch, wanted)
        failures: set[Failure] = set()
        for numbers, replies in self._server.receive(
            names, places, self._form.raw_record_bytes, until, lambda work: _within(work, until)
        ):
            some = [wanted[number] for number in numbers]
            others: list[Found] = []
            if isinstance(replies, Received):
                for record, parts in zip(some, replies):
                    _, key, write, _ = record
                    header = self._form.raw_header(key, write, joined_digests(parts[1:]))
                    if bytes(parts[0]) == header:
                        answers.good.append((record, parts))
                    else:
                        others.append((record, (memoryview(b"".join(parts)),)))
            else:
                for record, reply in zip(some, replies):
                    if reply is None:
                        answers.missing.append(record)
                    elif isinstance(reply, Failure) and reply.reason == "damaged":
                        answers.bad.append((record, reply))
                    elif isinstance(reply, Failure):
                        failures.add(reply)
                        answers.unread.append(record)
                    else:
                        others.append((record, (memoryview(reply),)))
            if others:
                filled, bad = fill(others)
                answers.good.extend(filled)
                answers.bad.extend(bad)
        return failures

    def _places(self, batch: Batch, wanted: Sequence[Wanted]) -> Sequence[Parts | None]:
        """Where the records belong, as far as that can be told before they are there."""
        if not self._raw:
            return [None] * len(wanted)
        size = self._form.header_bytes
        headers = memoryview(bytearray(len(wanted) * size))
        places: list[Parts | None] = []
        for record, at in zip(wanted, range(0, len(headers), size)):
            heads = batch.heads_of(record)
            places.append(None if heads is None else [headers[at : at + size], *heads])
        return places


def _within(work: Callable[[], T], until: float) -> T:
    """What a function returns that may hang, in time. Raises Failure."""
    try:
        (answer,) = begin(lambda _: work(), [None], name="memstore-valkey")
    except RuntimeError as error:  # the system gives no more threads, or the interpreter ends
        raise Failure("closed", "there are no threads to ask with") from error
    try:
        return answer.result(max(0.0, until - time.monotonic()))
    except NotInTime as error:
        raise Failure("late", "no connection in time") from error
