"""One decoding step of a large model with a long memory, against the same model without one, and
with full attention.

The model has random weights of a named shape, and every token is fed, not sampled: only time and
bytes are measured. Random weights make the gate arbitrary, so the cutoff is 0 and every row of
every memory layer looks up. What is timed is a whole step, as a session takes it: through the
layers, the logits, and the choice of the next token on the host.

none     the model with its open chunk only. full     plain attention over a cache of as many tokens
as the memory has, or as fit the device if those are fewer:
         scaled_dot_product_attention over keys and values that lie ready.
memory   a ScratchSession over a MemoryStore of --tokens tokens: landmark keys of every block are in
the index on the
         device, and are all searched. `first` reads tokens that were not seen before, so units come
         from the tiers below; `again` reads the same tokens in a new session, which wants the same
         units and finds them in the device tier, as far as that kept them.

Where the memory's units fit the main memory, all of them lie in the host tier. Where they do not,
they come from a source made for this benchmark below the host tier: a pool of int8 units that
blocks share (block b is pool[b mod P]), decoded at every read, by one thread. Then CONTENT REPEATS;
the addresses, the bytes moved between tiers and the decoding are those of --tokens tokens. The
output says which it was. A disk is not part of either.

The floor of a step is its bytes at measured rates: weights, landmark keys and units (or the cache)
at the best rate of a streaming sum on the device, and units that come up to the device tier at that
of one large copy. Decoding and launches are not in it. Medians over repeats that are taken in
turns; `none` is measured beside each of the others, and ratios to it are within a repeat. With
--device cpu the device tier is there too, in main memory.

    python benchmarks/decode_large.py --shape llama-7b --tokens 1M --out results/decode-large.json
    python benchmarks/decode_large.py --shape test --tokens 64K --device cpu
"""

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import common
import torch
import torch.nn.functional as F
from common import interleaved, paired_ratio, table, tokens_number
from torch import Tensor

from memstore.block import BlockKey
from memstore.disk.codec import get_codec
from memstore.disk.record import DTYPES, raw_view
from memstore.disk.signature import Signature
from memstore.kernels.launch import next_power
from memstore.model.checkpoint import SHIPPED
from memstore.model.config import PRESETS, ModelConfig
from memstore.model.landmark_model import LandmarkModel
from memstore.model.session import ScratchSession
from memstore.model.tokenizer import Tokenizer
from memstore.model.transformer import Transformer
from memstore.store.memory_store import MemoryStore

# of Touvron et al., arXiv 2302.13971, with two more ids; the output matrix is the embedding
_LLAMA = ModelConfig(
    vocab_size=32_002,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    mlp_size=11_008,
    block_size=63,
    qk_norm=False,
    norm_eps=1e-6,
)
SHAPES = {
    "llama-7b": _LLAMA,
    "llama-3.2-1b": replace(
        _LLAMA,
        vocab_size=128_258,
        num_layers=16,
        hidden_size=2048,
        num_kv_heads=8,
        head_dim=64,
        mlp_size=8192,
        rope_base=500_000.0,
        norm_eps=1e-5,
        memory_layers=None,
    ),
    "test": PRESETS["test"],
}
GIB = 1 << 30
PROMPT = 8  # tokens before the first that is timed
DOCUMENT = 1  # of the source
SPARE = 2 * GIB  # of a CUDA device, for what a step needs
NAMES = {"first": "memory, first", "again": "memory, again"}


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
            encoded = self._codec.encode(
                raw_view(some.to(DTYPES[self._dtype])), self._dtype, self._size
            )
            self._payloads += [bytes(payload) for payload in encoded]

    def read(self, units: Sequence[BlockKey], slab: Tensor, slots: Sequence[int]) -> list[int]:
        """See memstore.tiers.base.UnitSource."""
        raw = raw_view(slab)
        for unit, slot in zip(units, slots, strict=True):
            payload = self._payloads[unit.block % len(self._payloads)]
            self._codec.decode(payload, raw[slot, 0], raw[slot, 1], self._dtype, self._size)
        return [self._size] * len(units)


# The machine


def available(device: torch.device) -> int:
    """Bytes that are free on a device, or of main memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def rates(device: torch.device) -> dict[str, float]:
    """Bytes a second, at best, of a streaming sum on the device and of one large copy from main
    memory to it.
    """
    size, pinned = (GIB, True) if device.type == "cuda" else (GIB // 4, False)
    there = torch.zeros(size // 4, device=device)
    here = torch.zeros(size // 4, pin_memory=pinned)
    found = {}
    for name, work in (
        ("streamed", lambda: there.sum()),
        ("up", lambda: there.copy_(here, non_blocking=True)),
    ):
        times = []
        for _ in range(12):
            wait(device)
            began = time.perf_counter()
            work()
            wait(device)
            times.append(time.perf_counter() - began)
        found[name] = size / min(times)
    return found


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int
) -> Transformer:
    """A model that is made where it computes."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = Transformer(config)
    finally:
        torch.set_default_dtype(before)
    model.initialise(torch.Generator(device).manual_seed(seed))
    return model.requires_grad_(False).eval()


# Steps


class Steps:
    """Steps of sessions over one store, and by name of the run what their lookups found."""

    def __init__(
        self, model: Transformer, store: MemoryStore, documents: list[tuple[int, int]]
    ) -> None:
        self.model = LandmarkModel(model, Tokenizer.load(SHIPPED / "tokenizer.json"))
        self.store, self.documents = store, documents
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)

    def run(self, ids: list[int], name: str = "") -> float:
        """Seconds a token of ids behind their first PROMPT, read one by one in a new session."""
        with ScratchSession(self.model, self.model.lookup, self.store, self.documents) as session:
            session.feed(ids[:PROMPT])
            tiers, lookups = self.store.tier_stats(), session.attention.lookups.done
            wait(self.model.device)
            began = time.perf_counter()
            for token in ids[PROMPT:]:
                session.next_token(session.feed([token])[-1], 0.0, None)
            seconds = time.perf_counter() - began
            found = {
                "tokens": len(ids) - PROMPT,
                "lookups": session.attention.lookups.done - lookups,
            }
            for tier, counts in self.store.tier_stats().items():
                found |= {
                    f"{tier} {event}": int(counts[event] - tiers[tier][event])
                    for event in ("hits", "misses")
                }
            self.counts[name].update(found)
        return seconds / found["tokens"]


class FullAttention:
    """The same model over a cache of random keys and values, to which every token's are added."""

    def __init__(self, model: Transformer, tokens: int, room: int) -> None:
        config, weight = model.config, model.norm.weight
        shape = (2, 1, config.num_kv_heads, tokens + room, config.head_dim)
        self.model, self.tokens = model, tokens
        self.cache = [weight.new_empty(shape).normal_() for _ in range(config.num_layers)]
        self._read = 0

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, 1, D]; a KV head's query heads become rows, so that a key is read once for all
        of them.
        """
        config, end = self.model.config, self.tokens + self._read
        # the cache's keys are random anyway
        cos, sin = self.model.rope.angles(self._read, self._read + 1, q)
        keys, values = self.cache[layer]
        keys[:, :, end : end + 1] = self.model.rope.rotate(k, cos, sin)
        values[:, :, end : end + 1] = v
        rows = self.model.rope.rotate(q, cos, sin).view(1, config.num_kv_heads, -1, config.head_dim)
        output = F.scaled_dot_product_attention(
            rows, keys[:, :, : end + 1], values[:, :, : end + 1]
        )
        return output.reshape(q.shape)

    @torch.no_grad()
    def run(self, ids: list[int]) -> float:
        """As Steps.run."""
        device = self.model.norm.weight.device
        self._read = 0
        began = 0.0
        for n, token in enumerate(ids):
            if n == PROMPT:
                wait(device)
                began = time.perf_counter()
            hidden = self.model.hidden(torch.tensor([[token]], device=device), self._attend)
            int(self.model.logits(hidden[0])[0].argmax())
            self._read += 1
        return (time.perf_counter() - began) / len(ids[PROMPT:])


# The memory


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
        unit_bytes = 2 * config.block_size * config.head_dim * DTYPES[config.kv_dtype].itemsize
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
    generator, dtype = torch.Generator(device).manual_seed(seed), DTYPES[config.kv_dtype]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    scratch = None if plan.pool else store.scratch()
    for layer in config.memory_layers or ():
        if scratch is None:
            store.add_landmarks(
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


# Measuring


class Tokens:
    """The tokens of each repeat: never the same ones twice."""

    def __init__(self, config: ModelConfig, count: int, seed: int) -> None:
        self._most, self._count, self._seed = config.vocab_size - 2, PROMPT + count, seed

    def __call__(self, repeat: int) -> list[int]:
        rng = Random(f"tokens {self._seed} {repeat}")
        return [rng.randrange(self._most) for _ in range(self._count)]


def measure_full(
    model: Transformer, none: Steps, tokens: Tokens, length: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds a token."""
    full = FullAttention(model, length, PROMPT + options.steps)
    runs: dict[str, Callable[[int], float]] = {
        "none": lambda repeat: none.run(tokens(repeat)),
        "full": lambda repeat: full.run(tokens(repeat)),
    }
    for once in runs.values():
        once(-1)  # warm up
    return interleaved(runs, options.repeats)


def measure_memory(
    memory: Steps, none: Steps, tokens: Tokens, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds a token."""
    again = []

    def first(repeat: int) -> float:
        seconds = memory.run(tokens(repeat), "first")
        again.append(memory.run(tokens(repeat), "again"))
        return seconds

    none.run(tokens(-1)), memory.run(tokens(-1), "warming up")
    measured = interleaved(
        {"none": lambda repeat: none.run(tokens(repeat)), "first": first}, options.repeats
    )
    return measured | {"again": again}


def run(options: argparse.Namespace) -> dict[str, Any]:
    config, device = replace(SHAPES[options.shape], cmt_cutoff=0.0), options.device
    model = random_model(config, device, options.dtype, options.seed)
    weights, rate = sum(p.nbytes for p in model.parameters()), rates(device)
    plan, tokens = Plan.of(config, options), Tokens(config, options.steps, options.seed)
    print(
        f"{options.shape}: {weights / 1e9:.3f} GB of weights in {str(options.dtype)[6:]} on "
        f"{device}; "
        f"{rate['streamed'] / 1e9:,.1f} GB/s streamed, {rate['up'] / 1e9:,.1f} GB/s up\n{plan}"
    )
    signature, own_bytes = signature_of(config), plan.own_units * plan.unit_bytes
    source = Pool(signature, plan.pool, options.seed) if plan.pool else None
    with ExitStack() as stack:
        place: dict[str, Any] = {"device": str(device), "index": "packed"}
        empty = stack.enter_context(
            MemoryStore.in_memory(
                signature, host_budget=own_bytes, device_budget=own_bytes, **place
            )
        )
        none = Steps(model, empty, [])
        per_token = (
            2 * config.num_layers * config.num_kv_heads * config.head_dim * options.dtype.itemsize
        )
        free = available(device)
        spare = SPARE if device.type == "cuda" else free // 2
        fits = max(0, free - spare) // per_token
        length = min(fits, options.tokens)
        print(
            f"full attention: {free / 1e9:.1f} GB free less {spare / 1e9:.1f} GB, at {per_token:,} "
            "bytes a token: "
            f"{fits:,} tokens fit; measured at {length:,}\n",
            flush=True,
        )
        beside_full = measure_full(model, none, tokens, length, options)
        available(device)  # gives the cache back
        store = stack.enter_context(
            MemoryStore.in_memory(
                signature,
                source,
                host_budget=plan.host_budget,
                device_budget=plan.device_budget,
                **place,
            )
        )
        memory = Steps(model, store, [fill(store, config, plan, device, options.seed)])
        beside_memory = measure_memory(memory, none, tokens, options)
    landmarks = plan.units * config.head_dim * 4
    moved: dict[str, dict[str, float]] = {"none": {}, "full": {"cache": per_token * length}}
    for name in ("first", "again"):
        counts = memory.counts[name]
        a_token = plan.unit_bytes / counts["tokens"]
        asked = counts["device hits"] + counts["device misses"]
        moved[name] = {
            "landmark keys": landmarks,
            "units": asked * a_token,
            "up": counts["device misses"] * a_token,
        }
    seconds = {
        "none": beside_full["none"] + beside_memory["none"],
        "full": beside_full["full"],
        "first": beside_memory["first"],
        "again": beside_memory["again"],
    }
    reached = {
        "none": PROMPT + options.steps,
        "full": length,
        "first": options.tokens,
        "again": options.tokens,
    }
    systems = {}
    for name, taken in seconds.items():
        size = {"weights": weights, **moved[name]}
        beside = beside_full if name == "full" else beside_memory
        systems[name] = {
            "tokens": reached[name],
            "seconds": statistics.median(taken),
            "bytes": size,
            "floor": sum(
                count / rate["up" if part == "up" else "streamed"] for part, count in size.items()
            ),
            "to none": None if name == "none" else paired_ratio(taken, beside["none"]),
            "to full": statistics.median(taken) / statistics.median(seconds["full"]),
        }
    return {
        "rates": rate,
        "plan": asdict(plan),
        "full attention fits": fits,
        "systems": systems,
        "counts": memory.counts,
        "measured": {"beside full": beside_full, "beside memory": beside_memory},
        "peak device bytes": torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else None,
    }


def report(results: dict[str, Any]) -> str:
    """The table, and what the tiers did."""
    head = [
        "step",
        "over tokens",
        "ms a token",
        "x none",
        "x full",
        "MB weights",
        "MB keys or cache",
        "MB units",
        "MB up",
        "floor, ms",
        "taken / floor",
    ]
    lines = []
    for name, row in results["systems"].items():
        size, ratio = (
            {part: f"{value / 1e6:,.2f}" for part, value in row["bytes"].items()},
            row["to none"],
        )
        lines.append(
            [
                NAMES.get(name, name),
                f"{row['tokens']:,}",
                f"{row['seconds'] * 1e3:.2f}",
                "1"
                if ratio is None
                else f"{ratio['median']:.2f} ({ratio['least']:.2f}-{ratio['greatest']:.2f})",
                f"{row['to full']:.3f}",
                size["weights"],
                size.get("landmark keys", size.get("cache", "")),
                size.get("units", ""),
                size.get("up", ""),
                f"{row['floor'] * 1e3:.2f}",
                f"{row['seconds'] / row['floor']:.1f}",
            ]
        )
    told = [table(head, lines), ""]
    for name in NAMES:
        counts = results["counts"][name]
        rates_of = []
        for tier in ("device", "host"):
            asked = counts[f"{tier} hits"] + counts[f"{tier} misses"]
            share = f"{counts[f'{tier} hits'] / asked:.3f}" if asked else "none"
            rates_of.append(f"{tier} hits {share} of {asked / counts['tokens']:,.1f}")
        told.append(
            f"{NAMES[name]}, a token: {counts['lookups'] / counts['tokens']:,.1f} lookups (of a "
            "head in a "
            f"layer); units: {', '.join(rates_of)}"
        )
    return "\n".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-7b")
    parser.add_argument(
        "--tokens", type=tokens_number, default=1 << 20, help="of memory: 64K, 1M .."
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights (bfloat16; on a CPU float32)",
    )
    parser.add_argument(
        "--units", choices=("auto", "host", "pool"), default="auto", help="where units lie"
    )
    parser.add_argument("--pool", type=int, default=8192, help="units of the pool")
    parser.add_argument("--host-gib", type=float, default=8, help="of the host tier over a pool")
    parser.add_argument(
        "--device-gib",
        type=float,
        help="of the device tier (16, and a quarter of the units at most)",
    )
    parser.add_argument("--steps", type=int, default=32, help="tokens a repeat that are timed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    options = parser.parse_args()
    common.prepare(options.threads)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; try --device cpu --shape test --tokens 64K")
    options.dtype = DTYPES[
        options.dtype or ("float32" if options.device.type == "cpu" else "bfloat16")
    ]
    results = run(options)
    print(report(results))
    if options.out is not None:
        given = {
            name: str(value) if isinstance(value, (Path, torch.device, torch.dtype)) else value
            for name, value in vars(options).items()
        }
        given["out"] = options.out.name
        device = (
            torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "cpu"
        )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"options": given, "machine": common.machine(), "device": device, **results}
        options.out.write_text(json.dumps(content, indent=1))
        print(f"\nwritten: {options.out}")


if __name__ == "__main__":
    main()
