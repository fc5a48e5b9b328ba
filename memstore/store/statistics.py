"""What a memory holds and what was looked up since it was opened, as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any

from memstore.disk.files import INDEX
from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.passage_table import PassageCounts
from memstore.store.open_options import OpenOptions


def statistics(
    catalog: Catalog | None,
    documents: Sequence[Document],
    looked_up: Mapping[str, Any],
    layers: Sequence[int],
    options: OpenOptions,
) -> dict[str, Any]:
    """The figures of MemoryStore.stats but its model's. looked_up: what the retrieval tells;
    layers: those with landmark keys.

    "bytes" are those of the records. "passages": how many different ones there are, of how many of
    them keys and values are stored, their bytes, those of them that are referred to more than once,
    and how many sessions computed, among them damaged ones and those that a published memory could
    not be asked for. "landmarks" are the bytes of landmark keys in main memory. Where nothing was
    looked up yet there are no "tiers".
    """
    held = PassageCounts() if catalog is None else catalog.counts()
    ready = sum(document.blocks for document in documents if document.state == "ready")
    built = 0  # bytes of the index's files
    if catalog is not None and catalog.source is None:
        files = (catalog.database.path / INDEX).glob("*.[il]*")
        built = sum(file.stat().st_size for file in files)
    predictor = options.get("prefetch", "off")
    return {
        "documents": len(documents),
        "tokens": sum(document.tokens for document in documents),
        "blocks": sum(document.blocks for document in documents),
        "bytes": sum(document.bytes for document in documents if not document.of_passages)
        + held.bytes,
        "passages": {
            "different": held.passages,
            "stored": held.stored,
            "bytes": held.bytes,
            "shared_bytes": held.shared,
            "computed": looked_up.get("computed", 0),
            "damaged": looked_up.get("damaged", 0),
            "away": looked_up.get("away", 0),
        },
        "file_bytes": 0 if catalog is None else catalog.database.file_bytes,
        "quota": None if catalog is None else catalog.quota,
        "codec": None if catalog is None else catalog.codec,
        "manifest": None if catalog is None else catalog.manifest,
        "landmarks": looked_up.get("landmarks", 0),
        "tiers": looked_up.get("tiers", {}),
        "prefetch": looked_up.get("prefetch", {"predictor": predictor}),
        "index": {
            "kind": options.get("index", "auto"),
            "searches": 0,
            "rows": 0,
            **looked_up.get("index", {}),
            "landmarks": dict.fromkeys(layers, ready),
            "file_bytes": built,
        },
    }
