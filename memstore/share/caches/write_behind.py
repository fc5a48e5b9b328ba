"""WriteBehind what was read in the caches above the tier that it came from, behind the answer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from memstore.block import RecordKey
from memstore.disk.format.record import RECORD_FORMAT, WriteId
from memstore.disk.read.batch import Wanted
from memstore.disk.tables.block_table import BlockTable
from memstore.errors import CorruptBlock
from memstore.share.caches.answers import Found
from memstore.share.caches.local_cache import LocalCache
from memstore.share.caches.valkey import Valkey
from memstore.share.caches.write_queue import WriteQueue
from memstore.share.calls.failures import Failure
from memstore.share.calls.rest import Rest
from memstore.tiers.stats import TierCounter


def record_name(signature: bytes, write: WriteId, key: RecordKey) -> str:
    """The name of a record wherever it is cached: the same in every memory that has it."""
    return f"{_names_of(signature, write)}{key.layer}:{key.block}"


def record_names(signature: bytes, records: Sequence[Wanted]) -> list[str]:
    """The names of some records."""
    writes = {write for _, _, write, _ in records}
    of = {write: _names_of(signature, write or b"") for write in writes}
    return [f"{of[write]}{key[2]}:{key[1]}" for _, key, write, _ in records]


def _names_of(signature: bytes, write: WriteId) -> str:
    return f"memstore:{RECORD_FORMAT}:{signature.hex()}:{write.hex()}:"


class WriteBehind:
    """Writes to the caches. Safe for several threads."""

    def __init__(
        self,
        table: BlockTable,
        counters: Mapping[str, TierCounter],
        local: LocalCache | None,
        shared: Valkey | None,
        rest: Rest,
    ) -> None:
        """counters: by tier, told of failures. rest: whether the shared cache is asked."""
        self._table, self._signature = table, table.form.signature
        self._counters, self._rest = counters, rest
        self._local, self._shared = local, shared
        self._behind = WriteQueue()

    def keep(self, found: Sequence[Found], *, shared: bool) -> None:
        """Keep records, some time; shared: in the shared cache, too."""
        to_shared = shared and self._shared is not None
        if not found or (self._local is None and not to_shared):
            return
        items = [
            (record, b"".join(parts))
            for record, parts in found
            if self._is_whole(record, parts)  # every byte of it
        ]
        size = sum(len(data) for _, data in items)
        self._behind.add(lambda: self._put(items, to_shared), size)

    def keep_made(self, make: Callable[[], Sequence[tuple[Wanted, bytes]]], size: int) -> None:
        """Keep records in all caches that are to be made first, some time; size: bytes that they
        are made of.
        """
        self._behind.add(lambda: self._put(make(), self._shared is not None), size)

    def drop(self, name: str, record: Wanted) -> None:
        """Have a cache, by its name, keep a record no longer, some time."""
        cache: Any = self._local if name == "local" else self._shared

        def work() -> None:
            with suppress(Failure):
                cache.drop(*record_names(self._signature, [record]))

        self._behind.add(work, 0)

    def _is_whole(self, record: Wanted, parts: Sequence[memoryview]) -> bool:
        _, key, write, places = record
        if len(places) == self._table.geometry.num_kv_heads:
            return True  # all of its heads were checked
        try:
            self._table.check(parts[0], key, write)
        except CorruptBlock:
            return False
        return True

    def _put(self, items: Sequence[tuple[Wanted, bytes]], to_shared: bool) -> None:
        names = record_names(self._signature, [record for record, _ in items])
        named = [(name, data) for name, (_, data) in zip(names, items)]
        if self._local is not None:
            self._try("local", self._local, named)
        if to_shared and self._rest.over:
            failure = self._try("valkey", self._shared, named)
            if failure is not None:
                self._rest.told(failure.reason)

    def _try(self, name: str, cache: Any, named: Sequence[tuple[str, bytes]]) -> Failure | None:
        try:
            cache.put(named)
        except Failure as failure:
            self._counters[name].failed(failure.reason)
            return failure
        return None

    def settle(self) -> None:
        """Wait until all of it is done."""
        self._behind.settle()

    def close(self) -> None:
        """Do what waits, as far as it takes a few seconds, and end; more than once is the same as
        once.
        """
        self._behind.close()
