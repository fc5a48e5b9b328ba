"""Publishing lists, by which passages are found in two stages, in the next manifest."""

from collections.abc import Callable, Iterable

import numpy as np
from xxhash import xxh3_64_intdigest

from memstore.errors import InvalidInput, WrongModel
from memstore.index.passage_files import Pieces
from memstore.share.manifest import ListsRef, Manifest, PartsRef, new_lists_name
from memstore.share.object_store import OBJECT_BYTES, ObjectStore
from memstore.share.publish import Change, commit
from memstore.share.segments import SEGMENT_BYTES


def send_lists(
    objects: ObjectStore, digest: str, parts: Iterable[np.ndarray], head_of: Callable[[], Pieces]
) -> int:
    """Publish lists for a selector of this digest; return their bytes. head_of: returns the head,
    once all parts were taken.

    The lists need not cover documents that others publish at the same time; readers notice. Raises
    WrongModel (another selector), InvalidInput (too many passages), MemoryNotFound,
    StoreUnavailable.
    """
    refs = _send_parts(objects, parts)
    head = b"".join(head_of())
    if len(head) > OBJECT_BYTES:
        raise InvalidInput(
            f"lists of so many passages have a head of {len(head):,} bytes, which readers refuse"
            "; publish some documents to another prefix"
        )
    ref = ListsRef(new_lists_name(), len(head), xxh3_64_intdigest(head), refs)
    objects.put(ref.head, head)

    def change(newest: Manifest) -> Change:
        if newest.selector is None or newest.selector.digest != digest:
            raise WrongModel(f"{objects.url} is found by another selector; open it again")
        return Change({}, lists=ref)

    commit(objects, change)
    return ref.size + sum(part.size for part in refs)


def _send_parts(objects: ObjectStore, parts: Iterable[np.ndarray]) -> list[PartsRef]:
    """Upload parts, several to an object."""
    refs: list[PartsRef] = []
    some, size = list[np.ndarray](), 0

    def send() -> None:
        refs.append(PartsRef(new_lists_name(), size))
        objects.put(refs[-1].name, b"".join(part.data for part in some))

    for part in parts:
        some.append(part)
        size += len(part)
        if size >= SEGMENT_BYTES:
            send()
            some, size = [], 0
    if size:
        send()
    return refs
