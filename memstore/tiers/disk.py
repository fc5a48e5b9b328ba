"""The lowest tier: records in the database, read a batch at a time into the slots of the tier above.

Records that the system's page cache holds are copied from the mapped file. For those that it does not hold, the disk
is asked first, for all of a batch at once and in the file's order; then they are read (not mapped: a disk's failure is
an error then, not the end of the process) by several threads.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import itemgetter
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_digest

from memstore.block import (
    DTYPES,
    BlockKey,
    HeaderReader,
    damaged_head,
    decode_head,
    decode_record,
    encode_record,
    raw_view,
)
from memstore.codec import get_codec
from memstore.database import Database, Transaction
from memstore.errors import CorruptBlock, DocumentNotFound
from memstore.keys import block_key, block_range, document_key, read_block_key
from memstore.lmdb_file import CAN_ASK, Place, ask
from memstore.tiers.stats import TierCounter

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not Linux: the disk is never asked in advance there
    _CAN_ASK = False
else:
    _CAN_ASK = CAN_ASK  # and what it did can be told

S = TypeVar("S")
T = TypeVar("T")

_READERS = 8  # threads that wait for pages of keys
_COPIERS = min(4, os.cpu_count() or 1)  # threads that read and check records; one takes _SHARE of them at least
_SHARE = 8
_WATCH = 64  # batches for which the disk is asked in advance, after one that needed it
_SLOW = 50e-6  # seconds for a record: beyond, it may have come from the disk
_WINDOW, _WINDOW_BYTES = 16, 2 << 20  # records, and bytes, that are asked for ahead of what is read


class StoredRecord(NamedTuple):
    """One record as it lies in the file. `data` is dead once its transaction ends, or writes."""

    block: int
    layer: int
    data: memoryview


# A record's key in the table, document, block and layer, and which units of a batch are read from it.
_Wanted = tuple[bytes, int, int, int, list[int]]


class _Slabs:
    """Where units go: the bytes of two slabs, and their slots as arrays."""

    def __init__(self, out_k: Tensor, out_v: Tensor) -> None:
        self.tensors = out_k, out_v
        self.k, self.v = raw_view(out_k), raw_view(out_v)
        self.k_bytes, self.v_bytes = (raw.reshape(-1).view(np.uint8).data for raw in (self.k, self.v))


class _Batch(NamedTuple):
    """The units of one call, the slots that they go to, and their lengths once they are there."""

    units: Sequence[BlockKey]
    slabs: _Slabs
    slots: Sequence[int]
    lengths: list[int]


class DiskTier:
    """Blocks as records of a database: the truth that the tiers above cache."""

    def __init__(
        self, database: Database, *, num_kv_heads: int, block_size: int, head_dim: int, kv_dtype: str, codec: str
    ) -> None:
        """kv_dtype: "float32" | "float16" | "bfloat16"; codec: of the records written from now on.

        Records say how they are encoded, so a memory may hold records of several codecs. Raises InvalidConfig.
        """
        self.database = database
        self.shape = (num_kv_heads, block_size, head_dim)
        self._unit_bytes = 2 * block_size * head_dim * DTYPES[kv_dtype].itemsize
        self.kv_dtype = kv_dtype
        self.codec = get_codec(codec).name
        self.stats = TierCounter()
        self._headers = HeaderReader(self.shape, kv_dtype)
        self._watch = _WATCH if _CAN_ASK else 0  # batches to come for which the disk is asked in advance
        self._tree_cold = False  # whether the latest batch had to read several pages of keys from the disk
        self._slabs: _Slabs | None = None  # of the latest call; nearly always those of the next
        self._images = threading.local()  # where each reading thread puts a record
        self._pool: ThreadPoolExecutor | None = None
        self._pool_lock = threading.Lock()

    # Writing

    def write(self, txn: Transaction, document: int, block: int, layer: int, k: Tensor, v: Tensor, length: int) -> int:
        """Write one record; return its bytes.

        k, v: [num_kv_heads, block_size, head_dim] in the KV dtype, K rotated by the offset inside the block only;
        length: valid content tokens, less than block_size only for a document's closed last block.
        """
        record = encode_record(document, block, layer, k, v, length, self.codec, self.kv_dtype)
        return self.write_record(txn, document, block, layer, record)

    def write_record(self, txn: Transaction, document: int, block: int, layer: int, record: bytes) -> int:
        """Write one encoded record under the key that it carries; return its bytes."""
        txn.put("blocks", block_key(document, block, layer), record)
        return len(record)

    def delete_document(self, txn: Transaction, document: int) -> int:
        """Delete every record of a document; return the bytes that were freed."""
        return txn.delete_range("blocks", *block_range(document))[1]

    def delete_blocks(self, txn: Transaction, document: int, first: int) -> int:
        """Delete every layer's records of the blocks from `first` on; return the bytes that were freed."""
        return txn.delete_range("blocks", *block_range(document, first=first))[1]

    def delete_layers(self, txn: Transaction, document: int, layers: Collection[int], first: int, end: int) -> int:
        """Delete the records of some layers of blocks `first` to `end` (exclusive); return the bytes that were freed.

        For layers without memory, of which only the latest blocks are kept. Records already gone are passed over.
        """
        keys = (block_key(document, block, layer) for block in range(first, end) for layer in sorted(layers))
        return sum(txn.delete("blocks", key) for key in keys)

    # Reading

    def read(self, units: Sequence[BlockKey], out_k: Tensor, out_v: Tensor, slots: Sequence[int]) -> list[int]:
        """Fill slot `slots[i]` of both slabs with unit `units[i]`; return each unit's valid content tokens.

        out_k, out_v: contiguous CPU slabs [S, block_size, head_dim] in the KV dtype. One read transaction, walked in
        key order; nothing of the file outlives it. Raises CorruptBlock, DocumentNotFound.
        """
        started = time.perf_counter()
        slabs = self._slabs
        if slabs is None or slabs.tensors[0] is not out_k or slabs.tensors[1] is not out_v:
            slabs = self._slabs = _Slabs(out_k, out_v)
        batch = _Batch(units, slabs, slots, [self.shape[1]] * len(units))
        records: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, unit in enumerate(units):
            records[unit[:3]].append(place)  # document, layer, block
        # In the order in which the records lie in the file.
        wanted: list[_Wanted] = sorted(
            (self._key(document, block, layer), document, block, layer, places)
            for (document, layer, block), places in records.items()
        )
        if self._tree_cold and not self.database.in_transaction:
            self._walk_tree([record[0] for record in wanted])
        with self.database.read() as txn:
            rest = wanted if self._watch else self._read_mapped(txn, wanted, batch)
            if rest:
                self._read_asked(txn, rest, batch)
        seconds = time.perf_counter() - started
        counts: dict[int, int] = {}
        for _, _, _, layer, places in wanted:
            counts[layer] = counts.get(layer, 0) + len(places)
        for layer, count in counts.items():
            share = seconds * count / len(units)
            self.stats.count(layer, hits=count, bytes=count * self._unit_bytes, seconds=share)
        return batch.lengths

    def read_block(self, txn: Transaction, document: int, block: int, layer: int) -> tuple[Tensor, Tensor, int]:
        """One record whole: K and V [num_kv_heads, block_size, head_dim] and the valid content tokens.

        Raises CorruptBlock, DocumentNotFound.
        """
        record: _Wanted = (self._key(document, block, layer), document, block, layer, [])
        view = txn.view("blocks", record[0]) or self._missing(txn, record)
        return decode_record(view, document, block, layer, shape=self.shape, dtype=self.kv_dtype)

    def records(self, txn: Transaction, document: int, first: int = 0) -> Iterator[StoredRecord]:
        """A document's records from block `first` on, in order of block and layer, as they lie in the file."""
        keys = block_range(document, first=first)
        ahead = txn.ahead("blocks", *keys)
        next(ahead, None)
        for key, view in txn.scan("blocks", *keys):
            _, block, layer = read_block_key(key)
            yield StoredRecord(block, layer, view)
            next(ahead, None)

    def _read_mapped(self, txn: Transaction, wanted: Sequence[_Wanted], batch: _Batch) -> Sequence[_Wanted]:
        """Copy records from the mapped file, which is fast where the page cache has them; as soon as one had to come
        from the disk, return those that are left.
        """
        before = _disk_reads()
        began = time.perf_counter()
        for index, record in enumerate(wanted):
            self._fill(batch, record, txn.view("blocks", record[0]) or self._missing(txn, record))
            now = time.perf_counter()
            if now - began > _SLOW and _disk_reads() != before:
                self._watch = _WATCH
                return wanted[index + 1 :]
            began = now
        return ()

    def _fill(self, batch: _Batch, record: _Wanted, data: memoryview) -> None:
        """Check and decode the wanted heads of a record into their slots. Raises CorruptBlock.

        data: the record, of which only header and wanted heads have to be there.
        """
        _, document, block, layer, places = record
        units, slabs, slots, lengths = batch
        digests = self._headers.raw_digests(data, document, block, layer)
        if digests is None:
            header = self._headers.read(data, document, block, layer)
            for place in places:
                head, slot = units[place].head, slots[place]
                lengths[place] = header.length
                try:
                    decode_head(data, header, head, slabs.k[slot], slabs.v[slot], self.kv_dtype)
                except (ValueError, IndexError) as error:
                    raise damaged_head(document, block, layer, head, error) from error
            return
        # What decode_head does, without arrays: of small records this loop is most of the work. The checksum is taken
        # after the copy, when the bytes are near, and vouches for what was copied.
        size, half, k, v = self._unit_bytes, self._unit_bytes // 2, slabs.k_bytes, slabs.v_bytes
        start = len(data) - self.shape[0] * size
        for place in places:
            head = units[place][3]
            at, to = start + head * size, slots[place] * half
            payload = data[at : at + size]
            k[to : to + half] = payload[:half]
            v[to : to + half] = payload[half:]
            if xxh3_64_digest(payload) != digests[head]:
                raise damaged_head(document, block, layer, head, "its checksum does not match")

    def _read_asked(self, txn: Transaction, wanted: Sequence[_Wanted], batch: _Batch) -> None:
        """Ask the disk for everything at once before any of it is read."""
        before = _disk_reads()
        placed: list[tuple[Place, _Wanted]] = []
        mapped: list[_Wanted] = []
        for record in wanted:
            place = txn.place("blocks", record[0])
            if place is None:
                mapped.append(record)
            else:
                placed.append((place, record))
        self._tree_cold = _disk_reads() > before + 1
        placed.sort(key=itemgetter(0))
        for start in range(0, len(placed), _SHARE):
            for place, record in placed[start : start + _SHARE]:
                ask(txn.file, self._pieces(place, record, batch))
            if _disk_reads() != before:
                self._watch = _WATCH
                mapped += self._read_placed(txn.file, placed, batch)
                break
        else:  # the page cache had it all
            self._watch = max(0, self._watch - 1)
            mapped = list(wanted)
        for record in mapped:
            self._fill(batch, record, txn.view("blocks", record[0]) or self._missing(txn, record))

    def _read_placed(self, file: int, placed: Sequence[tuple[Place, _Wanted]], batch: _Batch) -> list[_Wanted]:
        """Read records from their places in the file; return those that were not found whole there.

        Threads that share the work need no transaction of their own: the caller's keeps every place as it is.
        """
        threads = min(_COPIERS, len(placed) // _SHARE)
        if threads < 2:
            return self._read_share(file, placed, batch, 1)
        jobs = self._in_threads(threads, placed, lambda part: self._read_share(file, part, batch, threads))
        return [record for job in jobs for record in job.result()]

    def _walk_tree(self, keys: Sequence[bytes]) -> None:
        """Look keys up on several threads, for every page of keys that comes from the disk is waited for.

        Not to be called in a transaction, for whose end the threads' own might have to wait.
        """

        def look_up(part: Sequence[bytes]) -> None:
            with self.database.read() as txn:
                for key in part:
                    txn.place("blocks", key)

        for job in self._in_threads(_READERS, keys, look_up):
            job.result()

    def _in_threads(self, threads: int, items: Sequence[S], work: Callable[[Sequence[S]], T]) -> list[Future[T]]:
        """Have `work` done on equal parts of some items, each in a thread; return when all of it has ended."""
        with self._pool_lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="memstore-disk")
        share = max(1, -(-len(items) // threads))
        jobs = [self._pool.submit(work, items[start : start + share]) for start in range(0, len(items), share)]
        try:
            wait(jobs)
        finally:
            wait(jobs)  # though this thread is interrupted: they use what the caller lent them
        return jobs

    def _read_share(
        self, file: int, placed: Sequence[tuple[Place, _Wanted]], batch: _Batch, threads: int
    ) -> list[_Wanted]:
        """What one of `threads` does: asks for a window of records ahead, and reads and decodes one after the other."""
        failed = []
        pieces = [self._pieces(place, record, batch) for place, record in placed]
        window = max(1, min(_WINDOW, _WINDOW_BYTES // (placed[0][0].size or 1)) // threads) if placed else 0
        for ahead in pieces[:window]:
            ask(file, ahead)
        for index, (place, record) in enumerate(placed):
            if index + window < len(pieces):
                ask(file, pieces[index + window])
            try:
                self._read_one(file, place, record, pieces[index], batch)
            except CorruptBlock:
                failed.append(record)
            except OSError as error:
                _, document, block, layer, _ = record
                raise CorruptBlock(
                    f"document {document}, block {block}, layer {layer} cannot be read from {self.database.path} "
                    f"({error}); check the disk, then run verify"
                ) from error
        return failed

    def _read_one(self, file: int, place: Place, record: _Wanted, pieces: Sequence[Place], batch: _Batch) -> None:
        """Read what is wanted of a record and decode it. Raises CorruptBlock, where it is not there, and OSError."""
        _, document, block, layer, places = record
        image = self._image(place.size)
        if place.size == sum(self._headers.raw_bytes(document, block, layer)):
            self._read_raw(file, place, record, batch, image)
            return
        _read(file, [image[: pieces[0].size]], place.offset)
        if len(pieces) > 1:
            header = self._headers.read(image, document, block, layer)
            for head in {batch.units[index].head for index in places}:
                start = header.start + header.offsets[head]
                _read(file, [image[start : start + header.sizes[head]]], place.offset + start)
        self._fill(batch, record, image)

    def _read_raw(self, file: int, place: Place, record: _Wanted, batch: _Batch, image: memoryview) -> None:
        """The same for a full block in codec raw, as far as its size tells: values are read into the slots at once."""
        _, document, block, layer, places = record
        size, half, slabs = self._unit_bytes, self._unit_bytes // 2, batch.slabs
        start = place.size - self.shape[0] * size
        units = []  # head, K, V
        for index in places:
            at = batch.slots[index] * half
            units.append((batch.units[index].head, slabs.k_bytes[at : at + half], slabs.v_bytes[at : at + half]))
        if [head for head, _, _ in units] == list(range(self.shape[0])):
            _read(file, [image[:start], *(part for _, *both in units for part in both)], place.offset)
        else:
            _read(file, [image[:start]], place.offset)
            for head, k, v in units:
                _read(file, [k, v], place.offset + start + head * size)
        digests = self._headers.raw_digests(image, document, block, layer)
        if digests is None:  # it is something else after all
            raise CorruptBlock(f"document {document}, block {block}, layer {layer} is not at its place")
        for head, k, v in units:
            digest = xxh3_64(k)
            digest.update(v)
            if digest.digest() != digests[head]:
                raise damaged_head(document, block, layer, head, "its checksum does not match")

    def _pieces(self, place: Place, record: _Wanted, batch: _Batch) -> list[Place]:
        """What to read of a record: all of it, or its header and, as far as can be told before, the wanted heads."""
        heads, places = self.shape[0], record[4]
        if 2 * len(places) >= heads:
            return [place]
        # In codec raw the payload is as long as the values are, and heads are of equal size. Otherwise nearly so.
        start = max(place.size - heads * self._unit_bytes, 0)
        size = (place.size - start) // heads
        return [Place(place.offset, min(self._headers.most, place.size))] + [
            Place(place.offset + start + batch.units[index].head * size, size) for index in places
        ]

    def _image(self, size: int) -> memoryview:
        """Where this thread reads a record to."""
        image: memoryview | None = getattr(self._images, "image", None)
        if image is None or len(image) < size:
            image = self._images.image = memoryview(bytearray(size))
        return image[:size]

    def _key(self, document: int, block: int, layer: int) -> bytes:
        if document < 0:  # a session's own, which is never on disk
            raise self._forgotten(document)
        return block_key(document, block, layer)

    def _missing(self, txn: Transaction, record: _Wanted) -> NoReturn:
        _, document, block, layer, _ = record
        if txn.view("documents", document_key(document)) is None:
            raise self._forgotten(document)
        raise CorruptBlock(
            f"document {document}, block {block}, layer {layer}: no such record in {self.database.path}; run verify"
        )

    def _forgotten(self, document: int) -> DocumentNotFound:
        return DocumentNotFound(f"document {document} is not in {self.database.path}: it was forgotten")


def _disk_reads() -> int:
    """A number that grows when this thread makes the disk read: by a page fault, or by asking in advance."""
    if not _CAN_ASK:
        return 0
    usage = getrusage(RUSAGE_THREAD)
    return usage.ru_majflt + usage.ru_inblock


def _read(file: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill buffers, one after the other, from a file. Raises OSError, also where the file ends before."""
    left = [buffer for buffer in buffers if buffer]
    while left:
        count = os.preadv(file, left, offset)
        if not count:
            raise OSError("the file ends before it")
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
