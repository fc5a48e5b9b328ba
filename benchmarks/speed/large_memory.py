"""The memory of a large model: what it takes, where it lies, and how it is filled."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.speed.large_model import GIB, PROMPT, available
from memstore.block import BlockKey
from memstore.disk.format.codec import get_codec
from memstore.disk.format.signature import Signature
from memstore.kernels.launch import next_power
from memstore.model.landmark.config import ModelConfig
from memstore.store.memory_store import MemoryStore
from memstore.tiers.raw_bits import raw_view, torch_dtype

DOCUMENT = 1  # of the source


class Pool:
    """A source of units below the host tier: block b is unit b mod P of a pool, held as the codec
    int8 stores units.
    """

    def __init__(self, signature: Signature, units: int, seed: int) -> None:
        self._codec, self._dtype, self._size = (
            get_codec("int8"),
            signature.kv_dtype,
            signature.block_size,
        )
        generator = torch.Generator().manual_seed(seed)
        shape = (2, signature.block_size, signature.head_dim)
        self._payloads: list[bytes] = []
        while len(self._payloads) < units:
            some = torch.randn(min(512, units - len(self._payloads)), *shape, generator=generator)
            bits = raw_view(some.to(torch_dtype(self._dtype)))
            encoded = self._codec.encode(bits, self._dtype)
            self._payloads += [bytes(payload) for payload in encoded]

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        """See memstore.tiers.lease.UnitSource."""
        raw = raw_view(slab)
        for unit, slot in zip(units, slots, strict=True):
            payload = self._payloads[unit.block % len(self._payloads)]
            self._codec.decode(payload, raw[slot, 0], raw[slot, 1], self._dtype, self._size)
        return [self._size] * len(units)


@dataclass(frozen=True)
class Plan:
    """What the memory of a shape takes, in bytes, and where it lies."""

    blocks: int
    units: int
    unit_bytes: int
    own_units: int  # room for a session's own blocks
    # units that all blocks share, because theirs do not fit the main memory; 0 where they do
    pool: int
    host_budget: int
    device_budget: int

    @classmethod
    def of(cls, config: ModelConfig, options: argparse.Namespace) -> "Plan":
        blocks = -(-options.tokens // config.block_size)
        units = blocks * len(config.memory_layers or ()) * config.num_kv_heads
        unit_bytes = 2 * config.block_size * config.head_dim * torch_dtype(config.kv_dtype).itemsize
        own = 2 * (config.chunk_blocks + config.top_k) * config.num_layers * config.num_kv_heads
        whole = (units + own) * unit_bytes
        # torch rounds page-locked memory up
        locked = next_power(whole) if options.device.type == "cuda" else whole
        pooled = options.units == "pool" or (
            options.units == "auto" and locked > 0.7 * available(torch.device("cpu"))
        )
        up = (
            min(16 * GIB, units * unit_bytes // 4)
            if options.device_gib is None
            else int(options.device_gib * GIB)
        )
        least = config.top_k * config.num_heads * PROMPT * unit_bytes
        pool, host = (
            (min(options.pool, blocks), int(options.host_gib * GIB)) if pooled else (0, whole)
        )
        return cls(blocks, units, unit_bytes, own, pool, host, max(up, least))

    def __str__(self) -> str:
        where = "each lies in the host tier for itself"
        if self.pool:
            where = (
                f"THEIR CONTENT REPEATS: blocks share {self.pool:,} int8 units below a host tier "
                "of "
                f"{self.host_budget / 1e9:.2f} GB; addresses, bytes moved and decoding are those "
                "of the whole memory"
            )
        return (
            f"memory: {self.blocks:,} blocks, {self.units:,} units of {self.unit_bytes:,} bytes, "
            f"{self.units * self.unit_bytes / 1e9:.2f} GB; {where}; the device tier has "
            f"{self.device_budget / 1e9:.2f} GB; cutoff 0, every row looks up"
        )


def signature_of(config: ModelConfig) -> Signature:
    """Of a model that has no weights worth a hash and no tokenizer."""
    return Signature(
        weights="random",
        tokenizer="none",
        architecture={},
        kv_dtype=config.kv_dtype,
        num_layers=config.num_layers,
        memory_layers=tuple(config.memory_layers or ()),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=config.block_size,
    )


def fill(
    store: MemoryStore, config: ModelConfig, plan: Plan, device: torch.device, seed: int
) -> tuple[int, int]:
    """Random landmark keys of every block into the index, and the units into the host tier unless a
    pool has them.

    Returns the (document, blocks) to attach.
    """
    generator, dtype = torch.Generator(device).manual_seed(seed), torch_dtype(config.kv_dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    scratch = None if plan.pool else store.retrieval.session_document()
    for layer in config.memory_layers or ():
        if scratch is None:
            store.retrieval.add_landmarks(
                DOCUMENT, layer, draw(plan.blocks, config.num_kv_heads, config.head_dim)
            )
            continue
        for first in range(0, plan.blocks, 512):
            shape = (
                min(512, plan.blocks - first),
                config.num_kv_heads,
                config.block_size,
                config.head_dim,
            )
            scratch.add(layer, draw(*shape).cpu(), draw(*shape).cpu(), draw(*shape[:2], shape[3]))
    return DOCUMENT if scratch is None else scratch.document, plan.blocks
