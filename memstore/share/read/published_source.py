"""The tiers below the host tier of a published memory: a local cache, a cache that readers share,
and the object store. Misses of one come up from the next, many at a time, and nothing is used that
is not the record that was asked for.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.read.batch import Batch, Slots, Wanted
from memstore.disk.tables.catalog import Catalog
from memstore.share.caches.answers import Answers, Found, fill
from memstore.share.caches.local_cache import LocalCache
from memstore.share.caches.shared_reads import SharedReads
from memstore.share.caches.valkey import Valkey
from memstore.share.caches.write_behind import WriteBehind, record_names
from memstore.share.calls.failures import Failure
from memstore.share.calls.rest import Rest
from memstore.share.objects.sizes import most_record_bytes
from memstore.share.read.computed_records import Computed, encode
from memstore.share.read.object_reads import Find, ObjectReads
from memstore.share.read.remote import Remote
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.stats import TierCounter


class SharedSource:
    """A LowestTier over the records of a published memory."""

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        find: Find,
        *,
        look_again: Callable[[], object] = lambda: None,
        local: LocalCache | None = None,
        shared: Valkey | None = None,
    ) -> None:
        """catalog, find, look_again: as ObjectReads takes them. local, shared: caches above the
        object store.
        """
        self._catalog = catalog
        self._object_reads = ObjectReads(catalog, remote, find, look_again)
        self.remote, self.local, self.shared = remote, local, shared
        self._signature = catalog.signature.digest
        self._most = most_record_bytes(catalog.blocks.form.raw_record_bytes)
        self.counters: Mapping[str, TierCounter] = {
            **({} if local is None else {"local": TierCounter()}),
            **({} if shared is None else {"valkey": TierCounter()}),
            "remote": remote.counter,
        }
        self.shared_reads: SharedReads | None = None
        if shared is not None:
            counter = self.counters["valkey"]
            self.shared_reads = SharedReads(shared, counter, catalog.blocks, remote.deadline)
        reads = self.shared_reads
        self._keeping = WriteBehind(
            catalog.blocks, self.counters, local, shared,
            Rest() if reads is None else reads.rest,
        )  # fmt: skip
        self._slots: tuple[Tensor, Slots] | None = None  # of the latest call

    # Reading

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        """As UnitSource.read. Raises also StoreUnavailable."""
        return self.read_from(units, slab, slots)[0]

    def read_from(
        self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]
    ) -> tuple[list[int], list[str]]:
        """As `read`; of each unit also the name of the tier that had it. Raises CorruptBlock,
        DocumentNotFound, BlocksUnavailable (which tells the units that could not be had).
        """
        if not units:
            return [], []
        until = self.remote.until()
        latest = self._slots
        if latest is None or latest[0] is not slab:
            latest = self._slots = slab, Slots(raw_view(slab))
        batch = Batch(units, latest[1], slots, self._catalog.blocks)
        used = self._catalog.database.version
        with self._catalog.database.read() as txn:
            rest: Sequence[Wanted] = batch.by_record(
                {document: self._catalog.writes(txn, document) for document in {*batch.documents}}
            )
        tiers = [""] * len(units)
        if self.local is not None:
            rest = self._from_cache(
                "local", lambda some: self._from_local(batch, some), batch, rest, tiers
            )
        reads = self.shared_reads
        if reads is not None and rest:
            rest = self._from_cache(
                "valkey",
                lambda some: reads.read(
                    batch,
                    some,
                    record_names(self._signature, some),
                    until,
                    lambda found: fill(batch, found),
                ),
                batch,
                rest,
                tiers,
            )
        if rest:

            def done(good: list[Found], seconds: float) -> None:
                self._count("remote", batch, good, [], tiers, seconds)
                self._keeping.keep(good, shared=True)

            self._object_reads.read(batch, rest, until, used, done)
        return batch.lengths, tiers

    def _from_cache(
        self,
        name: str,
        read: Callable[[Sequence[Wanted]], Answers],
        batch: Batch,
        wanted: Sequence[Wanted],
        tiers: list[str],
    ) -> list[Wanted]:
        """Fill what a cache has; return the records that it has not, or could not be read."""
        began, counter = time.perf_counter(), self.counters[name]
        good, bad, missing, unread = read(wanted)
        for record, failure in bad:
            counter.failed(failure.reason)
            self._keeping.drop(name, record)
            unread.append(record)
        self._count(name, batch, good, missing, tiers, time.perf_counter() - began)
        if name == "valkey":
            self._keeping.keep(good, shared=False)
        return sorted(missing + unread, key=itemgetter(0))

    def _from_local(self, batch: Batch, wanted: Sequence[Wanted]) -> Answers:
        assert self.local is not None
        found, missing, unread = [], [], []
        for record, answer in zip(
            wanted,
            self.local.get_many(record_names(self._signature, wanted), [self._most] * len(wanted)),
        ):
            if answer is None:
                missing.append(record)
            elif isinstance(answer, Failure):
                self.counters["local"].failed(answer.reason)
                unread.append(record)
            else:
                found.append((record, (memoryview(answer),)))
        return Answers(*fill(batch, found), missing, unread)

    def _count(
        self,
        name: str,
        batch: Batch,
        good: Sequence[Found],
        missing: Sequence[Wanted],
        tiers: list[str],
        seconds: float,
    ) -> None:
        hits, misses = Counter[int](), Counter[int]()
        for (_, key, _, places), _ in good:
            hits[key[2]] += len(places)
            for place in places:
                tiers[place] = name
        for _, key, _, places in missing:
            misses[key[2]] += len(places)
        layers = {*hits, *misses}
        for layer in layers:
            self.counters[name].count(
                layer,
                hits=hits[layer],
                misses=misses[layer],
                bytes=hits[layer] * batch.unit_bytes,
                seconds=seconds / len(layers),
            )

    @property
    def caches(self) -> bool:
        """Is there one between it and the readers, which may have what was never published?"""
        return self.local is not None or self.shared is not None

    def keep_computed(self, passages: Sequence[Computed]) -> None:
        """Keep passages that a reader computed in the caches, some time."""
        layers, table = self._catalog.signature.memory_layers, self._catalog.blocks
        size = sum(2 * each.k.nbytes for each in passages)
        self._keeping.keep_made(lambda: list(encode(table, layers, passages)), size)

    def settle(self) -> None:
        """Wait until what was read is kept."""
        self._keeping.settle()

    def close(self) -> None:
        """End its threads, when what was read is kept; more than once is the same as once."""
        self._keeping.close()
        if self.shared is not None:
            self.shared.close()
        self.remote.close()
