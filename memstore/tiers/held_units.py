"""The units that a tier holds in its slots: those computed here and cached, those pinned, those
dropped, and how many there are.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import product

import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded
from memstore.tiers.forks import survive_forks
from memstore.tiers.slot_table import SlotTable
from memstore.tiers.slots import Slots, UnitShape
from memstore.tiers.stats import UNUSED, TierStats


class HeldUnits:
    """Units in the slots of one slab."""

    name = "slab"
    patience = 60.0  # seconds that a lookup waits for slots which other threads use

    def __init__(
        self,
        budget_bytes: int,
        shape: UnitShape,
        *,
        policy: str = "lru",
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        """policy: see memstore.tiers.policy. device, pin_memory: see Slots.

        Raises BudgetExceeded if not even one unit fits or the machine refuses the memory,
        InvalidConfig.
        """
        self.budget_bytes, self.unit_bytes = budget_bytes, shape.bytes
        self.capacity = budget_bytes // shape.bytes
        if self.capacity < 1:
            raise BudgetExceeded(
                f"a {self.name} budget of {budget_bytes} bytes holds no block; "
                f"one takes {shape.bytes} bytes, so raise the budget"
            )
        try:
            self._memory = Slots(self.capacity, shape, device=device, pin_memory=pin_memory)
        except (RuntimeError, MemoryError) as error:  # torch has no error of its own for this
            raise BudgetExceeded(
                f"the machine refuses a {self.name} budget of {budget_bytes} bytes; lower the "
                "budget"
            ) from error
        self.slab, self.k, self.v = self._memory.slab, self._memory.k, self._memory.v
        self.lengths = self._memory.lengths
        self._table = SlotTable(self.capacity, policy)
        # A lock of C, not a condition of Python: an interrupt between taking one and the block it
        # guards would keep it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # thread -> leases that it took and that are not released
        self._lessees: dict[int, int] = {}
        # units that some thread is reading right now -> their slots
        self._arriving: dict[BlockKey, int] = {}
        self._predicted: set[BlockKey] = set()  # of these, what is prefetched
        self._ahead = 0  # slots that prefetches are reading into
        self._short = 0  # threads that wait for slots
        survive_forks(self)

    def admit(self, units: Sequence[BlockKey], k: Tensor, v: Tensor, length: int) -> None:
        """Cache units of so many valid content tokens that were computed instead of being read from
        below; they count as missed. Those that there is no room for now are passed over.

        k, v: [n, block_size, D], zero from `length` on.
        """
        with self._lock:
            self._table.counts.lookups(units, units, 0.0, self.unit_bytes)
            new = [
                at
                for at, unit in enumerate(units)
                if unit not in self._table.slots and unit not in self._arriving
            ]
            new = new[: 0 if self._short else self._table.room()]
            wanted = [units[at] for at in new]
            taken = self._table.take(wanted)
            self.k[taken], self.v[taken] = k[new], v[new]
            self._memory.note_lengths(taken, [length] * len(taken))
            self._table.slots.update(zip(wanted, taken))
            self._changed.notify_all()

    # Pinned units

    def pin(
        self,
        document: int,
        layer: int,
        first_block: int,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int] | None = None,
    ) -> list[BlockKey]:
        """Hold blocks first_block .. of a document as pinned units, in one copy; return the units,
        block by block.

        k, v: [n, Hkv, block_size, D]. lengths: valid content tokens of each block (None = all of
        them full). The units must be new. Raises BudgetExceeded (and holds none of them) if they do
        not fit.
        """
        n, heads, block_size, _ = k.shape
        units = [
            BlockKey(document, layer, block, head)
            for block, head in product(range(first_block, first_block + n), range(heads))
        ]
        thread, until = threading.get_ident(), time.perf_counter() + self.patience
        with self._lock:
            while (room := self._table.room()) < len(units):
                if self._wait_for_room(len(units), room, 0, thread, until):
                    continue
                raise BudgetExceeded(
                    f"the {self.name} tier of {self.capacity * self.unit_bytes} bytes has no room "
                    f"for {len(units)} "
                    f"more blocks of a running session; raise the {self.name} budget"
                )
            taken = self._table.take(units, cached=False)
            slots = torch.tensor(taken, dtype=torch.int64)
            where = (
                slice(taken[0], taken[-1] + 1)
                if n and taken[-1] - taken[0] == len(taken) - 1
                else slots
            )
            self.k[where] = k.reshape(-1, *self.k.shape[1:])
            self.v[where] = v.reshape(-1, *self.v.shape[1:])
            of_blocks = [block_size] * n if lengths is None else lengths
            self._memory.note_lengths(taken, [length for length in of_blocks for _ in range(heads)])
            self._table.slots.update(zip(units, taken))
            self._table.pinned.update(units)
        return units

    def unpin(self, units: Iterable[BlockKey]) -> None:
        """The units are in the source below now: from here on they are cached like any other."""
        with self._lock:
            for unit in units:
                if unit in self._table.pinned:
                    self._table.pinned.remove(unit)
                    self._table.policy.insert(unit, full=False, blocked=self._table.blocked)
            self._changed.notify_all()

    def drop(self, units: Iterable[BlockKey]) -> None:
        """Hold these units no longer, pinned or not, and not when they arrive either.

        A lease on one keeps its slot as it is until the lease ends.
        """
        with self._lock:
            for unit in units:
                slot = self._table.slots.pop(unit, None)
                unused = unit in self._table.untouched or unit in self._predicted
                if slot is None:
                    slot = self._arriving.pop(unit, None)
                if slot is None:
                    continue
                if unit in self._table.pinned:
                    self._table.pinned.remove(unit)
                else:
                    self._table.policy.drop(unit)
                if unused:
                    self._table.untouched.discard(unit)
                    self._predicted.discard(unit)
                    self._table.counts.of(unit.layer)[UNUSED] += 1
                self._table.vacate(slot)
            self._changed.notify_all()

    def drop_document(self, document: int, first_block: int = 0) -> None:
        """Drop what is held or on its way of a document from block `first_block` on. Waits for
        nothing.
        """
        with self._lock:
            held = [*self._table.slots, *self._arriving]
            self.drop(
                [unit for unit in held if unit.document == document and unit.block >= first_block]
            )

    def _in_child(self) -> None:
        """In a forked child nothing that its parent's threads were reading arrives, and none of
        them waits.
        """
        self.drop(list(self._arriving))
        self._ahead = self._short = 0

    def _wait_for_room(
        self, needed: int, room: int, cached: int, thread: int, until: float
    ) -> bool:
        """Wait for something that may make room; False where waiting cannot help, or has lasted too
        long.

        cached: units in the policy's care that are needed too.
        """
        later = room + self._ahead
        # nobody waits for this thread, so it may wait for everybody
        if not self._lessees.get(thread):
            later = self.capacity - len(self._table.pinned) - cached
        patience = until - time.perf_counter()
        if needed > later or patience <= 0:
            return False
        self._short += 1
        try:
            self._changed.wait(patience)
        finally:
            self._short -= 1
        return True

    # Counting

    @property
    def bytes(self) -> int:
        """Bytes of slots in use; at most the budget."""
        with self._lock:
            return (len(self._table.units) + len(self._table.orphans)) * self.unit_bytes

    def holds(self, unit: BlockKey) -> bool:
        """Is the unit here (no lookup is counted)?"""
        with self._lock:
            return unit in self._table.slots

    def layers(self) -> dict[int, TierStats]:
        """Lookups so far, by layer."""
        with self._lock:
            return self._table.counts.layers()

    def stats(self) -> TierStats:
        """Lookups so far, over all layers."""
        with self._lock:
            return self._table.counts.total()
