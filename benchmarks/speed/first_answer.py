"""How long from opening a memory on disk to the first answer token, against reading the text again?

The question has 16 tokens. Cold: the file's pages are dropped from the page cache first; warm: they
are there. Reading again means the fastest forward that stores nothing. Candidates: a session that
keeps only its latest blocks (chunks of several sizes), and windows of 8 and 12 blocks in batches
that attend to nothing outside themselves, each in float32 and, where the CPU is faster at it,
bfloat16; a short stretch finds the fastest. Text is tokens already on that side; the model is
loaded on both. Medians.

    python -m benchmarks.speed.first_answer --text books-test.jsonl.zst
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.memories import drop_cache, fill_cache, kept_memory, long_text
from benchmarks.common.options import add_memory_tokens, load, parser
from benchmarks.common.results import write_part
from benchmarks.common.tables import table, tokens_text
from benchmarks.common.timing import interleaved, timed
from benchmarks.speed.forwards import forwards
from memstore import LandmarkModel, MemoryStore

QUESTION = 16  # tokens


def first_token(model: LandmarkModel, memory: Path, question: list[int], *, cold: bool) -> float:
    """Seconds from opening the memory to the first answer token."""
    (drop_cache if cold else fill_cache)(memory)
    began = time.perf_counter()
    with (
        MemoryStore.open(memory, model.signature, read_only=True) as store,
        model.session(store, ["book"]) as session,
    ):
        state = session.feed(question)[-1]
        next(session.generate(state, 1))
        return time.perf_counter() - began


def main() -> None:
    arguments = parser(__doc__)
    add_memory_tokens(arguments, repeats=9)
    options = arguments.parse_args()
    model = load(options)
    with long_text(options, model) as (directory, _, text):
        found = measure(model, kept_memory(model, directory, text, options), text, options)
    print(f"first answer token from {tokens_text(len(text))} tokens on disk\n")
    again = f"reading again ({found['fastest_forward']})"
    lines = [
        f"{kind} | {1000 * at['seconds']:.0f} ms | {at['times_faster']:.0f}x faster"
        for kind, at in ((kind, found[kind]) for kind in ("cold", "warm"))
    ]
    lines.append(f"{again} | {found['read_again_seconds']:.1f} s | ")
    print(table(["", "time", "than reading again"], lines))
    write_part(options, "first", found)


def measure(
    model: LandmarkModel, memory: Path, text: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    ways = forwards(model)
    trial = text[: min(len(text), 16 * 1024)]
    rates = {}
    for name, way in ways.items():
        way(trial[:2048])
        rates[name] = len(trial) / min(timed(partial(way, trial))[0] for _ in range(2))
    best = max(rates, key=lambda name: rates[name])
    question = model.tokenizer.encode(
        " What is the name of the old man who lives in the house near the river? It is"
    )
    question = question[-QUESTION:]
    first_token(model, memory, question, cold=False)  # warm up
    runs: dict[str, Callable[[int], float]] = {
        "cold": lambda _: first_token(model, memory, question, cold=True),
        "warm": lambda _: first_token(model, memory, question, cold=False),
    }
    measured = interleaved(runs, options.repeats)
    reading = [timed(lambda: ways[best](text))[0] for _ in range(2)]
    again = statistics.median(reading)
    medians = {name: statistics.median(values) for name, values in measured.items()}
    return {
        "forward_tokens_per_second": rates,
        "fastest_forward": best,
        "read_again_seconds": again,
        **{
            name: {"seconds": median, "times_faster": again / median}
            for name, median in medians.items()
        },
        "measured": measured | {"reading": reading},
    }


if __name__ == "__main__":
    main()
