"""Check the input of a writer: a chunk of a document, or a batch of its passages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.format.document import Document
from memstore.disk.tables.catalog import Catalog
from memstore.disk.tables.runs import BlockWords, Run, RunTable, Words, kinds_of
from memstore.disk.tables.texts import Digest, Passage, encode_part, encode_tokens
from memstore.errors import InvalidInput
from memstore.tiers.raw_bits import raw_view, torch_dtype

LayerBlocks = tuple[Tensor, Tensor, Tensor]
"""K [n, Hkv, block_size, D], V likewise, landmark keys [n, Hkv, D] of a chunk's n blocks in one
layer, in the KV dtype.
"""

KeysValues = tuple[Tensor, Tensor]
"""K, V [tokens, width] of a passage, in the KV dtype."""


@dataclass(eq=False)
class Chunk:
    """A checked chunk, or batch of passages, before it is committed."""

    first_block: int
    first_token: int
    lengths: list[int]  # tokens of each block
    part: tuple[int, bytes]  # key and value in the table of tokens
    end: int  # for passages: characters of the document up to their end
    whole: bool  # another chunk may follow
    blocks: dict[int, tuple[Tensor, Tensor]]  # layer -> K, V of a chunk
    runs: dict[int, Run]  # part -> search data of its blocks
    digests: Sequence[Digest] = ()  # of the passages
    kv: Mapping[int, KeysValues] = field(default_factory=dict)  # position in `digests` -> K, V
    units: list[BlockKey] = field(default_factory=list)  # pinned blocks of the chunk
    # (block, layer) of a chunk, or (position in `digests`, 0) -> record, once encoded
    records: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def end_block(self) -> int:
        """The number of the block after it."""
        return self.first_block + len(self.lengths)

    @property
    def end_token(self) -> int:
        """The number of the token after it."""
        return self.first_token + sum(self.lengths)


def finite(parts: Sequence[Tensor]) -> bool:
    """Are all numbers of these tensors finite?"""
    # a NaN makes both the least and the greatest number NaN
    ends = [end for part in parts if part.numel() for end in part.aminmax()]
    return not ends or bool(torch.stack(ends).isfinite().all())


def check_chunk(
    catalog: Catalog,
    document: Document,
    first_block: int,
    ids: np.ndarray,
    char_start: int,
    layers: Mapping[int, LayerBlocks],
    length_of_last: int | None,
) -> Chunk:
    """The chunk that begins at first_block: see DocumentWriter.add_chunk. Raises InvalidInput."""
    heads, size, dim = catalog.signature.geometry.shape
    n = layers[0][0].shape[0]
    blocks, keys = (n, heads, size, dim), (n, heads, dim)
    for layer, parts in layers.items():
        _check_tensors(catalog, f"layer {layer}", parts, (blocks, blocks, keys))
        _check_finite(catalog, f"layer {layer}, blocks {first_block} to {first_block + n}", parts)
    last = size if length_of_last is None else length_of_last
    return Chunk(
        first_block=first_block,
        first_token=first_block * size,
        lengths=[*[size] * (n - 1), last],
        part=(first_block * size, encode_tokens(char_start, ids)),
        end=0,
        whole=n == document.settings.chunk_blocks and last == size,
        blocks={layer: (k, v) for layer, (k, v, _) in layers.items()},
        runs={
            layer: Run.of_keys(first_block, raw_view(keys.clone()))
            for layer, (_, _, keys) in layers.items()
        },
    )


def check_batch(
    catalog: Catalog,
    document: Document,
    at: tuple[int, int, int],
    passages: Sequence[Passage],
    kv: Mapping[int, KeysValues],
    landmarks: Tensor | None,
    words: Sequence[Words] | None,
) -> Chunk:
    """The passages that begin at this block, token and character; kv: K, V by position in
    `passages`. See DocumentWriter.add_passages. Raises InvalidInput.
    """
    block, token, character = at
    lengths = [len(passage.ids) for passage in passages]
    for number, both in kv.items():
        shape = (lengths[number], catalog.signature.head_dim)
        _check_tensors(catalog, "a passage", both, (shape, shape))
    every = [half for both in kv.values() for half in both]
    _check_finite(catalog, f"passages from {block} on", every)
    return Chunk(
        first_block=block,
        first_token=token,
        lengths=lengths,
        part=(block, encode_part(character, passages)),
        end=passages[-1].end,
        whole=True,
        blocks={},
        runs=_selector_runs(catalog.runs, block, lengths, landmarks, words),
        digests=catalog.digests(document, passages),
        kv=kv,
    )


def _check_tensors(
    catalog: Catalog, what: str, parts: Sequence[Tensor], expected: Sequence[tuple[int, ...]]
) -> None:
    dtype = torch_dtype(catalog.signature.kv_dtype)
    shapes = tuple(tuple(part.shape) for part in parts)
    if shapes != expected or {part.dtype for part in parts} != {dtype}:
        raise InvalidInput(f"{what}: expected {expected} {dtype}, got {shapes} {parts[0].dtype}")


def _check_finite(catalog: Catalog, what: str, parts: Sequence[Tensor]) -> None:
    if not finite(parts):
        raise InvalidInput(
            f"{what}: keys, values or landmark keys are not finite; the model cannot read this "
            f"text in {catalog.signature.kv_dtype}, use one that can"
        )


def _selector_runs(
    table: RunTable,
    first_block: int,
    lengths: Sequence[int],
    landmarks: Tensor | None,
    words: Sequence[Words] | None,
) -> dict[int, Run]:
    """A selector's search data of consecutive blocks, by part of the table; lengths: tokens of each
    block. Raises InvalidInput for data that does not match the selector's spec.
    """
    spec, runs = table.spec, dict[int, Run]()
    assert spec is not None
    if (landmarks is not None) != (spec.width > 0) or (words is not None) != spec.words:
        raise InvalidInput(f"selector {spec.name} keeps {kinds_of(spec)} of passages; give that")
    if landmarks is not None:
        shape = (sum(lengths), spec.width)
        if tuple(landmarks.shape) != shape or landmarks.dtype != torch.int8:
            raise InvalidInput(
                f"expected token landmarks {list(shape)} torch.int8, got {list(landmarks.shape)} "
                f"{landmarks.dtype}"
            )
        bits = landmarks.detach().cpu().numpy().copy()
        run = Run.of_tokens(first_block, bits, np.array(lengths, np.int64))
        runs[table.part("token")] = run
    if words is not None:
        if len(words) != len(lengths):
            raise InvalidInput(
                f"expected the words of {len(lengths)} passages, got those of {len(words)}"
            )
        runs[table.part("words")] = Run.of_words(first_block, BlockWords.of(words))
    return runs
