"""Documents of passages without a model: everything follows from (text, block)."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from memstore.block import BlockKey
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.tables.runs import IndexSpec
from memstore.disk.tables.texts import Passage
from memstore.errors import MissingBlock
from memstore.store.memory_store import MemoryStore
from support.selected_documents import FORM, PASSAGES, words
from support.synthetic_documents import BLOCK, blocks

SETTINGS = IngestSettings(passage_tokens=BLOCK - 1)
GAPS = ["", " ", "\n\n", " \t ", "\N{LINE SEPARATOR}"]


_TEXTS: dict[int, list[Passage]] = defaultdict(list)


def passage(text: int, block: int) -> Passage:
    """One passage of a text."""
    made = _TEXTS[text]
    while len(made) <= block:
        rng = random.Random(text * 100_003 + len(made))
        n, gap = rng.randint(1, BLOCK), rng.choice(GAPS)
        ids = np.array([rng.randrange(2000) for _ in range(n)], dtype=np.int64)
        ids[0] = 2000 + 1000 * text + len(made)  # no two passages have the same tokens
        start = (made[-1].end if made else 0) + len(gap)
        made.append(Passage(ids, rng.randrange(n), gap, start, rng.randint(1, 30)))
    return made[block]


def passages(text: int, first: int, end: int) -> list[Passage]:
    return [passage(text, block) for block in range(first, end)]


@lru_cache(4096)
def content(text: int, block: int) -> tuple[Tensor, Tensor]:
    """K, V [block_size, width] of a passage as they are read, which nobody changes."""
    (one,) = kept(text, block, block + 1)
    k, v = (pad(half, (0, 0, 0, BLOCK - len(half))) for half in one)
    return k, v


def kept(text: int, first: int, end: int) -> list[tuple[Tensor, Tensor]]:
    """K, V [tokens, width] of each passage, as a writer takes them."""
    k, v, _ = blocks(text, 0, first, (end - first) * BLOCK, shape=PASSAGES)
    lengths = [len(one.ids) for one in passages(text, first, end)]
    return [(k[at, 0, :n], v[at, 0, :n]) for at, n in enumerate(lengths)]


def landmarks(text: int, first: int, end: int, form: IndexSpec = FORM) -> Tensor:
    """Landmarks of the tokens of passages first .. end."""
    rows = []
    for block in range(first, end):
        token = np.arange(len(passage(text, block).ids), dtype=np.int64)[:, None]
        number = np.arange(form.width, dtype=np.int64)[None, :]
        rows.append((token * 7919 + block * 31 + number * 104_729 + text * 1_299_709) % 251 - 125)
    values = np.concatenate([np.zeros((0, form.width), np.int64), *rows])
    return torch.from_numpy(values).to(torch.int8)


def add(writer: object, text: int, first: int, end: int, form: IndexSpec = FORM) -> None:
    """Give a writer the passages first .. end."""
    writer.add_passages(  # type: ignore[attr-defined]
        passages(text, first, end),
        kept(text, first, end),
        landmarks=landmarks(text, first, end, form) if form.width else None,
        words=words(text, first, end) if form.words else None,
    )


def ingest(
    store: MemoryStore,
    name: str,
    count: int,
    *,
    text: int = 1,
    mode: str = "new",
    commit_bytes: int = 1,
    source_hash: str | None = None,
    batches: Sequence[int] = (3, 1, 5),
    after_batch: Callable[[int], None] = lambda blocks: None,
) -> Document:
    """Read the first `count` passages of a text, from where the document's writer says."""
    form = store.selector
    writer = store.write_document(
        name,
        source_hash=source_hash or f"{text}:{count}",
        settings=SETTINGS,
        mode=mode,
        commit_bytes=commit_bytes,
    )
    if writer is None:
        return store.document(name)
    with writer:
        turn = 0
        while writer.blocks < count:
            end = min(writer.blocks + batches[turn % len(batches)], count)
            add(writer, text, writer.blocks, end, form)
            turn += 1
            after_batch(end)
        return writer.finish()


def ingest_known(
    store: MemoryStore, name: str, count: int, *, text: int = 1, mode: str = "new"
) -> int:
    """Write a text of which the memory tells what it has; how many passages it lacked."""
    writer = store.write_document(
        name, source_hash=f"{text}:{count}:{name}", settings=SETTINGS, mode=mode, commit_bytes=1
    )
    lacked = 0
    if writer is None:  # it is there already
        return lacked
    with writer:
        for first in range(writer.blocks, count, 7):
            end = min(first + 7, count)
            some = passages(text, first, end)
            known = writer.known(some)
            given = [at for at, one in enumerate(known) if one is None]
            lacked += len(given)
            for at, one in enumerate(known):
                if one is not None:
                    expected = landmarks(text, first + at, first + at + 1)
                    assert (one.landmarks == expected.numpy()).all()
            made = kept(text, first, first + len(some))
            writer.add_passages(
                some,
                [made[at] for at in given],
                given=given,
                landmarks=landmarks(text, first, first + len(some)),
                words=words(text, first, first + len(some)),
            )
        writer.finish()
    return lacked


def ask(store: MemoryStore, document: Document, text: int, block: int) -> bool:
    """Read a passage as a session does; whether it had to be computed."""
    (place,) = store.retrieval.stored_at([(document.id, block)])
    try:
        if place is None:
            raise MissingBlock("it is not stored")
        with store.lease([BlockKey(place[0], 0, 0, 0)]) as lease:
            for found, wanted in zip((lease.k, lease.v), content(text, block)):
                assert torch.equal(found[lease.slots].flatten(0, 1), wanted)
    except MissingBlock:
        ((k, v),) = kept(text, block, block + 1)
        store.retrieval.take_computed(document.id, block, k, v, 0.1)
        return True
    return False


def same(found: Sequence[Passage], expected: Sequence[Passage]) -> bool:
    return len(found) == len(expected) and all(
        one[1:] == other[1:] and np.array_equal(one.ids, other.ids)
        for one, other in zip(found, expected)
    )


def check_content(store: MemoryStore, document: Document, text: int, *, whole: bool = True) -> None:
    """Passages, their keys and values, and what they are found by, are those of the text. whole:
    keys and values are stored of all of them.
    """
    form, count = store.selector, document.blocks
    expected = passages(text, 0, count)
    assert same(store.passages(document.id), expected)
    assert document.tokens == sum(len(each.ids) for each in expected)
    some = range(0, count, 3)
    places = store.retrieval.stored_at([(document.id, block) for block in some])
    for block, place in zip(some, places):
        if place is None:
            assert not whole
            continue
        try:
            lease = store.lease([BlockKey(place[0], 0, place[1], 0)])
        except MissingBlock:  # dropped meanwhile
            assert not whole
            continue
        with lease:
            for found, wanted in zip((lease.k, lease.v), content(text, block)):
                assert torch.equal(found[lease.slots].flatten(0, 1), wanted), block
            assert lease.lengths.tolist() == [len(expected[block].ids)]
    if document.state != "ready":
        return
    scope = [(document.id, 0, count)]
    q = torch.linspace(-1, 1, 3 * form.width).view(3, form.width)
    if form.width:
        products = q.double() @ landmarks(text, 0, count, form).double().T / 127
        parts = products.split([len(each.ids) for each in expected], dim=1)
        maxima = torch.stack([part.amax(-1) for part in parts], dim=1)
        assert torch.allclose(
            store.retrieval.selected.token_maxima(q, scope).double(), maxima, atol=1e-5
        )
    if form.words:
        scores = store.retrieval.selected.word_scores({7: 1.0, 1000: 1.0}, scope)
        there = [{word for word, _ in block} for block in words(text, 0, count)]
        assert (scores > 0).tolist() == [bool(block & {7, 1000}) for block in there]
