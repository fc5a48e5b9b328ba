"""Documents that were sent, and wait for the manifest that publishes all of them: of each batch a
manifest of its own, which no reader looks for.

    staged/KEY    a manifest, as those of a published memory are, of the documents of a batch
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace

from memstore.share.format.document_pages import Entry, write_pages
from memstore.share.format.manifest import Manifest
from memstore.share.format.published import Published
from memstore.share.objects.object_store import ObjectStore
from memstore.share.objects.sizes import PACKED_BYTES

STAGED = "staged"


def write_staged(objects: ObjectStore, key: str, first: Manifest, entries: Sequence[Entry]) -> str:
    """Stage documents, in order of names; return the object. first: whose signature, codec and
    selector they have. Raises StoreUnavailable.
    """
    pages = tuple(write_pages(objects, entries))
    name = f"{STAGED}/{key}"
    made = replace(first, number=1, id=os.urandom(16), published=time.time(), pages=pages)
    objects.put(name, made.encode())
    return name


def read_staged(objects: ObjectStore, name: str) -> Published:
    """What is staged in an object. Raises ObjectNotFound, CorruptMemory, NewerFormat,
    StoreUnavailable.
    """
    data = objects.get(name, PACKED_BYTES)
    return Published(objects, Manifest.decode(data, f"{objects.url}: {name}"))
