"""What each way of storing blocks costs and saves: size, speed, what attention makes of it, and
what is still found.

size       bytes a token of book text ingested with each codec, records and their headers, and the
ratio to raw. speed      MB of keys and values (as they are in main memory) a second: encoded a
layer of a chunk at a time, as an
           ingest does, and decoded from records head by head, as reading does; microseconds a unit
           (one block of one KV head) likewise. Median of interleaved repeats after a warm-up.
attention  a session reads book text over a lossless memory of another place in the books; for every
lookup that it
           makes, memory attention is computed in float64 once from the blocks as they are and once
           from what the codec makes of them. Relative error: root of the summed squares over all
           rows; median and 99th percentile of single rows. The blocks chosen, their landmark scores
           and the gate are those of the lossless memory.
recall     one fact, a number in the plain form, hidden in book text (see needles.py) that is
ingested with the codec
           and asked for in another process; how many answers are right, and how many are the
           lossless memory's. What zstd stores behind int8 or int4 reads back as they do, so that
           those rows are measured once.

    python benchmarks/codecs.py --text books-test.jsonl.zst --out results/codecs.json
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import common
import needles
import numpy as np
import torch
from common import Books, interleaved, table, timed, tokens_number, tokens_text, wilson
from torch import Tensor

from memstore import LandmarkModel, MemoryStore
from memstore.disk.codec import CODECS
from memstore.disk.record import (
    decode_heads,
    decode_record,
    encode_record,
    encode_records,
    raw_view,
)
from memstore.kernels import api
from memstore.kernels import reference_memory_attention as reference
from memstore.kernels.types import LocalAttention
from memstore.tiers.disk import DiskTier

TASK = "fact"


def main() -> None:
    options = read_options()
    model = common.load(options)
    with tempfile.TemporaryDirectory(prefix="memstore-codecs-") as temporary:
        directory = options.work or Path(temporary)
        books = Books.read(options.text, model.tokenizer, directory / "tokens")
        rows: dict[str, dict[str, Any]] = {codec: {} for codec in options.codecs}
        for codec, row in rows.items():
            row |= ingest(model, books, directory / f"size {codec}", codec, options)
            row["ratio"] = row["bytes_a_token"] / rows["raw"]["bytes_a_token"]
            print(f"  {codec}: {row['bytes_a_token']:.0f} bytes a token", flush=True)
        with MemoryStore.open(directory / "size raw", model.signature, read_only=True) as store:
            for part in (speed, attention):
                for codec, found in part(model, store, books, options).items():
                    rows[codec] |= found
        answers: dict[str, list[needles.Reply]] = {}
        for codec in options.codecs if options.trials else []:
            plain = values_of(codec)
            if plain not in answers:
                answers[plain] = recall(directory, plain, options)
            rows[codec] |= {
                "trials": len(answers[plain]),
                "right": sum(reply.right for reply in answers[plain]),
                "same": sum(
                    a.text == b.text for a, b in zip(answers[plain], answers["raw"], strict=True)
                ),
            }
    print("\n" + report(rows, options))
    common.write_results(options, model, {"rows": rows})


def read_options() -> argparse.Namespace:
    options = common.parser(__doc__)
    options.add_argument(
        "--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="raw is always measured"
    )
    options.add_argument(
        "--tokens", default="16K", help="tokens ingested with every codec, for size and speed"
    )
    options.add_argument("--queries", default="1K", help="tokens that attend to that memory")
    options.add_argument("--repeats", type=int, default=15, help="of every speed")
    options.add_argument("--trials", type=int, default=200, help="facts asked for; 0: none")
    options.add_argument("--length", default="8K", help="tokens of memory that a fact is among")
    options.add_argument(
        "--passage", type=int, default=512, help="tokens of the passage around a fact"
    )
    given = options.parse_args()
    given.codecs = [codec for codec in CODECS if codec == "raw" or codec in given.codecs]
    for name in ("tokens", "queries", "length"):
        setattr(given, name, tokens_number(getattr(given, name)))
    return given


def values_of(codec: str) -> str:
    """The codec without compression that gives the same values back."""
    return "raw" if CODECS[codec].lossless else codec.removesuffix("+zstd")


# size


def ingest(
    model: LandmarkModel, books: Books, memory: Path, codec: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Ingest the same text with a codec."""
    text = model.tokenizer.decode(
        books.run(Random(f"codecs {options.seed}"), options.tokens).tolist()
    )
    shutil.rmtree(memory, ignore_errors=True)
    with MemoryStore.create(memory, model.signature, codec=codec) as store:
        seconds, document = timed(lambda: model.ingest(text, store, name="book"))
        return {
            "bytes_a_token": document.bytes / document.tokens,
            "ingest_tokens_a_second": document.tokens / seconds,
        }


# speed


class Run(NamedTuple):
    """A layer of a chunk, as it is handed to the writer: K and V [n, Hkv, block_size, D]."""

    k: Tensor
    v: Tensor


def runs_of(model: LandmarkModel, store: MemoryStore) -> list[Run]:
    """All full chunks of the memory's document, layer by layer."""
    disk, document, size = store.tiers.disk, store.document("book"), model.config.chunk_blocks
    assert isinstance(disk, DiskTier)
    runs = []
    with disk.database.read() as txn:
        for first in range(0, document.blocks - size, size):
            for layer in model.signature.memory_layers:
                blocks = [
                    disk.read_block(txn, document.id, block, layer)
                    for block in range(first, first + size)
                ]
                runs.append(
                    Run(
                        torch.stack([k for k, _, _ in blocks]),
                        torch.stack([v for _, v, _ in blocks]),
                    )
                )
    return runs


def speed(
    model: LandmarkModel, store: MemoryStore, books: Books, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Seconds a pass over all runs, encoding and decoding."""
    runs, dtype = runs_of(model, store), model.signature.kv_dtype
    full = model.signature.block_size
    shape = tuple(runs[0].k.shape[1:])
    slab_k, slab_v = (
        torch.empty(shape, dtype=runs[0].k.dtype),
        torch.empty(shape, dtype=runs[0].k.dtype),
    )
    out_k, out_v = list(raw_view(slab_k)), list(raw_view(slab_v))

    def encode(codec: str) -> list[bytes]:
        return [
            record
            for run in runs
            for record in encode_records(0, 0, 0, run.k, run.v, full, codec, dtype)
        ]

    def decode(records: list[bytes]) -> None:
        for record, block in zip(records, cycle(range(len(runs[0].k)))):
            for head in range(shape[0]):
                outs = [out_k[head]], [out_v[head]]
                decode_heads(record, 0, block, 0, [head], *outs, shape=shape, dtype=dtype)

    measured: dict[str, dict[str, Any]] = {}
    timings: dict[str, Callable[[int], float]] = {}
    for codec in options.codecs:
        records = encode(codec)
        decode(records)
        timings[f"encode {codec}"] = lambda repeat, codec=codec: timed(partial(encode, codec))[0]
        timings[f"decode {codec}"] = lambda repeat, records=records: timed(
            partial(decode, records)
        )[0]
    seconds = interleaved(timings, options.repeats)
    units = sum(run.k.shape[0] * run.k.shape[1] for run in runs)
    megabytes = sum(run.k.nbytes + run.v.nbytes for run in runs) / 1e6
    for codec in options.codecs:
        measured[codec] = {"units": units}
        for way in ("encode", "decode"):
            median = statistics.median(seconds[f"{way} {codec}"])
            measured[codec] |= {
                f"{way}_mb_s": megabytes / median,
                f"{way}_us_a_unit": median / units * 1e6,
            }
    return measured


# attention


class Call(NamedTuple):
    """One memory attention of a session, its slots renumbered to the units it read."""

    q: Tensor
    keys: Tensor  # [U, block_size, D]
    values: Tensor
    lengths: Tensor  # [U]
    slots: Tensor
    rotations: Tensor
    landmark_scores: Tensor

    def output(self, keys: Tensor, values: Tensor) -> Tensor:
        """What the memory contributes [H, T, D] if its share of every row is 1, in float64."""
        q = self.q.double()
        nothing = LocalAttention(
            torch.zeros_like(q[0]), torch.ones_like(q[0, ..., 0]), torch.zeros_like(q[0, ..., 0])
        )
        scores = self.landmark_scores.double()
        out, _ = reference.memory_attention(
            q,
            keys.double(),
            values.double(),
            self.lengths,
            self.slots,
            self.rotations,
            scores,
            nothing,
            gated=True,
        )
        return out[0]


@contextmanager
def recording() -> Iterator[list[Call]]:
    """The memory attentions computed meanwhile."""
    calls: list[Call] = []
    compute = api.memory_attention

    def record(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        slots: Tensor,
        rotations: Tensor,
        scores: Tensor,
        local: LocalAttention,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        units, inverse = slots.unique(return_inverse=True)
        absent = int(units[0] < 0)
        taken = units[absent:]
        read = keys[taken], values[taken], lengths[taken], inverse - absent
        calls.append(Call(q.clone(), *read, rotations.clone(), scores.clone()))
        return compute(q, keys, values, lengths, slots, rotations, scores, local, **more)

    api.memory_attention = record
    try:
        yield calls
    finally:
        api.memory_attention = compute


def attention(
    model: LandmarkModel, store: MemoryStore, books: Books, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Errors of memory attention, over the lookups of a session that reads another place of the
    books.
    """
    ids = books.place(Random(f"codecs queries {options.seed}"), options.queries).tolist()
    with recording() as calls, model.session(store, ["book"]) as session:
        session.feed(ids)
    calls = [call for call in calls if len(call.keys)]
    dtype = model.signature.kv_dtype

    def stored(call: Call, codec: str) -> tuple[Tensor, Tensor]:
        keys, values = torch.empty_like(call.keys), torch.empty_like(call.values)
        shape = (1, *call.keys.shape[1:])
        for unit, length in enumerate(call.lengths.tolist()):
            one = slice(unit, unit + 1)
            record = encode_record(0, 0, 0, call.keys[one], call.values[one], length, codec, dtype)
            keys[one], values[one], _ = decode_record(record, 0, 0, 0, shape=shape, dtype=dtype)
        return keys, values

    wanted = [call.output(call.keys, call.values) for call in calls]
    found = {}
    for codec in options.codecs:
        squares, total, ratios = 0.0, 0.0, []
        for call, want in zip(calls, wanted):
            error = (call.output(*stored(call, codec)) - want).norm(dim=-1)
            size = want.norm(dim=-1)
            squares, total = squares + float((error**2).sum()), total + float((size**2).sum())
            ratios.append((error / size)[size > 0].numpy())
        every = np.concatenate(ratios)
        found[codec] = {
            "attention_error": (squares / total) ** 0.5,
            "attention_error_median": float(np.median(every)),
            "attention_error_p99": float(np.quantile(every, 0.99)),
            "attention_rows": len(every),
        }
        print(
            f"  {codec}: relative error of attention {found[codec]['attention_error']:.4f}",
            flush=True,
        )
    return found


# recall


def recall(directory: Path, codec: str, options: argparse.Namespace) -> list[needles.Reply]:
    """Build a memory of facts with a codec, and ask it in a process that has read none of the
    text.
    """
    place = directory / f"recall {codec}"
    shutil.copytree(directory / "tokens", place / "tokens", dirs_exist_ok=True)
    settings = {
        "model": options.model,
        "text": options.text,
        "seed": options.seed,
        "trials": options.trials,
        "tasks": [TASK],
        "longest": options.length,
        "in_place": 0,
        "in_place_length": 0,
        "split": "held_out",
        "passage": options.passage,
        "threads": options.threads,
        "codec": codec,
    }
    common.in_fresh_process(needles.build, place, settings)
    return common.in_fresh_process(ask_all, place, options)


def ask_all(place: Path, options: argparse.Namespace) -> list[needles.Reply]:
    """The answers to every question, decoded greedily; the same documents in the same order
    whatever the codec.
    """
    model = common.load(options)
    plan = needles.Plan.load(place)
    assert plan is not None
    replies = []
    with MemoryStore.open(place / "memory", model.signature, read_only=True) as store:
        for n, question in enumerate(plan.of(TASK)[: options.trials]):
            documents = plan.documents(
                question, options.length, Random(f"{options.seed} {TASK} {n}")
            )
            assert documents is not None
            with model.session(store, documents) as session:
                replies.append(needles.reply(model, session, question, generate=True))
    return replies


def report(rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    head = [
        "codec",
        "bytes a token",
        "of raw",
        "encode MB/s",
        "decode MB/s",
        "decode us a unit",
        "attention error",
        "median row",
        "99% of rows below",
    ]
    if options.trials:
        head += [f"one fact at {tokens_text(options.length)}", "answers as lossless"]
    lines = []
    for codec, row in rows.items():
        line = [
            codec,
            f"{row['bytes_a_token']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['encode_mb_s']:.0f}",
            f"{row['decode_mb_s']:.0f}",
            f"{row['decode_us_a_unit']:.1f}",
            *(
                f"{row[name]:.4f}"
                for name in ("attention_error", "attention_error_median", "attention_error_p99")
            ),
        ]
        if options.trials:
            low, high = wilson(row["right"], row["trials"])
            line += [
                f"{row['right'] / row['trials']:.3f} ({low:.3f}-{high:.3f})",
                f"{row['same']} of {row['trials']}",
            ]
        lines.append(line)
    return table(head, lines)


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
