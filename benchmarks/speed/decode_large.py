"""What does a decoding step of a large model cost with a long memory, without, and attending fully?

The model has random weights of a named shape, and every token is fed, not sampled: only time and
bytes are measured. Random weights make the gate arbitrary, so the cutoff is 0 and every row of
every memory layer looks up. What is timed is a whole step, as a session takes it: through the
layers, the logits, and the choice of the next token on the host.

none     the model with its open chunk only
full     plain attention over a cache of as many tokens as the memory has, or as fit the device if
         those are fewer: scaled_dot_product_attention over keys and values that lie ready
memory   a LandmarkSession over a MemoryStore of --tokens tokens: landmark keys of every block are
         in the index on the device, and are all searched. `first` reads tokens that were not seen
         before, so units come from the tiers below; `again` reads the same tokens in a new session,
         which wants the same units and finds them in the device tier, as far as that kept them.

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

    python -m benchmarks.speed.decode_large --shape llama-7b
    python -m benchmarks.speed.decode_large --shape test --tokens 64K --device cpu
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from random import Random
from typing import Any

import torch

from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import spread, table, tokens_number
from benchmarks.common.timing import interleaved, paired_ratio
from benchmarks.speed.large_memory import Plan, Pool, fill, signature_of
from benchmarks.speed.large_model import (
    GIB,
    PROMPT,
    SHAPES,
    FullAttention,
    Steps,
    available,
    random_model,
    rates,
)
from memstore.model.landmark.config import ModelConfig
from memstore.model.landmark.transformer import Transformer
from memstore.store.memory_store import MemoryStore
from memstore.tiers.raw_bits import torch_dtype

NAMES = {"first": "memory, first", "again": "memory, again"}
SPARE = 2 * GIB  # of a CUDA device, for what a step needs


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
    moved = {"none": {}, "full": {"cache": per_token * length}} | moved_of(memory, plan, config)
    reached = {"none": PROMPT + options.steps, "full": length}
    reached |= dict.fromkeys(NAMES, options.tokens)
    measured = {"beside full": beside_full, "beside memory": beside_memory}
    return {
        "rates": rate,
        "plan": asdict(plan),
        "full attention fits": fits,
        "systems": {
            name: {
                "tokens": reached[name],
                **system(name, {"weights": weights, **size}, measured, rate),
            }
            for name, size in moved.items()
        },
        "counts": memory.counts,
        "measured": measured,
        "peak device bytes": torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else None,
    }


def moved_of(memory: Steps, plan: Plan, config: ModelConfig) -> dict[str, dict[str, float]]:
    """Bytes that a token with a memory moves beside the weights: the first time, and again."""
    found = {}
    for name in NAMES:
        counts = memory.counts[name]
        a_token = plan.unit_bytes / counts["tokens"]
        found[name] = {
            "landmark keys": plan.units * config.head_dim * 4.0,
            "units": (counts["device hits"] + counts["device misses"]) * a_token,
            "up": counts["device misses"] * a_token,
        }
    return found


def system(
    name: str,
    size: dict[str, float],
    measured: dict[str, dict[str, list[float]]],
    rate: dict[str, float],
) -> dict[str, Any]:
    """What a step takes, of the bytes that it moves, beside a step without memory and full
    attention.
    """
    full, memory = measured["beside full"], measured["beside memory"]
    seconds = {"none": full["none"] + memory["none"], "full": full["full"]} | {
        each: memory[each] for each in NAMES
    }
    taken, beside = seconds[name], full if name == "full" else memory
    return {
        "seconds": statistics.median(taken),
        "bytes": size,
        "floor": sum(
            count / rate["up" if part == "up" else "streamed"] for part, count in size.items()
        ),
        "to none": None if name == "none" else paired_ratio(taken, beside["none"]),
        "to full": statistics.median(taken) / statistics.median(seconds["full"]),
    }


def report(results: dict[str, Any]) -> str:
    """The table, and what the tiers did."""
    head = (
        "step | over tokens | ms a token | x none | x full | MB weights | MB keys or "
        "cache | MB units | MB up | floor, ms | taken / floor"
    )
    lines = []
    for name, row in results["systems"].items():
        size = {part: f"{value / 1e6:,.2f}" for part, value in row["bytes"].items()}
        ratio = "1" if row["to none"] is None else spread(row["to none"])
        lines.append(
            f"{NAMES.get(name, name)} | {row['tokens']:,} | {row['seconds'] * 1e3:.2f} | {ratio} | "
            f"{row['to full']:.3f} | {size['weights']} | "
            f"{size.get('landmark keys', size.get('cache', ''))} | {size.get('units', '')} | "
            f"{size.get('up', '')} | {row['floor'] * 1e3:.2f} | {row['seconds'] / row['floor']:.1f}"
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
    options = read_options()
    prepare(options.threads)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; try --device cpu --shape test --tokens 64K")
    on_cpu = options.device.type == "cpu"
    options.dtype = torch_dtype(options.dtype or ("float32" if on_cpu else "bfloat16"))
    results = run(options)
    print(report(results))
    name = "cpu" if on_cpu else torch.cuda.get_device_name(options.device)
    write(options, {"device": name, **results})


def read_options() -> argparse.Namespace:
    options = plain_parser(__doc__)
    add(options, "--shape", "llama-7b", choices=SHAPES)
    add(options, "--tokens", 1 << 20, "of memory: 64K, 1M ..", type=tokens_number)
    add(options, "--device", torch.device("cuda"), type=torch.device)
    add(
        options,
        "--dtype",
        None,
        "of weights (bfloat16; on a CPU float32)",
        choices=("float32", "bfloat16", "float16"),
    )
    add(options, "--units", "auto", "where units lie", choices=("auto", "host", "pool"))
    add(options, "--pool", 8192, "units of the pool")
    add(options, "--host-gib", 8, "of the host tier over a pool", type=float)
    add(
        options,
        "--device-gib",
        None,
        "of the device tier (16, and a quarter of the units at most)",
        type=float,
    )
    add(options, "--steps", 32, "tokens a repeat that are timed")
    add(options, "--repeats", 7)
    return options.parse_args()


if __name__ == "__main__":
    main()
