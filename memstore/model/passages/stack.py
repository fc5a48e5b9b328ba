"""What is stored of several passages, as the store takes it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from memstore.disk.passages import Passage
from memstore.model.passages.encode import Encoded
from memstore.model.reader import ChoosingReader, TextTokenizer


def padded(reader: ChoosingReader, encoded: Sequence[Encoded], layer: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer, [n, Hkv, block_size, D]; the rows behind a passage are 0."""
    size = reader.shape.block_size
    k, v = (
        torch.stack([pad(half, (0, 0, 0, size - half.shape[1])) for half in halves])
        for halves in zip(*(one.layers[layer] for one in encoded))
    )
    return k, v


def landmarks_of(reader: ChoosingReader, encoded: Sequence[Encoded]) -> Tensor | None:
    """The token landmarks that the reader's selector keeps, [tokens of all, heads, width]."""
    found = [reader.selector.landmarks(one.tapped) for one in encoded]
    kept = [landmarks for landmarks in found if landmarks is not None]
    return torch.cat(kept) if kept else None


def words_of(
    reader: ChoosingReader, passages: Sequence[Passage]
) -> list[list[tuple[int, int]]] | None:
    """What the reader's selector keeps of the words of passages."""
    return reader.selector.words([reader.tokenizer.decode(one.ids.tolist()) for one in passages])


def own_text(tokenizer: TextTokenizer, passage: Passage) -> str:
    """The text of a passage, without the context in front."""
    return tokenizer.decode(passage.ids[passage.lead :].tolist()).strip()
