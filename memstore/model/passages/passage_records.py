"""Records of several passages, as the store takes them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.disk.format.text_parts import Passage
from memstore.model.passages.passage_encoding import Encoded, encode
from memstore.model.passages.passage_protocol import PassageModel


class Computed(NamedTuple):
    """What is stored of a passage: k, v as in Encoded; landmarks [tokens, heads, width], where the
    reader's selector keeps some.
    """

    k: Tensor
    v: Tensor
    landmarks: Tensor | None


def compute(
    reader: PassageModel, passages: Iterable[Sequence[int]], layers: int | None = None
) -> Iterator[Computed]:
    """What is stored of each of these passages (ids), by `encode`; raises what that raises."""
    for one in encode(reader, passages, layers=layers):
        yield Computed(one.k, one.v, landmarks_of(reader, [one]))


def padded(reader: PassageModel, encoded: Sequence[Encoded]) -> dict[int, tuple[Tensor, Tensor]]:
    """K and V of every memory layer, [n, Hkv, block_size, D]; the rows behind a passage are 0."""
    layers = reader.shape.memory_layers
    size = (reader.shape.num_kv_heads, reader.shape.block_size, reader.shape.head_dim)
    k, v = (
        torch.zeros((len(layers), len(encoded), *size), dtype=reader.shape.kv_dtype)
        for _ in range(2)
    )
    for number, one in enumerate(encoded):
        k[:, number, :, : one.k.shape[2]] = one.k
        v[:, number, :, : one.v.shape[2]] = one.v
    return dict(zip(layers, zip(k, v)))


def landmarks_of(reader: PassageModel, encoded: Sequence[Encoded]) -> Tensor | None:
    """The token landmarks that the reader's selector keeps, [tokens of all, heads, width]."""
    found = [reader.selector.landmarks(one.captured) for one in encoded]
    kept = [landmarks for landmarks in found if landmarks is not None]
    return torch.cat(kept) if kept else None


def words_of(
    reader: PassageModel, passages: Sequence[Passage]
) -> list[list[tuple[int, int]]] | None:
    """What the reader's selector keeps of the words of passages."""
    return reader.selector.words([reader.tokenizer.decode(one.ids.tolist()) for one in passages])
