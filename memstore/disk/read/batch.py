"""A batch of units on the way from records into the slots of a slab: which record has which,
checking, decoding, placing.

Of small records the work around the copies is most of it. So records whose headers are alike are
checked together, and what lies together in a record and in the slab is copied at once.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from xxhash import xxh3_64_digest

from memstore.block import BlockKey, RecordKey
from memstore.disk.format.document import Write, write_of
from memstore.disk.format.keys import record_key
from memstore.disk.format.record import WriteId
from memstore.disk.format.record_heads import decode_head
from memstore.disk.tables.block_table import BlockTable

# A record's key as bytes in the table and by its parts, the write that made it, and which units of
# a batch are read from it.
Wanted = tuple[bytes, RecordKey, WriteId, Sequence[int]]


class Slots:
    """The memory of a slab, in which K and V of a unit are neighbours, as in a record."""

    def __init__(self, bits: np.ndarray) -> None:
        """bits: of the slab, contiguous [S, 2, block_size, head_dim]; they are written to."""
        self.bits = bits
        self.rows = bits.reshape(len(bits), -1).view(np.uint8)  # [S, bytes of a unit]
        self.bytes = self.rows.reshape(-1).data

    def put(self, at: int, data: memoryview) -> None:
        """Copy bytes to byte `at`."""
        self.bytes[at : at + len(data)] = data


class Batch:
    """The units of one call, the slots that they go to, and their lengths once they are there."""

    def __init__(
        self, units: Sequence[BlockKey], slots: Slots, numbers: Sequence[int], table: BlockTable
    ) -> None:
        self.units, self.slots, self.numbers = units, slots, numbers
        self.lengths = [table.geometry.block_size] * len(units)
        self._table = table
        self.unit_bytes = slots.rows.shape[1]
        self._heads = tuple(range(table.geometry.num_kv_heads))
        self.documents, self.layers, self._blocks, self._asked = zip(*units)
        self._whole = self._are_whole()  # all heads of every record are wanted, in their order
        # and their slots are neighbours
        self._in_a_row = self._whole and self._are_in_a_row(range(len(units)))

    def _are_whole(self) -> bool:
        count, heads = len(self.units), len(self._heads)
        return self._asked == self._heads * (count // heads) and all(
            column[::heads] == column[head::heads]
            for column in (self.documents, self.layers, self._blocks)
            for head in self._heads[1:]
        )

    def by_record(self, writes: Mapping[int, Sequence[Write]]) -> list[Wanted]:
        """The records that hold the units, in the order in which they lie in the file.

        writes: of every document of the units.
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
        keys = list(map(RecordKey._make, zip(documents, blocks, layers)))
        made_by = [write_of(writes[document], block) for document, block, _ in keys]
        return sorted(zip(map(record_key, keys), keys, made_by, places), key=itemgetter(0))

    def fill_all(self, wanted: Sequence[Wanted], records: Sequence[memoryview]) -> None:
        """Check and decode the wanted heads of some records into their slots. Raises CorruptBlock,
        naming one.
        """
        start = 0
        for _, run in groupby(map(len, records)):
            end = start + len(list(run))
            alike, data = wanted[start:end], records[start:end]
            digests = self._table.form.raw_digests_of(
                data, [key for _, key, _, _ in alike], [write for _, _, write, _ in alike]
            )
            if digests is None or not self._copy(alike, data, digests):
                for record, datum in zip(alike, data):
                    self.fill(record, datum)  # which tells what is wrong, if something is
            start = end

    def _copy(
        self,
        wanted: Sequence[Wanted],
        records: Sequence[memoryview],
        digests: Sequence[Sequence[bytes]],
    ) -> bool:
        """Copy the heads of full blocks in codec raw; return whether they are what was written.

        Checksums are taken after the copy, when the bytes are near, and vouch for what was copied:
        while the transaction lasts nothing changes a record, but for a reader that LMDB's lock file
        cannot know; then a page is written anew under it, and does not become again what it was.
        """
        size, numbers, heads = self.unit_bytes, self.numbers, len(self._heads)
        put = self.slots.put
        start = len(records[0]) - heads * size
        parts = [(at, at + size) for at in range(start, len(records[0]), size)]
        for (_, _, _, places), data, expected in zip(wanted, records, digests):
            slot = numbers[places[0]] * size
            if self._in_a_row or (self._whole and self._are_in_a_row(places)):
                put(slot, data[start:])
                if tuple([xxh3_64_digest(data[at:end]) for at, end in parts]) != expected:
                    return False
                continue
            for place in places:
                head, slot = self.units[place][3], numbers[place] * size
                at, end = parts[head]
                part = data[at:end]
                put(slot, part)
                if xxh3_64_digest(part) != expected[head]:
                    return False
        return True

    def places_of(
        self, wanted: Sequence[Wanted], headers: Sequence[memoryview]
    ) -> Sequence[list[memoryview] | None]:
        """Where the bytes of each of these records belong, if it is a full block in codec raw: here
        its header, and its heads in their slots. None unless each head of it is wanted once.

        headers: RecordForm.header_bytes each.
        """
        if self._in_a_row:
            size, memory, numbers = self.unit_bytes, self.slots.bytes, self.numbers
            whole = size * len(self._heads)
            starts = [size * numbers[places[0]] for _, _, _, places in wanted]
            return [[header, memory[at : at + whole]] for header, at in zip(headers, starts)]
        return list(map(self._places_of, wanted, headers))

    def _places_of(self, record: Wanted, header: memoryview) -> list[memoryview] | None:
        places = record[3]
        if len(places) != len(self._heads):
            return None
        size, memory, numbers = self.unit_bytes, self.slots.bytes, self.numbers
        if self._whole and self._are_in_a_row(places):
            start = numbers[places[0]] * size
            return [header, memory[start : start + len(places) * size]]
        slots = {self.units[place][3]: numbers[place] * size for place in places}
        if len(slots) != len(places):
            return None
        return [header, *(memory[slots[head] : slots[head] + size] for head in self._heads)]

    def digests_of(self, parts: Sequence[memoryview]) -> tuple[bytes, ...]:
        """The checksums of the heads behind a header, as they lie in slots (places_of)."""
        size, slots = self.unit_bytes, parts[1:]
        if len(slots) == 1:  # that are neighbours
            whole = slots[0]
            return tuple(
                [xxh3_64_digest(whole[at : at + size]) for at in range(0, len(whole), size)]
            )
        return tuple(map(xxh3_64_digest, slots))

    def check_in_place(
        self,
        wanted: Sequence[Wanted],
        parts: Sequence[Sequence[memoryview]],
        found: Sequence[tuple[bytes, ...]],
    ) -> tuple[list[int], list[int]]:
        """Check records that were received where places_of says. Return which of them are full
        blocks in codec raw and what was asked for, and the rest, of which slots hold nothing of
        use.

        found: digests_of each, taken behind the last byte that was received of it.
        """
        good: list[int] = []
        wrong: list[int] = []
        expected = self.expected(wanted, [of[0] for of in parts])
        for number, (digests, told) in enumerate(zip(found, expected)):
            (good if digests == told else wrong).append(number)
        return good, wrong

    def expected(
        self, wanted: Sequence[Wanted], headers: Sequence[memoryview]
    ) -> Sequence[Sequence[bytes] | None]:
        """The checksums of the heads of records, as their headers tell them; None for what is no
        full block in codec raw, or not what was asked for.
        """
        if not wanted:
            return ()
        keys, writes = [record[1] for record in wanted], [record[2] for record in wanted]
        together = self._table.form.raw_digests_in(b"".join(headers), keys, writes)
        if together is not None:
            return together
        if len(wanted) == 1:
            return (None,)
        return [self.expected([one], [header])[0] for one, header in zip(wanted, headers)]

    def _are_in_a_row(self, places: Sequence[int]) -> bool:
        """Whether neighbouring units go to neighbouring slots."""
        numbers = self.numbers[places[0] : places[-1] + 1]
        return list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))

    def fill(self, record: Wanted, data: memoryview) -> None:
        """The same for one record, of which only header and wanted heads have to be there."""
        _, key, write, places = record
        header = self._table.header(data, key, write)
        for place in places:
            k, v = self.slots.bits[self.numbers[place]]
            self.lengths[place] = header.length
            head, dtype = self.units[place].head, self._table.geometry.dtype
            decode_head(data, key, header, head, (k, v), dtype)
