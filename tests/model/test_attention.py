"""Chunked inference with a memory equals the published implementation's numbers and a literal
transcription of docs/appendix/method.md.
"""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstore.kernels import api
from memstore.model.landmark.memory_attention import MemoryAttention
from memstore.model.landmark.open_chunk import SessionBlocks
from memstore.model.landmark.transformer import ModelConfig
from memstore.model.lookup_settings import GRANULARITIES
from memstore.model.rotary import Rope
from memstore.model.session import ReadUnit, StepReads
from memstore.store.memory_store import MemoryStore
from support.oracle import Block, Head, choose
from support.paths import DATA
from support.tiny_model import attending


def one_layer(**changes: Any) -> ModelConfig:
    """One layer that reads memory, in float64; 2 heads of 8 channels, blocks of 3 tokens."""
    small = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "block_size": 3}
    return ModelConfig(**(small | {"memory_layers": (0,), "kv_dtype": "float64"} | changes))


class Random:
    """Normal float64 numbers that a seed repeats."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self._generator)


class Driver:
    """Attention of one session over an in-memory store, fed with projections instead of tokens."""

    def __init__(
        self, config: ModelConfig, cmt_keys: list[Tensor] | None = None, retrieve: bool = True
    ) -> None:
        self.config = config
        self.store = MemoryStore.in_memory(config.signature("none", "none"), host_budget=1 << 20)
        self.documents = [self.store.retrieval.session_document()]
        self.scratch = self.store.retrieval.session_document()
        self.blocks = SessionBlocks(own_document=self.scratch.document)
        rope = Rope(config.head_dim, config.rope_base, config.rope_interleaved)
        self.reads: list[tuple[ReadUnit, float]] = []
        self.attention = MemoryAttention(
            attending(config.shape, rope, cmt_keys),
            config.lookup,
            self.store,
            self.blocks,
            retrieve=retrieve,
        )
        self.attention.on_read = self._read
        self.rope = rope

    def _read(self, reads: StepReads) -> None:
        self.reads += zip(reads.units, reads.masses.tolist())

    def attach(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Give a document's blocks of one layer: k [n, Hkv, l + 1, D] position-free, v [n, Hkv, l,
        D].
        """
        stored = self.rope(k, torch.arange(self.config.shape.stride))
        self.documents[0].add(layer, stored[:, :, :-1], v, stored[:, :, -1])
        self.blocks.attach([(self.documents[0].document, len(k))])
        self.attention.start_chunk()

    def feed(self, layers: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        out = [
            self.attention.attend(i, *(x[None].clone() for x in qkv))[0]
            for i, qkv in enumerate(layers)
        ]
        self.attention.chunk.length += layers[0][0].shape[1]
        return out

    def end_chunk(self) -> None:
        blocks = self.attention.chunk.finished()
        n = len(blocks[0][0])
        if n:
            for layer, (k, v, landmarks) in blocks.items():
                self.scratch.add(layer, k, v, landmarks)
            self.blocks.own_end += n
            self.attention.chunk.drop_finished(blocks)
            self.attention.start_chunk()


ORACLE = {
    "per_token_and_head": "per_token_per_head",
    "max_over_heads": "per_token",
    "max_over_tokens": "per_head",
    "token": "per_token_per_head",
    "unaligned": "per_token_per_head",
}


@pytest.mark.parametrize("mode", ORACLE)
def test_chunked_inference_equals_the_published_implementation(mode: str) -> None:
    with np.load(DATA / f"d_cache_{mode}.npz") as file:
        data = {key: torch.from_numpy(file[key]) for key in file.files}
    chunks = 1 + max(int(re.match(r"c(\d+)_", key)[1]) for key in data if key.startswith("c"))
    sizes = {"num_layers": 4, "memory_layers": (0, 1, 2, 3), "head_dim": 16, "block_size": 4}
    places = {"rope_interleaved": True, "old_block_position": "stingy"}
    lookups = {"granularity": ORACLE[mode], "top_k": 2, "chunk_blocks": 8}
    driver = Driver(one_layer(cmt=False, **sizes, **places, **lookups))
    compared = 0
    for c in range(chunks):
        layers = [tuple(data[f"c{c}_l{i}_{name}"] for name in "qkv") for i in range(4)]
        chunk = driver.attention.chunk
        assert chunk.base + chunk.length == int(data[f"c{c}_l0_start"])
        out = driver.feed(layers)
        # layer 0's landmark keys are all alike: its choice is a matter of rounding
        for layer in range(1, 4):
            expected = data[f"c{c}_l{layer}_att_out"]
            torch.testing.assert_close(
                out[layer], expected, rtol=0, atol=1e-9, msg=f"chunk {c}, layer {layer}"
            )
            compared += 1
        driver.end_chunk()
    assert compared == 3 * chunks


LOOKUPS = [  # documents, retrieve, recency, supersede, valued
    (0, True, 0, 0, True),
    (3, True, 0, 0, False),
    (0, False, 2, 3, False),
    (3, False, 0, 0, True),
    (0, True, 2, 3, False),
    (3, True, 2, 3, True),
    (3, True, 0, 3, False),
]
POSITIONS = [(True, True), (True, False), (False, False), (False, True)]  # fixed, cmt


@pytest.mark.parametrize(
    ("granularity", "fixed", "cmt", "documents", "retrieve", "recency", "supersede", "valued"),
    [  # every pair of a lookup, a granularity and a position, once
        (granularity, *POSITIONS[(one + two) % 4], *lookup)
        for one, granularity in enumerate(GRANULARITIES)
        for two, lookup in enumerate(LOOKUPS)
    ],
)
def test_every_memory_size_equals_the_transcription(
    granularity: str,
    fixed: bool,
    cmt: bool,
    documents: int,
    retrieve: bool,
    recency: float,
    supersede: float,
    valued: bool,
) -> None:
    """N = 0 .. k + 2 own blocks, with and without attached documents; carried-over tokens; grouped
    queries.
    """
    heads, kv_heads, size, dim, top_k = 4, 2, 3, 8, 2
    fading = {"recency": recency, "supersede": supersede}
    gate = {"cmt": cmt, "cmt_cutoff": 0.15 if cmt else 0.0}
    places = {"old_block_position": "fixed" if fixed else "stingy", "old_block_distance": 11}
    lookups = {"granularity": granularity, "top_k": top_k, **fading, **gate, **places}
    config = one_layer(num_heads=heads, num_kv_heads=kv_heads, **lookups)
    randn = Random(7)
    k_cmt = randn(kv_heads, dim) if cmt else None
    rope = Rope(dim)
    driver = Driver(
        config, None if k_cmt is None else [rope(k_cmt, torch.tensor(-1))], retrieve=retrieve
    )
    values = randn(heads, dim) if valued and cmt else None
    driver.attention.cmt_values = None if values is None else values[None]
    literal = [
        Head(
            size,
            top_k,
            fixed,
            False,
            distance=11,
            cutoff=config.cmt_cutoff,
            **fading,
            k_cmt=None if k_cmt is None else k_cmt[h // 2].numpy(),
            value=None if values is None or not retrieve else values[h].numpy(),
        )
        for h in range(heads)
    ]
    if documents:
        k, v = randn(documents, kv_heads, size + 1, dim), randn(documents, kv_heads, size, dim)
        driver.attach(0, k, v)
        for h in range(heads):
            literal[h].documents = [
                Block(k[n, h // 2].numpy(), v[n, h // 2].numpy(), size) for n in range(documents)
            ]
    # positions a chunk: own blocks 0, 1, 2, .. beyond top_k + 2, unfinished ones between
    for rows in (4, 6, 3, 5, 2, 4, 4):
        q, k, v = randn(heads, rows, dim), randn(kv_heads, rows, dim), randn(kv_heads, rows, dim)
        first = driver.attention.chunk.length
        [out] = driver.feed([(q, k, v)])
        for h, head in enumerate(literal):
            head.append(k[h // 2].numpy(), v[h // 2].numpy())
        asked = [
            [(head, q[h, row].numpy(), first + row) for row in range(rows)]
            for h, head in enumerate(literal)
        ]
        gates = np.array([[head.gate(x, at)[1] for head, x, at in of_head] for of_head in asked])
        open_rows = gates >= config.cmt_cutoff if cmt else np.ones_like(gates, dtype=bool)
        n = len(literal[0].memory)
        scores = np.array(
            [[head.candidate_scores(x, at) for head, x, at in of_head] for of_head in asked]
        ).reshape(heads, rows, n)
        if not retrieve:
            recent = literal[0].recent
            chosen = [[list(range(n - recent, n))] * rows for _ in range(heads)]
        elif n:
            chosen = choose(scores, granularity, top_k, open_rows, heads // kv_heads)
        else:
            chosen = [[[]] * rows for _ in range(heads)]
        seen = n if retrieve else literal[0].recent
        expected = np.array(
            [
                [head.attend(x, at, read, seen) for (head, x, at), read in zip(*of_head)]
                for of_head in zip(asked, chosen)
            ]
        )
        np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-11, err_msg=f"{n} blocks")
        driver.end_chunk()
        for head in literal:
            head.end_chunk()
    assert len(literal[0].own) > top_k + 2


def test_closed_gates_touch_neither_index_nor_tiers() -> None:
    config, randn = one_layer(cmt_cutoff=1.0), Random(0)
    driver = Driver(config, [randn(2, 8)])
    driver.attach(0, randn(6, 2, 4, 8), randn(6, 2, 3, 8))
    before = driver.store.stats()
    driver.feed([tuple(randn(2, 5, 8) for _ in range(3))])
    assert driver.attention.lookups.done == 0 and driver.attention.lookups.skipped == 10
    after = driver.store.stats()
    assert after["index"] == before["index"] and after["tiers"] == before["tiers"]
    driver.attention.settings = replace(config.lookup, cmt_cutoff=0.0)
    driver.feed([tuple(randn(2, 5, 8) for _ in range(3))])
    assert driver.attention.lookups.done == 10
    assert driver.store.stats()["index"]["rows"] == before["index"]["rows"] + 10
    assert driver.store.stats()["tiers"]["host"]["hits"] > before["tiers"]["host"]["hits"]


# the others share among tokens
@pytest.mark.parametrize("granularity", ["per_token_per_head", "per_token"])
def test_one_token_at_a_time_reads_for_its_open_heads_what_it_reads_in_a_chunk(
    granularity: str,
) -> None:
    config = one_layer(num_heads=4, top_k=2, cmt_cutoff=0.2, granularity=granularity)
    randn = Random(5)
    k_cmt, memory = randn(2, 8), (randn(6, 2, 4, 8), randn(6, 2, 3, 8))
    rows = [randn(h, 16, 8) for h in (4, 2, 2)]
    outputs, reads, opened = [], [], set()
    for step in (16, 1):
        driver = Driver(config, [k_cmt])
        driver.attention.read_all_rows = True
        driver.attach(0, *memory)
        pieces = []
        for at in range(0, 16, step):
            pieces += driver.feed([tuple(x[:, at : at + step] for x in rows)])
            opened.add(driver.attention.lookups.done)
        outputs.append(torch.cat(pieces, 1))
        reads.append(sorted((unit.head, unit.block, round(mass, 9)) for unit, mass in driver.reads))
    assert {b - a for a, b in pairwise(sorted(opened))} >= {1, 2, 3}, (
        "tokens with some of the heads open"
    )
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-11)
    assert reads[1] == reads[0] and reads[0]


def test_reads_account_for_all_the_memory_mass_of_the_last_row() -> None:
    randn = Random(3)
    driver = Driver(one_layer(cmt_cutoff=0.0), [randn(2, 8)])
    driver.attach(0, randn(9, 2, 4, 8), randn(9, 2, 3, 8))
    q, own_k = randn(2, 5, 8), randn(2, 5, 8)
    driver.feed([(q, own_k, torch.zeros(2, 5, 8, dtype=torch.float64))])
    local_mass = mass_on_the_chunk(driver, q, own_k)
    for head in range(2):
        assert sum(mass for unit, mass in driver.reads if unit.head == head) == pytest.approx(
            1 - local_mass[head], abs=1e-12
        )


def mass_on_the_chunk(driver: Driver, q: Tensor, k: Tensor) -> list[float]:
    """Mass that the last row of each head leaves on the chunk: its output where every value of the
    chunk is one.
    """
    positions = torch.arange(5)
    keys = driver.rope(k, positions)[None]
    local = api.local_attention(
        driver.rope(q, positions)[None] * 8**-0.5,
        keys,
        torch.ones_like(keys),
        3,
        k_cmt=driver.attention.cmt_keys[0],
    )
    return local.output[0, :, -1, 0].tolist()
