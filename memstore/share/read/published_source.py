"""The tiers below the host tier of a published memory: a local cache, a cache that readers share,
and the object store. Misses of one come up from the next, many at a time, and nothing is used that
is not the record that was asked for.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter

from torch import Tensor

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.document import write_of
from memstore.disk.lmdb.environment import Version
from memstore.disk.read.batch import Batch, Slots, Wanted
from memstore.disk.tables.catalog import Catalog
from memstore.errors import (
    BlocksUnavailable,
    CorruptBlock,
    CorruptMemory,
    MemoryNotFound,
    MissingBlock,
    StoreUnavailable,
)
from memstore.share.caches.local_cache import LocalCache
from memstore.share.caches.shared_reads import Answers, Filled, Found, SharedReads
from memstore.share.caches.valkey import Valkey
from memstore.share.caches.write_behind import Keeping, record_name, record_names
from memstore.share.calls.failures import Failure, Reason
from memstore.share.calls.rest import Rest
from memstore.share.format.read_pieces import Extent
from memstore.share.objects.sizes import most_record_bytes
from memstore.share.read.computed_records import Computed, encode
from memstore.share.read.remote import Remote
from memstore.tiers.raw_bits import raw_view
from memstore.tiers.stats import TierCounter


class SharedSource:
    """A LowestTier over the records of a published memory."""

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        find: Callable[[Sequence[tuple[int, RecordKey]], float], list[Extent | Failure | None]],
        *,
        refresh: Callable[[], object] = lambda: None,
        local: LocalCache | None = None,
        shared: Valkey | None = None,
    ) -> None:
        """catalog: of the memory; find: where records lie, by document and key; refresh: has the
        catalog be of the newest manifest, or raises StoreUnavailable, CorruptMemory.
        """
        self._catalog, self._find, self._refresh = catalog, find, refresh
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
        self._keeping = Keeping(
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
                    lambda found: self._fill(batch, found),
                ),
                batch,
                rest,
                tiers,
            )
        if rest:
            self._from_store(batch, rest, tiers, until, used)
        return batch.lengths, tiers

    def nearest(self, units: Sequence[BlockKey]) -> list[str]:
        """ "local" for what the local cache has, "remote" for the rest. Raises DocumentNotFound."""
        if self.local is None:
            return ["remote"] * len(units)
        found: dict[RecordKey, str] = {}
        with self._catalog.database.read() as txn:
            for unit in units:
                key = RecordKey(unit.document, unit.block, unit.layer)
                if key not in found:
                    write = write_of(self._catalog.writes(txn, unit.document), unit.block)
                    has = self.local.has(record_name(self._signature, write or b"", key))
                    found[key] = "local" if has else "remote"
        return [found[RecordKey(unit.document, unit.block, unit.layer)] for unit in units]

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
                found.append(Found(record, (memoryview(answer),)))
        return Answers(*self._fill(batch, found), missing, unread)

    def _from_store(
        self,
        batch: Batch,
        wanted: Sequence[Wanted],
        tiers: list[str],
        until: float,
        used: Version | None,
    ) -> None:
        """Fill all of these from the object store. used: the version of the catalog by which they
        are asked for; None: they were looked for where an older one has them. Raises what read_from
        raises.
        """
        began = time.perf_counter()
        failed: list[tuple[Wanted, Failure]] = []
        if used is None:
            wanted, failed = self._still_there(wanted)
        places = self._find([(record[1].document, record[1]) for record in wanted], until)
        there: list[tuple[Wanted, Extent]] = []
        for record, place in zip(wanted, places):
            if place is None:
                raise MissingBlock(
                    f"{record[1]}: no such record in {self.remote.place.url}; run verify"
                )
            if isinstance(place, Failure):
                failed.append((record, place))
            elif place.length > self._most:
                what = f"{record[1]} should be {place.length:,} bytes, of {self._most:,} at most"
                failed.append((record, Failure("damaged", what)))
            else:
                there.append((record, place))

        def check(number: int, data: memoryview) -> None:
            _, key, write, _ = there[number][0]
            try:
                self._catalog.blocks.check(data, key, write)
            except CorruptBlock as error:
                raise _failure(error) from error

        answers = self.remote.read([place for _, place in there], check, until)
        found = []
        for (record, _), answer in zip(there, answers):
            if isinstance(answer, Failure):
                failed.append((record, answer))
            else:
                found.append(Found(record, (answer,)))
        good, bad = self._fill(batch, found)
        failed += bad
        self._count("remote", batch, good, [], tiers, time.perf_counter() - began)
        self._keeping.keep(good, shared=True)
        if not failed:
            return
        # "other" is what an append has written anew, if the manifest became another on the way
        changed = any(failure.reason in ("missing", "other") for _, failure in failed)
        if changed and used is not None and self._look_again(used):
            self._from_store(batch, [record for record, _ in failed], tiers, until, None)
            return
        raise self._error(batch, failed)

    def _fill(self, batch: Batch, found: Sequence[Found]) -> Filled:
        """Check records and copy the wanted heads of them into their slots; those that are what was
        asked for, and those that are not.
        """
        if not found:
            return [], []
        try:
            if all(record.wanted[2] is not None for record in found):
                batch.fill_all(
                    [record.wanted for record in found], [record.parts[0] for record in found]
                )
                return list(found), []
        except (CorruptBlock, ValueError, IndexError):
            pass  # some are not: one after the other
        good, bad = [], []
        for record in found:
            try:
                batch.fill(record.wanted, record.parts[0])
                good.append(record)
            except CorruptBlock as error:
                bad.append((record.wanted, _failure(error)))
        return good, bad

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

    def _error(self, batch: Batch, failed: Sequence[tuple[Wanted, Failure]]) -> Exception:
        (_, key, _, _), failure = failed[0]
        if all(found.reason in ("damaged", "other") for _, found in failed):
            return CorruptBlock(
                f"{self.remote.place.url}: {failure}; publish the document again with --check"
            )
        units = [batch.units[place] for record, _ in failed for place in record[3]]
        worst = next(f for _, f in failed if f.reason not in ("damaged", "other"))
        return BlocksUnavailable(
            f"{len(units)} blocks of {self.remote.place.url} could not be read, {key} among them "
            f"({worst.reason}: {worst}); what is cached still answers",
            units,
        )

    def _look_again(self, used: Version) -> bool:
        """Read the newest manifest, since objects are away; is it another one than was used? It may
        have been read meanwhile, by another thread.
        """
        with suppress(StoreUnavailable, MemoryNotFound, CorruptMemory):
            self._refresh()
        return self._catalog.database.version != used

    def _still_there(
        self, wanted: Sequence[Wanted]
    ) -> tuple[list[Wanted], list[tuple[Wanted, Failure]]]:
        """The records that the newest manifest has as they are asked for, and those that were
        written anew, which nobody has any more. Raises DocumentNotFound (unpublished).
        """
        with self._catalog.database.read() as txn:
            writes = {
                document: self._catalog.writes(txn, document)
                for document in {record[1].document for record in wanted}
            }
        there: list[Wanted] = []
        gone: list[tuple[Wanted, Failure]] = []
        for record in wanted:
            _, key, write, _ = record
            if write_of(writes[key.document], key.block) == write:
                there.append(record)
            else:
                gone.append((record, Failure("missing", "it was written anew; read it again")))
        return there, gone

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


def _failure(error: CorruptBlock) -> Failure:
    """Why a record is not what was asked for."""
    text = str(error)
    foreign = "it is the record of" in text or "another model" in text
    reason: Reason = "other" if foreign else "damaged"
    return Failure(reason, text)
