"""How large a document will be in a memory, and whether there is room for it: known before it is
read.
"""

import mmap
import shutil
from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from memstore.disk.format.codec import Zstd, get_codec
from memstore.disk.format.document import Document
from memstore.disk.format.record import header_bytes
from memstore.disk.format.signature import Signature
from memstore.disk.tables.catalog import Catalog
from memstore.errors import StorageFull
from memstore.store.committed import Rows

_PAGE = mmap.PAGESIZE
_PAGE_HEADER = 16  # of the pages of a value that has pages of its own
_LARGE = _PAGE // 2  # a smaller value shares one
_KNOWN = 1000  # documents by which is told how well they compress
_FILL = 0.8  # of what a passage is filled up to, usually


class SizeEstimate(NamedTuple):
    """What a document will be: its tokens, about, and the bytes of its records for so many."""

    tokens: int
    bytes: int
    most: bool  # the bytes are an upper bound: nobody knows yet how well they compress


def estimate_size(
    catalog: Catalog, rows: Rows, wanted: Document, tokens: int, stored: int = 0
) -> SizeEstimate:
    """What `wanted`, a row without content, will be when it has about so many tokens; rows: of all
    documents, the latest of which tell how well they compress; stored: tokens of passages that are
    there already, and cost nothing.

    Raises StorageFull if that exceeds what the quota or the disk leave, and is no upper bound.
    """
    signature, codec = catalog.signature, catalog.codec
    records, pages = record_bytes(signature, codec, wanted, tokens)
    share, most = 1.0, False
    if isinstance(get_codec(codec), Zstd):
        known = _compressed_to(signature, codec, rows.latest(_KNOWN))
        share, most = known or 1.0, known is None
    told = SizeEstimate(tokens, round(share * records), most)
    begun = [row for row in rows.named(wanted.name) if _is_part(row, wanted)]
    there = max([stored, *(row.tokens - row.appended_to for row in begun)])
    needed = round(share * (pages - record_bytes(signature, codec, wanted, there)[1]))
    database, quota = catalog.database, catalog.quota
    free = shutil.disk_usage(database.path).free
    if most or (quota is None and needed <= free):
        return told
    with database.read() as txn:
        used = txn.used_bytes
    free += max(0, database.file_bytes - used)  # pages of what was forgotten are written over
    size = f"{wanted.name!r} has about {tokens:,} tokens and needs {needed / 1e6:,.1f} MB more"
    if quota is not None and needed > quota - used:
        raise StorageFull(
            f"{size}, {max(0, quota - used) / 1e6:,.1f} MB are left of the quota of "
            f"{quota / 1e6:,.1f} MB; raise the quota, or forget documents"
        )
    if needed > free:
        raise StorageFull(
            f"{size}, the disk of {database.path} has room for {free / 1e6:,.1f} MB; make room"
        )
    return told


def record_bytes(
    signature: Signature, codec: str, document: Document, tokens: int
) -> tuple[int, int]:
    """Bytes of the records of a document if it had so many tokens, and of the pages that hold them.
    What a codec compresses takes less; a quantised head with numbers too large for its codes takes
    more.
    """
    size = signature.block_size
    memory = len(signature.memory_layers)
    if document.settings.passage_tokens is not None:
        return _passage_bytes(signature, codec, document, tokens)
    blocks = -(-tokens // size)
    if not blocks:
        return 0, 0
    step = document.settings.chunk_blocks
    first = max(0, tokens // (step * size) * step - document.settings.top_k)
    other = signature.num_layers - memory  # layers that keep the latest blocks alone
    last = tokens - (blocks - 1) * size
    whole = (blocks - 1) * memory + (blocks - 1 - first) * other
    record, short = (_record(signature, codec, rows) for rows in (size, last))
    ends = memory + other
    return whole * record + ends * short, whole * _on_pages(record) + ends * _on_pages(short)


def _passage_bytes(
    signature: Signature, codec: str, document: Document, tokens: int
) -> tuple[int, int]:
    """The same of a document of passages: of as many as it has, or as is usual, all of them of the
    mean length.
    """
    assert document.settings.passage_tokens is not None
    if not tokens:
        return 0, 0
    mean = min(float(tokens), _FILL * document.settings.passage_tokens)
    if document.blocks:
        mean = document.tokens / document.blocks
    records = len(signature.memory_layers) * max(1, round(tokens / mean))
    short, long = (_record(signature, codec, rows) for rows in (int(mean), ceil(mean)))
    record = short + (mean - int(mean)) * (long - short)
    # values with pages of their own leave half of the last free
    page = record if record < _LARGE else record + _PAGE_HEADER + _PAGE / 2
    return round(records * record), round(records * page)


def _compressed_to(signature: Signature, codec: str, rows: Iterable[Document]) -> float | None:
    """To what share documents of this memory were compressed; None without any."""
    whole = [row for row in rows if row.tokens and (row.layers is None or row.of_passages)]
    most = sum(record_bytes(signature, codec, row, row.tokens)[0] for row in whole)
    return min(1.0, sum(row.bytes for row in whole) / most) if most else None


def _is_part(row: Document, wanted: Document) -> bool:
    """Is a row of its name what was read of a document before it was interrupted?"""
    return row.source_hash == wanted.source_hash and row.state in ("ingesting", "replacing")


def _record(signature: Signature, codec: str, rows: int) -> int:
    itemsize, heads = signature.geometry.itemsize, signature.num_kv_heads
    head = get_codec(codec).head_bytes(rows, signature.head_dim, itemsize)
    return header_bytes(heads) + heads * head


def _on_pages(record: int) -> int:
    if record < _LARGE:
        return record
    return -(-(record + _PAGE_HEADER) // _PAGE) * _PAGE
