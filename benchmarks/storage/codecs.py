"""What does each way of storing blocks cost and save, and what is still found?

size       Bytes a token of book text ingested with each codec, records and their headers, and the
           ratio to raw.
speed      MB of keys and values (as they are in main memory) a second: encoded a layer of a chunk
           at a time, as an ingest does, and decoded from records head by head, as reading does;
           microseconds a unit (one block of one KV head) likewise. Median of interleaved repeats
           after a warm-up.
attention  A session reads book text over a lossless memory of another place in the books; for every
           lookup that it makes, memory attention is computed in float64 once from the blocks as
           they are and once from what the codec makes of them. Relative error: root of the summed
           squares over all rows; median and 99th percentile of single rows. The blocks chosen,
           their landmark scores and the gate are those of the lossless memory.
recall     One fact, a number in the plain form, hidden in book text (see common/needles.py) that is
           ingested with the codec and asked for in another process; how many answers are right, and
           how many are the lossless memory's. Lossless codecs are asked once.

    python -m benchmarks.storage.codecs --text books-test.jsonl.zst
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.memories import workplace
from benchmarks.common.needle_memory import Reply, build, build_settings, reply
from benchmarks.common.needles import Plan
from benchmarks.common.options import add, load, parser
from benchmarks.common.results import write_results
from benchmarks.common.tables import rate, table, tokens_number, tokens_text
from benchmarks.common.text import Books
from benchmarks.common.timing import in_fresh_process, interleaved, timed
from benchmarks.storage.codec_errors import attention
from memstore import LandmarkModel, MemoryStore
from memstore.block import RecordKey
from memstore.disk.format.codec import CODECS
from memstore.disk.tables.block_table import BlockTable
from memstore.disk.tables.catalog import Catalog

TASK = "fact"


def main() -> None:
    options = read_options()
    model = load(options)
    with workplace(options) as directory:
        books = Books.read(options.text, model.tokenizer, directory / "tokens")
        rows: dict[str, dict[str, Any]] = {codec: {} for codec in options.codecs}
        for codec, row in rows.items():
            row |= ingest(model, books, directory / f"size {codec}", codec, options)
            row["ratio"] = row["bytes_a_token"] / rows["raw"]["bytes_a_token"]
            print(f"  {codec}: {row['bytes_a_token']:.0f} bytes a token", flush=True)
        with MemoryStore.open(directory / "size raw", model.signature, read_only=True) as store:
            errors = attention(model, store, books, options)
        speeds = speed(model, directory / "size raw", options)
        for codec, row in rows.items():
            row |= speeds[codec] | errors[codec]
        answers: dict[str, list[Reply]] = {}
        for codec in options.codecs if options.trials else []:
            plain = "raw" if CODECS[codec].lossless else codec
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
    write_results(options, model, {"rows": rows})


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="raw is always measured"
    )
    add(options, "--tokens", "16K", "tokens ingested with every codec, for size and speed")
    add(options, "--queries", "1K", "tokens that attend to that memory")
    add(options, "--repeats", 15, "of every speed")
    add(options, "--trials", 200, "facts asked for; 0: none")
    add(options, "--length", "8K", "tokens of memory that a fact is among")
    add(options, "--passage", 512, "tokens of the passage around a fact")
    given = options.parse_args()
    given.codecs = [codec for codec in CODECS if codec == "raw" or codec in given.codecs]
    for name in ("tokens", "queries", "length"):
        setattr(given, name, tokens_number(getattr(given, name)))
    return given


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


class Run(NamedTuple):
    """A layer of a chunk, as it is handed to the writer: raw bits of K and V [n, Hkv, block_size,
    D].
    """

    k: np.ndarray
    v: np.ndarray


def runs_of(memory: Path, size: int) -> list[Run]:
    """All full chunks of `size` blocks of a memory's document, layer by layer."""
    runs, catalog = [], Catalog.open(memory, read_only=True)
    with closing(catalog), catalog.database.read() as txn:
        document = catalog.document(txn, "book")
        for first in range(0, document.blocks - size, size):
            for layer in catalog.signature.memory_layers:
                keys = [
                    RecordKey(document.id, block, layer) for block in range(first, first + size)
                ]
                read = [catalog.blocks.get(txn, key, document.write_of(key.block)) for key in keys]
                runs.append(
                    Run(np.stack([k for k, _, _ in read]), np.stack([v for _, v, _ in read]))
                )
    return runs


def speed(
    model: LandmarkModel, memory: Path, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Seconds a pass over all runs, encoding and decoding."""
    runs, full = runs_of(memory, model.config.chunk_blocks), model.signature.block_size
    tables = {codec: BlockTable(model.signature, codec) for codec in options.codecs}
    key, write = RecordKey(1, 0, 0), bytes(16)

    def encode(codec: str) -> list[bytes]:
        encoded = (
            tables[codec].encode(key, run.k, run.v, [full] * len(run.k), write) for run in runs
        )
        return [record for records in encoded for record in records]

    def decode(records: list[bytes]) -> None:
        for record, block in zip(records, cycle(range(len(runs[0].k)))):
            table_of.decode(record, RecordKey(1, block, 0), write)

    def seconds_of(work: Callable[[], object], _: int) -> float:
        return timed(work)[0]

    table_of = tables["raw"]  # records say how they are encoded
    measured: dict[str, dict[str, Any]] = {}
    timings: dict[str, Callable[[int], float]] = {}
    for codec in options.codecs:
        records = encode(codec)
        decode(records)
        timings[f"encode {codec}"] = partial(seconds_of, partial(encode, codec))
        timings[f"decode {codec}"] = partial(seconds_of, partial(decode, records))
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


def recall(directory: Path, codec: str, options: argparse.Namespace) -> list[Reply]:
    """Build a memory of facts with a codec, and ask it in a process that has read none of the
    text.
    """
    place = directory / f"recall {codec}"
    shutil.copytree(directory / "tokens", place / "tokens", dirs_exist_ok=True)
    more = {"passage": options.passage, "codec": codec}
    settings = build_settings(options, [TASK], options.length, **more)
    in_fresh_process(build, place, settings)
    return in_fresh_process(ask_all, place, options)


def ask_all(place: Path, options: argparse.Namespace) -> list[Reply]:
    """The answers to every question, decoded greedily; the same documents in the same order
    whatever the codec.
    """
    model = load(options)
    plan = Plan.load(place)
    assert plan is not None
    replies = []
    with MemoryStore.open(place / "memory", model.signature, read_only=True) as store:
        for n, question in enumerate(plan.of(TASK)[: options.trials]):
            documents = plan.documents(
                question, options.length, Random(f"{options.seed} {TASK} {n}")
            )
            assert documents is not None
            with model.session(store, documents) as session:
                replies.append(reply(model, session, question, generate=True))
    return replies


def report(rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    head = (
        "codec | bytes a token | of raw | encode MB/s | decode MB/s | decode us a unit | "
        "attention error | median row | 99% of rows below"
    )
    if options.trials:
        head += f" | one fact at {tokens_text(options.length)} | answers as lossless"
    lines = []
    for codec, row in rows.items():
        line = (
            f"{codec} | {row['bytes_a_token']:.0f} | {row['ratio']:.2f} | "
            f"{row['encode_mb_s']:.0f} | {row['decode_mb_s']:.0f} | "
            f"{row['decode_us_a_unit']:.1f} | {row['attention_error']:.4f} | "
            f"{row['attention_error_median']:.4f} | {row['attention_error_p99']:.4f}"
        )
        if options.trials:
            found = rate(row["right"], row["trials"])
            line += f" | {found} | {row['same']} of {row['trials']}"
        lines.append(line)
    return table(head, lines)


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
