"""Search of a memory for a phrase: landmark keys choose a shortlist of blocks, and the blocks' own
keys rank it.

docs/appendix/method.md section 9. Nothing here depends on one set of weights: which heads matter is
read off the phrase.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.block import BlockKey
from memstore.errors import BudgetExceeded
from memstore.kernels import api
from memstore.kernels.api import LocalAttention
from memstore.model.answer import Found
from memstore.model.landmark.open_chunk import Prefix
from memstore.model.landmark.transformer import LandmarkReader
from memstore.store.memory_store import MemoryStore

_HITS = 64  # landmark keys taken a (token, head)
# of exp(sharpness * (cosine - 1)): how like two keys must be to count as the same word
_SHARPNESS = 16.0
_UNITS = 256  # leased at once
SHORTLIST = 1 << 16  # blocks of a memory that is ranked whole


@dataclass(frozen=True)
class _Looks:
    """What a layer's heads look for, T tokens of the phrase.

    q: [H, T, D] scaled and rotated as towards old blocks; k: [Hkv, T, D] position-free; gate: [H,
    T] (ones without a context miss token).
    """

    q: Tensor
    k: Tensor
    gate: Tensor


@torch.no_grad()
def search_blocks(
    reader: LandmarkReader,
    store: MemoryStore,
    documents: Sequence[tuple[int, int]],
    ids: Sequence[int],
) -> Iterator[Found]:
    """Blocks of documents (id, blocks), best first; of equals the earlier in their order. Of more
    than SHORTLIST blocks, those that landmark keys find.

    ids: content tokens of the phrase, at least one; those of a chunk are read. Raises
    DocumentNotFound for a document that was forgotten, CorruptBlock.
    """
    blocks = [(document, block) for document, count in documents for block in range(count)]
    if not blocks or not reader.shape.memory_layers:
        return iter(())
    chunk = reader.lookup.chunk_blocks * reader.shape.block_size
    looks = _look(reader, ids[:chunk], len(blocks))
    scope = [(document, 0, count) for document, count in documents]
    (layer, head), listed = _sharpest(store, scope, looks, len(blocks))
    if len(blocks) > SHORTLIST:
        blocks = [blocks[n] for n in listed.tolist()]
    kv_head = head // reader.shape.group
    units = [BlockKey(document, layer, block, kv_head) for document, block in blocks]
    keys = F.normalize(looks[layer].k[kv_head].float(), dim=-1)
    cos, sin = reader.rope.angles(0, reader.shape.block_size, keys)
    # (block_size, T, D): as a key stands at each offset
    placed = reader.rope.rotate(keys, cos[:, None], sin[:, None])
    weights = _compare(store, units, placed)
    order = weights.sort(descending=True, stable=True).indices.tolist()
    return (Found(units[n].document, units[n].block, float(weights[n])) for n in order)


def _look(reader: LandmarkReader, ids: Sequence[int], blocks: int) -> dict[int, _Looks]:
    """What every memory layer looks for with each token of a phrase that was read without any
    memory.
    """
    shape, rope, cmt_keys, looks = reader.shape, reader.rope, reader.cmt_keys, {}
    sequence: list[int] = []
    rows = []
    for number, token in enumerate(ids, 1):
        rows.append(len(sequence))
        sequence.append(token)
        if number % shape.block_size == 0:
            sequence.append(reader.landmark_id)
    base, distance = 0, shape.old_block_distance
    if distance is None:
        base = Prefix.of(blocks, 0, reader.lookup.top_k, fixed=False).size * shape.stride

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = rope.angles(base, base + len(sequence), q)
        q = q * shape.head_dim**-0.5
        local: LocalAttention = api.local_attention(
            rope.rotate(q, cos, sin),
            rope.rotate(k, cos, sin),
            v,
            shape.block_size,
            k_cmt=None if cmt_keys is None else cmt_keys[layer],
        )
        if layer in shape.memory_layers:
            if distance is not None:
                cos, sin = rope.angles(distance, distance + 1, q)
            gate = torch.ones_like(local.gate) if cmt_keys is None else local.gate
            looks[layer] = _Looks(
                rope.rotate(q, cos, sin)[0][:, rows], k[0][:, rows], gate[0][:, rows]
            )
        return local.output

    given = torch.tensor([sequence], device=reader.device)
    reader.hidden(given, attend, layers=shape.memory_layers[-1] + 1)
    return looks


def _sharpest(
    store: MemoryStore, scope: Sequence[tuple[int, int, int]], looks: dict[int, _Looks], blocks: int
) -> tuple[tuple[int, int], Tensor]:
    """The (layer, head) of a memory layer that points most sharply to blocks of the scope, and the
    blocks [n], in order, that are among the _HITS best of any token and head.

    With p a token's landmark softmax and g its gate: sharpest is the sum of g p log(blocks p) over
    tokens and blocks, as far as p is above its mean.
    """
    sharpness: dict[tuple[int, int], float] = {}
    hit = list[Tensor]()
    for layer, look in looks.items():
        hits = store.retrieval.search_landmarks(
            layer, look.q, scope, min(_HITS, blocks), return_lse=True
        )
        assert hits.lse is not None
        gain = (hits.scores - hits.lse[..., None] + math.log(blocks)).masked_fill(
            hits.candidates < 0, -math.inf
        )
        of_head = (look.gate[..., None] * (gain.exp() / blocks) * gain.clamp(min=0)).sum((1, 2))
        sharpness |= {(layer, head): value for head, value in enumerate(of_head.tolist())}
        hit.append(hits.candidates[hits.candidates >= 0])
    return max(sharpness, key=lambda key: sharpness[key]), torch.cat(hit).unique()


def _compare(store: MemoryStore, units: Sequence[BlockKey], placed: Tensor) -> Tensor:
    """How like the phrase each unit is, [n] in 0..1.

    placed: [block_size, T, D] the phrase's normalised keys at every offset of a block. Each token
    counts exp(sharpness * (cosine to the likest key of the block - 1)); the mean over tokens is
    returned.
    """
    weights: list[Tensor] = []
    at, step = 0, _UNITS
    while at < len(units):
        try:
            lease = store.lease(units[at : at + step])
        except BudgetExceeded:  # others hold the rest of the budget
            if step == 1:
                raise
            step //= 2
            continue
        with lease:
            # (block_size, n, D)
            keys = F.normalize(lease.k[lease.slots].to(placed), dim=-1).transpose(0, 1)
        likest = (keys @ placed.transpose(1, 2)).amax(0)  # (n, T)
        weights.append((_SHARPNESS * (likest - 1)).exp().mean(1))
        at += step
    return torch.cat(weights)
