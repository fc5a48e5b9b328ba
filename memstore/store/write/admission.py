"""What may be written under a name: a new document, the rest of one that was interrupted, one in
the place of another, an import.

    (nothing) --new--> ingesting --finish--> ready
    ready --replace--> ready, and a row "replacing" of the same name --finish--> ready, the old gone
    (nothing) --import--> ingesting, without tokens --> ready
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from memstore.decode import check_plain
from memstore.decode import check_settings as check_fields
from memstore.disk.format.document import WRITE_BYTES, Document, IngestSettings
from memstore.disk.format.runs import IndexSpec
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.errors import DocumentExists, DocumentNotFound, InvalidInput

_NAMED = 5  # documents that an error names

Mode = Literal["new", "replace"]


@dataclass(frozen=True)
class Admission:
    """What a writer is to write to."""

    document: Document  # its row; with id 0 one that `begin` has still to make
    replaces: Document | None = None  # goes when the document is ready
    instead_of: Document | None = None  # goes when the document is begun


def check_name(name: str) -> None:
    """Raises InvalidInput for what cannot be a document's name."""
    if not name or "\0" in name or len(name) > 4096:
        raise InvalidInput("a document needs a name, without zero characters and not a long one")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{name!a} is not UTF-8; choose another name") from error


def check_settings(
    settings: IngestSettings, signature: Signature, selector: IndexSpec | None
) -> None:
    """Raises InvalidInput for settings of a document that this memory cannot hold: passages need a
    selector, chunks a memory without one.
    """
    check_fields(settings)
    if settings.passage_tokens is None:
        if selector is not None:
            raise InvalidInput(
                "a memory with a selector holds documents of passages; give passage_tokens, or "
                "make a memory without a selector"
            )
        return
    if selector is None:
        raise InvalidInput(
            "passages are found by a selector, and this memory has none; make one with a selector"
        )
    if settings.passage_tokens > signature.block_size:
        raise InvalidInput(
            f"passages of up to {settings.passage_tokens} tokens do not fit into blocks of "
            f"{signature.block_size}; fill them up to fewer"
        )
    if (settings.chunk_blocks, settings.top_k) != (1, 0):
        raise InvalidInput("a document of passages has no chunks; leave out chunk_blocks and top_k")


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raises InvalidInput for what no row can say of a document."""
    try:
        check_plain(metadata, "metadata")
    except ValueError as error:
        raise InvalidInput(f"{error}; use plain values") from error


def is_there(found: Document, source_hash: str, settings: IngestSettings, mode: Mode) -> bool:
    """Is the same content there already? A replacement may also want other settings."""
    same = found.state == "ready" and found.source_hash == source_hash
    return same and (mode != "replace" or found.settings == settings)


def admit(named: Sequence[Document], wanted: Document, mode: Mode) -> Admission | None:
    """What a writer of `wanted` (a row without content) is to write to, given the rows of its name
    that are there; None if the same content is there already.

    Raises DocumentExists, InvalidInput (other settings).
    """
    found = next((row for row in named if row.is_listed), None)
    hidden = next((row for row in named if row.state == "replacing"), None)
    if found is not None and is_there(found, wanted.source_hash, wanted.settings, mode):
        return None
    if found is None:
        return Admission(wanted, instead_of=hidden)
    if _continues(found, wanted):
        return Admission(replace(found, metadata=wanted.metadata))
    if mode == "replace":
        if hidden is not None and _continues(hidden, wanted):
            return Admission(replace(hidden, metadata=wanted.metadata), replaces=found)
        return Admission(replace(wanted, state="replacing"), replaces=found, instead_of=hidden)
    if _is_empty(found):
        return Admission(wanted, instead_of=found)
    raise _refusal(found, wanted)


def begin(catalog: Catalog, admission: Admission) -> Document:
    """The row to write to, made if need be. Raises what Database.write raises."""
    if admission.document.id:
        return admission.document

    def work(txn: Transaction) -> Document:
        if admission.instead_of is not None:
            catalog.delete_document(txn, admission.instead_of.id)
        number = catalog.new_number(txn)
        write = os.urandom(WRITE_BYTES)
        row = replace(admission.document, id=number, created=time.time(), write=write)
        catalog.put_document(txn, row)
        return row

    return catalog.database.write(work)


def admit_import(named: Iterable[Document], original: Document) -> Document | None:
    """The listed one of the documents of a name if it has the content to be imported, or if nothing
    can be read of it; None if the name is free. Raises DocumentExists.
    """
    for row in named:
        if row.is_listed:
            if _is_empty(row) or (row.state == "ready" and row.source_hash == original.source_hash):
                return row
            raise DocumentExists(
                f"document {row.name!r} is there with other content; import it under another name"
            )
    return None


def no_document(name: str, rows: Iterable[Document], where: str) -> DocumentNotFound:
    """The error for a name that no document has: it lists the first names of the memory."""
    listed = [repr(row.name) for row in rows if row.is_listed]
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    names = ", ".join(listed[:_NAMED]) + more
    return DocumentNotFound(
        f"no document {name!r} in {where}; " + (f"there are {names}" if names else "it holds none")
    )


def _is_empty(found: Document) -> bool:
    """Was nothing of an ingest committed but its row, or was an import killed?"""
    return found.state == "ingesting" and not found.tokens


def _continues(found: Document, wanted: Document) -> bool:
    """Is this the same ingest, interrupted?"""
    same = found.state != "ready" and found.source_hash == wanted.source_hash
    return same and found.settings == wanted.settings and not _is_empty(found)


def _refusal(found: Document, wanted: Document) -> DocumentExists | InvalidInput:
    if found.state == "ready":
        return DocumentExists(
            f"document {found.name!r} is there with other content; choose another name, or "
            "replace it"
        )
    if found.source_hash != wanted.source_hash:
        return DocumentExists(
            f"document {found.name!r} is partly read, from other content; continue with that, "
            "replace it, or forget it"
        )
    there, here = asdict(found.settings), asdict(wanted.settings)
    others = ", ".join(f"{k}={v}" for k, v in sorted(there.items()) if here[k] != v)
    return InvalidInput(
        f"document {found.name!r} was begun with {others}; continue with the same, replace it, or "
        "forget it"
    )
