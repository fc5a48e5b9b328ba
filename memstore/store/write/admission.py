"""Which write a document's name admits: a new document, a resumed one, a replacement, an import;
as transitions of a row's state:

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
from memstore.disk.format.signature import Signature
from memstore.disk.lmdb.transaction import Transaction
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import IndexSpec
from memstore.errors import DocumentExists, DocumentNotFound, InvalidInput

_NAMED = 5  # documents that an error names

Mode = Literal["new", "replace"]


@dataclass(frozen=True)
class Admission:
    """The row that a writer writes to, and the rows that it replaces."""

    document: Document  # its row; with id 0 it is not stored yet (`begin`)
    replaces: Document | None = None  # deleted when the document is ready
    instead_of: Document | None = None  # deleted when the document is begun


def check_name(name: str) -> None:
    """Raises InvalidInput for an invalid name of a document."""
    if not name or "\0" in name or len(name) > 4096:
        raise InvalidInput("a document's name has 1 to 4096 characters, none of them NUL")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{name!a} is not UTF-8; choose another name") from error


def check_settings(
    settings: IngestSettings, signature: Signature, selector: IndexSpec | None
) -> None:
    """Raises InvalidInput for settings that this memory does not support: passages need a selector,
    chunks a memory without one.
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
            f"{signature.block_size}; lower passage_tokens"
        )
    if (settings.chunk_blocks, settings.top_k) != (1, 0):
        raise InvalidInput("a document of passages has no chunks; leave out chunk_blocks and top_k")


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raises InvalidInput for metadata that a row cannot store."""
    try:
        check_plain(metadata, "metadata")
    except ValueError as error:
        raise InvalidInput(f"{error}; use plain values") from error


def is_there(found: Document, source_hash: str, settings: IngestSettings, mode: Mode) -> bool:
    """Is this content stored already? For a replacement, with the same settings?"""
    same = found.state == "ready" and found.source_hash == source_hash
    return same and (mode != "replace" or found.settings == settings)


def admit(named: Sequence[Document], wanted: Document, mode: Mode) -> Admission | None:
    """The row for a writer of `wanted` (a row without content); named: the stored rows of its name.
    None if the same content is stored already.

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
    """The row to write to, stored first if it is new. Raises what Database.write raises."""
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
    """The listed row of a name if it has the content of `original`, or no content; None if the name
    is free. Raises DocumentExists.
    """
    for row in named:
        if row.is_listed:
            if _is_empty(row) or (row.state == "ready" and row.source_hash == original.source_hash):
                return row
            raise DocumentExists(
                f"document {row.name!r} exists with other content; import it under another name"
            )
    return None


def no_document(name: str, rows: Iterable[Document], where: str) -> DocumentNotFound:
    """The error for an unknown name; it lists the first names of the memory."""
    listed = [repr(row.name) for row in rows if row.is_listed]
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    names = ", ".join(listed[:_NAMED]) + more
    return DocumentNotFound(
        f"no document {name!r} in {where}; " + (f"it holds {names}" if names else "it holds none")
    )


def _is_empty(found: Document) -> bool:
    """Did an interrupted ingest commit no content, or was an import killed?"""
    return found.state == "ingesting" and not found.tokens


def _continues(found: Document, wanted: Document) -> bool:
    """Is this the same ingest, interrupted?"""
    same = found.state != "ready" and found.source_hash == wanted.source_hash
    return same and found.settings == wanted.settings and not _is_empty(found)


def _refusal(found: Document, wanted: Document) -> DocumentExists | InvalidInput:
    if found.state == "ready":
        return DocumentExists(
            f"document {found.name!r} exists with other content; choose another name, or replace it"
        )
    if found.source_hash != wanted.source_hash:
        return DocumentExists(
            f"document {found.name!r} is partly ingested from other content; continue with that, "
            "replace it, or forget it"
        )
    there, here = asdict(found.settings), asdict(wanted.settings)
    others = ", ".join(f"{k}={v}" for k, v in sorted(there.items()) if here[k] != v)
    return InvalidInput(
        f"document {found.name!r} was begun with {others}; continue with the same, replace it, or "
        "forget it"
    )
