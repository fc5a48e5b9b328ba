"""Documents of passages, without a model: everything of a passage follows from (text, block)."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.format.document import Document, IngestSettings
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.text_parts import Passage
from memstore.errors import MissingBlock
from memstore.store.memory_store import MemoryStore
from support.selected_documents import FORM, words
from support.synthetic_documents import BLOCK, SIGNATURE, blocks

SETTINGS = IngestSettings(passage_tokens=BLOCK - 1)
LAYERS = SIGNATURE.memory_layers
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


def tokens_of(text: int, count: int) -> int:
    return sum(len(each.ids) for each in passages(text, 0, count))


def keys_values(text: int, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
    """K, V [n, Hkv, block_size, D], with what is finite and of no use behind a passage's rows."""
    if first == end:
        return tuple(torch.zeros(0, *SIGNATURE.geometry.shape).half() for _ in range(2))  # type: ignore[return-value]
    k, v, _ = blocks(text, layer, first, (end - first) * BLOCK)
    return k, v


def kept(text: int, first: int, end: int) -> list[tuple[Tensor, Tensor]]:
    """K, V [layers, Hkv, tokens, D] of each passage, as a writer takes them."""
    halves = zip(*(keys_values(text, layer, first, end) for layer in LAYERS))
    k, v = (torch.stack(half, 1) for half in halves)
    lengths = [len(one.ids) for one in passages(text, first, end)]
    return [(k[at, :, :, :n], v[at, :, :, :n]) for at, n in enumerate(lengths)]


@lru_cache(4096)
def content(text: int, layer: int, block: int) -> tuple[Tensor, Tensor]:
    """K, V [Hkv, block_size, D] of a passage as they are read, which nobody changes."""
    k, v = contents(text, layer, block, block + 1)
    return k[0], v[0]


def contents(text: int, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
    """The same of passages first .. end, [n, Hkv, block_size, D]: zero behind their rows."""
    lengths = torch.tensor([len(each.ids) for each in passages(text, first, end)])
    behind = (torch.arange(BLOCK) >= lengths[:, None])[:, None, :, None]
    k, v = keys_values(text, layer, first, end)
    return k.masked_fill(behind, 0), v.masked_fill(behind, 0)


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
    assert form is not None
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
    n, heads = len(passage(text, block).ids), SIGNATURE.num_kv_heads
    wanted = [content(text, layer, block) for layer in LAYERS]
    (place,) = store.retrieval.stored_at([(document.id, block)])
    try:
        if place is None:
            raise MissingBlock("it is not stored")
        units = [BlockKey(place[0], layer, 0, head) for layer in LAYERS for head in range(heads)]
        with store.lease(units) as lease:
            for half, found in enumerate((lease.k, lease.v)):
                assert torch.equal(found[lease.slots], torch.cat([each[half] for each in wanted]))
    except MissingBlock:
        k, v = (torch.stack([each[half] for each in wanted])[:, :, :n] for half in (0, 1))
        store.retrieval.computed.take(document.id, block, k, v, 0.1)
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
    assert form is not None
    expected = passages(text, 0, count)
    assert same(store.passages(document.id), expected)
    assert document.tokens == sum(len(each.ids) for each in expected)
    some = range(0, count, 3)
    for layer in LAYERS:
        wanted = contents(text, layer, 0, count)
        for block, place in zip(
            some, store.retrieval.stored_at([(document.id, block) for block in some])
        ):
            if place is None:
                assert not whole
                continue
            units = [BlockKey(place[0], layer, place[1], head) for head in range(2)]
            try:
                lease = store.lease(units)
            except MissingBlock:  # dropped meanwhile
                assert not whole
                continue
            with lease:
                for found, half in zip((lease.k, lease.v), wanted):
                    assert torch.equal(found[lease.slots], half[block]), (layer, block)
                assert lease.lengths.tolist() == [len(expected[block].ids)] * 2
    if document.state != "ready":
        return
    scope = [(document.id, 0, count)]
    q = torch.linspace(-1, 1, 3 * form.width).view(3, form.width)
    if form.width:
        products = q.double() @ landmarks(text, 0, count, form).double().T / 127
        parts = products.split([len(each.ids) for each in expected], dim=1)
        maxima = torch.stack([part.amax(-1) for part in parts], dim=1)
        assert torch.allclose(store.retrieval.token_maxima(q, scope).double(), maxima, atol=1e-5)
    if form.words:
        scores = store.retrieval.word_scores({7: 1.0, 1000: 1.0}, scope)
        there = [{word for word, _ in block} for block in words(text, 0, count)]
        assert (scores > 0).tolist() == [bool(block & {7, 1000}) for block in there]
