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
from memstore.index import Hits
from memstore.kernels import api
from memstore.kernels.api import LocalAttention
from memstore.model.answer import Found
from memstore.model.landmark.memory_attention import LandmarkAdapter
from memstore.model.landmark.open_chunk import Prefix
from memstore.store.memory_store import MemoryStore

_HITS_OF_EVERY_HEAD = 64  # landmark keys taken a (token, head), to see which heads point sharply
# heads that make a shortlist, and landmark keys taken for each of their tokens
_POINTING_HEADS, _HITS = 3, 1024
# of exp(sharpness * (cosine - 1)): how like two keys must be to count as the same word
_SHARPNESS = 16.0
_UNITS = 256  # leased at once
SHORTLIST = 1 << 16  # blocks whose own keys are read; a smaller memory is ranked whole


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
    reader: LandmarkAdapter,
    store: MemoryStore,
    documents: Sequence[tuple[int, int]],
    ids: Sequence[int],
) -> Iterator[Found]:
    """Blocks of documents (id, blocks), at most SHORTLIST, best first; of equals the earlier in
    their order.

    ids: content tokens of the phrase, at least one. Raises DocumentNotFound for a document that was
    forgotten, CorruptBlock.
    """
    blocks = [(document, block) for document, count in documents for block in range(count)]
    if not blocks or not reader.shape.memory_layers:
        return iter(())
    looks = _look(reader, ids, len(blocks))
    scope = [(document, 0, count) for document, count in documents]
    heads = _sharpest(store, scope, looks, len(blocks))
    if len(blocks) > SHORTLIST:
        pointed = _point(store, scope, looks, heads[:_POINTING_HEADS], len(blocks))
        chosen = pointed.sort(descending=True, stable=True).indices[:SHORTLIST].sort().values
        blocks = [blocks[n] for n in chosen.tolist()]
    layer, head = heads[0]
    kv_head = head // reader.shape.group
    units = [BlockKey(document, layer, block, kv_head) for document, block in blocks]
    keys = F.normalize(looks[layer].k[kv_head].float(), dim=-1)
    cos, sin = reader.rope.angles(0, reader.shape.block_size, keys)
    # (block_size, T, D): as a key stands at each offset
    placed = reader.rope.rotate(keys, cos[:, None], sin[:, None])
    weights, tiers = _compare(store, units, placed)
    order = weights.sort(descending=True, stable=True).indices.tolist()
    return (
        Found(units[n].document, units[n].block, weight, {(layer, head, tiers[n]): weight})
        for n in order
        for weight in [float(weights[n])]
    )


def _look(reader: LandmarkAdapter, ids: Sequence[int], blocks: int) -> dict[int, _Looks]:
    """What every memory layer looks for with each token of a phrase that was read without any
    memory.

    A phrase longer than a chunk is read in pieces that do not see each other.
    """
    size = reader.lookup.chunk_blocks * reader.shape.block_size
    pieces = [_look_piece(reader, ids[at : at + size], blocks) for at in range(0, len(ids), size)]
    return {
        layer: _Looks(
            *(
                torch.cat([getattr(piece[layer], name) for piece in pieces], 1)
                for name in ("q", "k", "gate")
            )
        )
        for layer in pieces[0]
    }


def _look_piece(reader: LandmarkAdapter, ids: Sequence[int], blocks: int) -> dict[int, _Looks]:
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

    ids_of_piece = torch.tensor([sequence], device=reader.device)
    reader.hidden(ids_of_piece, attend, layers=shape.memory_layers[-1] + 1)
    return looks


def _sharpest(
    store: MemoryStore, scope: Sequence[tuple[int, int, int]], looks: dict[int, _Looks], blocks: int
) -> list[tuple[int, int]]:
    """The (layer, head) of all memory layers, the one that points most sharply to blocks of the
    scope first.

    With p a token's landmark softmax and g its gate: by the sum of g p log(blocks p) over tokens
    and blocks, as far as p is above its mean.
    """
    sharpness: dict[tuple[int, int], float] = {}
    for layer, look in looks.items():
        gain = _gain(
            store.retrieval.search_landmarks(
                layer, look.q, scope, min(_HITS_OF_EVERY_HEAD, blocks), return_lse=True
            ),
            blocks,
        )
        of_head = (look.gate[..., None] * (gain.exp() / blocks) * gain.clamp(min=0)).sum((1, 2))
        sharpness |= {(layer, head): value for head, value in enumerate(of_head.tolist())}
    return sorted(sharpness, key=lambda key: -sharpness[key])


def _point(
    store: MemoryStore,
    scope: Sequence[tuple[int, int, int]],
    looks: dict[int, _Looks],
    heads: Sequence[tuple[int, int]],
    blocks: int,
) -> Tensor:
    """How much these heads point to every block of a scope, [blocks]: each token adds g log(1 +
    blocks p).
    """
    pointed = next(iter(looks.values())).q.new_zeros(blocks, dtype=torch.float32)
    for layer in sorted({layer for layer, _ in heads}):
        look, of_layer = looks[layer], [head for at, head in heads if at == layer]
        wanted = torch.zeros(look.q.shape[:2], dtype=torch.bool, device=look.q.device)
        wanted[of_layer] = True
        hits = store.retrieval.search_landmarks(
            layer, look.q, scope, min(_HITS, blocks), return_lse=True, open_rows=wanted
        )
        value = look.gate[..., None] * _gain(hits, blocks).exp().log1p()
        pointed.index_add_(
            0, hits.candidates[of_layer].clamp(min=0).flatten(), value[of_layer].flatten()
        )
    return pointed


def _gain(hits: Hits, blocks: int) -> Tensor:
    """log(blocks p) of every hit [H, T, k], p being its share of the softmax over the scope; -inf
    for none.
    """
    assert hits.lse is not None
    return (hits.scores - hits.lse[..., None] + math.log(blocks)).masked_fill(
        hits.candidates < 0, -math.inf
    )


def _compare(
    store: MemoryStore, units: Sequence[BlockKey], placed: Tensor
) -> tuple[Tensor, list[str]]:
    """How like the phrase each unit is, [n] in 0..1, and the tier that had each.

    placed: [block_size, T, D] the phrase's normalised keys at every offset of a block. Each token
    counts exp(sharpness * (cosine to the likest key of the block - 1)); the mean over tokens is
    returned.
    """
    weights: list[Tensor] = []
    tiers: list[str] = []
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
            tiers += lease.tiers
        likest = (keys @ placed.transpose(1, 2)).amax(0)  # (n, T)
        weights.append((_SHARPNESS * (likest - 1)).exp().mean(1))
        at += step
    return torch.cat(weights), tiers
