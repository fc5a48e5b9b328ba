"""Records read from the object store: where the newest manifest has them, and looked for anew where
it has become another meanwhile.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from memstore.block import RecordKey
from memstore.disk.format.document import write_of
from memstore.disk.lmdb.environment import Version
from memstore.disk.read.batch import Batch, Wanted
from memstore.disk.tables.catalog import Catalog
from memstore.errors import (
    BlocksUnavailable,
    CorruptBlock,
    CorruptMemory,
    MemoryNotFound,
    MissingBlock,
    StoreUnavailable,
)
from memstore.share.caches.answers import Found, as_failure, fill
from memstore.share.calls.failures import Failure
from memstore.share.format.read_pieces import Extent
from memstore.share.objects.sizes import most_record_bytes
from memstore.share.read.remote import Remote

Find = Callable[[Sequence[tuple[int, RecordKey]], float], list[Extent | Failure | None]]
"""Where records lie, by document and key, found no later than time.monotonic(); None: nowhere."""


class ObjectReads:
    """Reads records by where the newest manifest has them. Safe for several threads."""

    def __init__(
        self, catalog: Catalog, remote: Remote, find: Find, look_again: Callable[[], object]
    ) -> None:
        """catalog: of the memory; find: where records lie, by document and key; look_again: has
        the catalog be of the newest manifest, or raises StoreUnavailable, CorruptMemory.
        """
        self._catalog, self._remote, self._find = catalog, remote, find
        self._newest = look_again
        self._most = most_record_bytes(catalog.blocks.form.raw_record_bytes)

    def read(
        self,
        batch: Batch,
        wanted: Sequence[Wanted],
        until: float,
        used: Version | None,
        done: Callable[[list[Found], float], None],
    ) -> None:
        """Fill all of these from the object store.

        used: the version of the catalog by which they are asked for; None: they were looked for
        where an older one has them. done: told what is in its slots, and the seconds that took.
        Raises CorruptBlock, MissingBlock, DocumentNotFound, BlocksUnavailable.
        """
        began = time.perf_counter()
        failed: list[tuple[Wanted, Failure]] = []
        if used is None:
            wanted, failed = self._still_there(wanted)
        extents = self._find([(record[1].document, record[1]) for record in wanted], until)
        there: list[tuple[Wanted, Extent]] = []
        for record, extent in zip(wanted, extents):
            if extent is None:
                raise MissingBlock(
                    f"{record[1]}: no such record in {self._remote.objects.url}; run verify"
                )
            if isinstance(extent, Failure):
                failed.append((record, extent))
            elif extent.length > self._most:
                what = f"{record[1]} should be {extent.length:,} bytes, of {self._most:,} at most"
                failed.append((record, Failure("damaged", what)))
            else:
                there.append((record, extent))

        def check(number: int, data: memoryview) -> None:
            _, key, write, _ = there[number][0]
            try:
                self._catalog.blocks.check(data, key, write)
            except CorruptBlock as error:
                raise as_failure(error) from error

        answers = self._remote.read([extent for _, extent in there], check, until)
        found = []
        for (record, _), answer in zip(there, answers):
            if isinstance(answer, Failure):
                failed.append((record, answer))
            else:
                found.append((record, (answer,)))
        good, bad = fill(batch, found)
        failed += bad
        done(good, time.perf_counter() - began)
        if not failed:
            return
        # "other" is what an append has written anew, if the manifest became another on the way
        changed = any(failure.reason in ("missing", "other") for _, failure in failed)
        if changed and used is not None and self._look_again(used):
            self.read(batch, [record for record, _ in failed], until, None, done)
            return
        raise self._error(batch, failed)

    def _error(self, batch: Batch, failed: Sequence[tuple[Wanted, Failure]]) -> Exception:
        (_, key, _, _), failure = failed[0]
        if all(found.reason in ("damaged", "other") for _, found in failed):
            return CorruptBlock(
                f"{self._remote.objects.url}: {failure}; publish the document again with --check"
            )
        units = [batch.units[at] for record, _ in failed for at in record[3]]
        worst = next(f for _, f in failed if f.reason not in ("damaged", "other"))
        return BlocksUnavailable(
            f"{len(units)} blocks of {self._remote.objects.url} could not be read, {key} among "
            f"them ({worst.reason}: {worst}); what is cached still answers",
            units,
        )

    def _look_again(self, used: Version) -> bool:
        """Read the newest manifest, since objects are away; is it another one than was used? It may
        have been read meanwhile, by another thread.
        """
        with suppress(StoreUnavailable, MemoryNotFound, CorruptMemory):
            self._newest()
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
