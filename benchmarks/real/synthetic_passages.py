"""A memory of very many passages: what a model really read, and synthetic documents of the same
statistics.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
import torch

from benchmarks.real.choice_at_1m import Chosen
from memstore import MemoryStore
from memstore.disk.format.document import IngestSettings
from memstore.disk.format.text_parts import Passage
from memstore.model.passages.passage_ingest import passages_of

_CLUSTERS, _AT_ONCE, _IN_A_DOCUMENT = 4096, 250, 5000


class Read(NamedTuple):
    """Landmarks int8 [tokens, width] of passages, their own tokens [n] each, and their words."""

    landmarks: np.ndarray
    ids: list[np.ndarray]
    words: list[list[tuple[int, int]]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [passages]: tokens of each."""
        return np.array([len(ids) for ids in self.ids], np.int64)


def fill(memory: Path, chosen: Chosen, names: list[str], options: argparse.Namespace) -> None:
    """Make the memory: what was read, then synthetic documents."""
    reader, read = chosen.reader, []
    with MemoryStore.create(memory, reader.signature, selector=reader.keeps) as store:
        for name in names:
            kept = chosen.landmarks(name)
            assert kept is not None, "the model's selector keeps no token landmarks"
            texts = [chosen.blocks.text(block) for block in chosen.blocks.scope([name])]
            text = chosen.blocks.documents[name]
            ids = [passage.ids for passage in passages_of(reader, [text])]
            read.append(Read(kept[0][:, 0].numpy(), ids, reader.selector.words(texts)))
            assert read[-1].lengths.tolist() == kept[1]
            write_document(store, name, read[-1])
        passages = sum(len(one.ids) for one in read)
        everything = Read(
            np.concatenate([one.landmarks for one in read]),
            [ids for one in read for ids in one.ids],
            [words for one in read for words in one.words],
        )
        made = synthetic(everything, options.passages - passages, options.seed)
        for number, document in enumerate(made):
            write_document(store, f"synthetic {number}", document)


def write_document(store: MemoryStore, name: str, read: Read) -> None:
    """A document whose passages are found by this."""
    settings = IngestSettings(passage_tokens=64)
    writer = store.write_document(name, source_hash=name, settings=settings)
    assert writer is not None
    ends = np.cumsum(read.lengths)
    with writer:
        for first in range(0, len(ends), _AT_ONCE):
            last = min(first + _AT_ONCE, len(ends))
            begin = int(ends[first] - read.lengths[first])
            sizes = read.lengths[first:last]
            some = [
                Passage(ids, 0, "", at, len(ids))
                for at, ids in zip((ends[first:last] - sizes).tolist(), read.ids[first:last])
            ]
            landmarks = torch.from_numpy(read.landmarks[begin : ends[last - 1], None].copy())
            words = read.words[first:last]
            writer.add_passages(some, [], given=[], landmarks=landmarks, words=words)
        writer.finish()


def synthetic(read: Read, passages: int, seed: int) -> Iterator[Read]:
    """Documents of synthetic passages, of the statistics of these."""
    rng = np.random.default_rng(seed)
    vectors = read.landmarks.astype(np.float32) / np.float32(127)
    kmeans = faiss.Kmeans(vectors.shape[1], _CLUSTERS, niter=6, spherical=True, seed=seed)
    kmeans.train(vectors[rng.permutation(len(vectors))[:200_000]])
    vocabulary = max(int(ids.max()) for ids in read.ids)
    cluster = kmeans.index.search(vectors, 1)[1][:, 0]
    order, size = np.argsort(cluster, kind="stable"), np.bincount(cluster, minlength=_CLUSTERS)
    begin = np.cumsum(size) - size

    of_all = read.lengths

    def alike(tokens: np.ndarray) -> np.ndarray:
        of = cluster[tokens]
        return order[begin[of] + (rng.random(len(of)) * size[of]).astype(np.int64)]

    for first in range(0, passages, _IN_A_DOCUMENT):
        n = min(_IN_A_DOCUMENT, passages - first)
        like = rng.integers(0, len(of_all), n)
        lengths = of_all[like]
        walks = np.empty((n, int(lengths.max())), np.int64)
        at = rng.integers(0, len(vectors), n)
        for step in range(walks.shape[1]):
            walks[:, step] = at
            at = (np.where(rng.random(n) < 0.25, alike(at), at) + 1) % len(vectors)
        tokens = walks[np.arange(walks.shape[1]) < lengths[:, None]]
        made = vectors[alike(tokens)]
        made += rng.standard_normal(made.shape, dtype=np.float32) * np.float32(
            0.1 / made.shape[1] ** 0.5
        )
        made *= 127 / np.linalg.norm(made, axis=1, keepdims=True)
        ids = [read.ids[one].copy() for one in like]
        for passage in ids:  # what is stored is named by its tokens: no two are the same
            passage[-2:] = rng.integers(0, vocabulary, len(passage[-2:]))
        yield Read(made.round().astype(np.int8), ids, [read.words[one] for one in like])
