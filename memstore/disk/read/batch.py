"""A batch of units on the way from records into the slots of a slab: which record has which,
checking, decoding, placing.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

import numpy as np
from xxhash import xxh3_64_digest

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.keys import record_keys
from memstore.disk.format.record import WriteId, decode_head
from memstore.disk.tables.block_table import BlockTable

# A record's key as bytes in the table and by its parts, the write that made it, and which units of
# a batch are read from it.
Wanted = tuple[bytes, RecordKey, WriteId, Sequence[int]]


_KEPT = 1 << 14  # slots whose memory is kept at hand: some 4 MB


class Slots(dict[int, memoryview]):
    """The memory of a slab, in which K and V of a unit are neighbours, as in a record: of each slot
    by its number, made when it is asked for, the last ones kept. Of a small record to make them is
    most of it.
    """

    def __init__(self, bits: np.ndarray) -> None:
        """bits: of the slab, contiguous [S, 2, block_size, head_dim]; they are written to."""
        super().__init__()
        self.bits = bits
        self.unit_bytes = bits[0].nbytes
        self.bytes = bits.reshape(-1).view(np.uint8).data

    def __missing__(self, number: int) -> memoryview:
        if len(self) >= _KEPT:
            self.clear()
        start = number * self.unit_bytes
        slot = self[number] = self.bytes[start : start + self.unit_bytes]
        return slot


def joined_digests(heads: Iterable[memoryview]) -> bytes:
    """The checksums of heads where they lie, one behind the other."""
    return b"".join(map(xxh3_64_digest, heads))


class Batch:
    """The units of one call, the slots that they go to, and their lengths once they are there."""

    def __init__(
        self,
        units: Sequence[BlockKey],
        slots: Slots,
        numbers: Sequence[Sequence[int]],
        table: BlockTable,
    ) -> None:
        """numbers: of the slots of each unit, which have room for block_size tokens together."""
        self.units, self.numbers, self._bits = units, numbers, slots.bits
        self.lengths = [table.geometry.block_size] * len(units)
        self._table = table
        self.unit_bytes = slots.unit_bytes
        self._slot_size = slots.bits.shape[2]
        self.in_pages = self._slot_size < table.geometry.block_size
        # of each unit that has one
        self.slots = [] if self.in_pages else [slots[held[0]] for held in numbers]
        self._heads = tuple(range(table.geometry.num_kv_heads))
        self.documents, self.layers, self._blocks, self._asked = zip(*units)
        self._whole = self._are_whole()  # all heads of every record are wanted, in their order

    def _are_whole(self) -> bool:
        count, heads = len(self.units), len(self._heads)
        if self._asked != self._heads * (count // heads):
            return False
        for column in (self.documents, self.layers, self._blocks):
            if column.count(column[0]) < count:
                first = column[::heads]
                if any(column[head::heads] != first for head in self._heads[1:]):
                    return False
        return True

    def by_record(self, writes: Mapping[int, WriteId]) -> list[Wanted]:
        """The records that hold the units, in the order in which they lie in the file.

        writes: by which the records of every document of the units are known.
        """
        documents, layers, blocks = self.documents, self.layers, self._blocks
        places: Sequence[Sequence[int]]
        if self._whole:
            count, heads = len(self.units), len(self._heads)
            documents, layers, blocks = documents[::heads], layers[::heads], blocks[::heads]
            places = list(map(range, range(0, count, heads), range(heads, count + 1, heads)))
        else:
            of: dict[tuple[int, int, int], list[int]] = {}
            for place, record in enumerate(zip(documents, blocks, layers)):
                of.setdefault(record, []).append(place)
            documents, blocks, layers = zip(*of)
            places = list(of.values())
        keys = list(map(RecordKey, documents, blocks, layers))
        made_by = map(writes.__getitem__, documents)
        return sorted(zip(record_keys(keys), keys, made_by, places), key=itemgetter(0))

    def heads_of(self, record: Wanted) -> list[memoryview] | None:
        """The slots of a record's heads, in their order; None unless each is wanted once."""
        places = record[3]
        if self._whole:
            return self.slots[places[0] : places[0] + len(places)]
        of = {self._asked[place]: self.slots[place] for place in places}
        if not len(places) == len(of) == len(self._heads):
            return None
        return list(map(of.__getitem__, self._heads))

    def fill(self, record: Wanted, data: memoryview) -> None:
        """Check and decode the wanted heads of a record into their slots; of another codec only the
        header and these have to be there. Raises CorruptBlock.
        """
        _, key, write, places = record
        header = self._table.header(data, key, write)
        for place in places:
            self.lengths[place] = header.length
            held, size = self.numbers[place], self._slot_size
            held = held[: -(-header.length // size)]
            if len(held) == 1:
                whole = self._bits[held[0]]
            else:
                whole = np.empty((2, len(held) * size, *self._bits.shape[3:]), self._bits.dtype)
            head, dtype = self.units[place].head, self._table.geometry.dtype
            decode_head(data, key, header, head, (whole[0], whole[1]), dtype)
            for at, slot in enumerate(held) if len(held) > 1 else ():
                self._bits[slot] = whole[:, at * size : (at + 1) * size]

    def bytes_of(self, places: Iterable[int]) -> int:
        """Bytes of the slots that these units take."""
        size = self._slot_size
        return self.unit_bytes * sum(-(-self.lengths[place] // size) for place in places)
