"""Which documents' rows changed last: kept with the rows, in the same transactions, so that who has
seen the rows before reads only those that are others now.

It tells where to look and nothing else: where it is damaged, or missing, all rows are
read.
"""

import os
from typing import NamedTuple

import msgpack

from memstore.decode import Count, unpack
from memstore.disk.lmdb.transaction import Transaction
from memstore.errors import CorruptMemory

KEY = b"changes"  # in the table `meta`
_KEPT = 200  # changes that are told; more would not lie in the page itself


class Changes(NamedTuple):
    """The latest changes of a memory's rows."""

    series: bytes  # 8 random bytes; other ones where counting had to begin anew
    last: Count  # number of the last change, 0 before the first
    documents: tuple[Count, ...] = ()  # whose rows were changed, the latest changes' last

    def since(self, seen: "Changes | None") -> set[int] | None:
        """The documents whose rows changed since; None where that is no longer, or not, known."""
        if seen is None or not seen.last or seen.series != self.series:
            return None
        missed = self.last - seen.last
        if not 0 <= missed <= len(self.documents):
            return None
        return set(self.documents[len(self.documents) - missed :])


def read_changes(txn: Transaction) -> Changes:
    """The latest changes as the transaction sees them."""
    try:
        return unpack(txn.get_checked("meta", KEY) or b"", Changes)
    except (CorruptMemory, ValueError):
        return Changes(os.urandom(8), 0)


def note_change(txn: Transaction, document: int) -> None:
    """A document's row is written or deleted in this transaction."""
    series, last, before = read_changes(txn)
    value = (series, last + 1, (*before, document)[-_KEPT:])
    txn.put_checked("meta", KEY, msgpack.packb(value))
