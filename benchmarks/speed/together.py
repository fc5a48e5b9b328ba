"""How much faster do several answers go on together than one after the other?

Sessions of one reader, each behind a prompt of its own from the text, with one document of the same
text in memory. A round is a token for each of them: read in one walk through the layers, or
session by session. Medians of rounds taken in turns; the ratio is the median over repeats of the
ratio within a repeat.

    python -m benchmarks.speed.together --text books-test.jsonl.zst --sessions 1 2 4 8
    python -m benchmarks.speed.together --text books-test.jsonl.zst --model smollm2/
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.generation import PROMPT
from benchmarks.common.options import add, parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import spread, table
from benchmarks.common.timing import interleaved, paired_ratio, timed
from memstore import MemoryStore
from memstore.hf.models_by_name import reader_named
from memstore.model.batched_forward import read_pending
from memstore.model.landmark.checkpoint import SHIPPED_NAME
from memstore.model.model_api import ModelAPI
from memstore.model.texts.source_text import Text
from memstore.training.corpus import read_documents

BEGUN = 4  # tokens of an answer before it is timed


def measure(
    reader: ModelAPI,
    store: MemoryStore,
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
) -> dict[str, list[float]]:
    """Tokens a second of all sessions, by how they are read, of every repeat."""

    def run(ahead: bool) -> Callable[[int], float]:
        def once(repeat: int) -> float:
            with ExitStack() as held:
                sessions = [held.enter_context(reader.session(store)) for _ in prompts]
                going = [
                    session.generate(
                        session.feed(list(prompt))[-1],
                        BEGUN + options.tokens + 1,
                        temperature=0.8,
                        seed=repeat,
                    )
                    for session, prompt in zip(sessions, prompts)
                ]

                def tokens(count: int) -> None:
                    for _ in range(count):
                        if ahead:
                            read_pending(going)
                        for one in going:
                            next(one, None)

                tokens(BEGUN)
                seconds, _ = timed(lambda: tokens(options.tokens))
            return len(prompts) * options.tokens / seconds

        return once

    runs = {"together": run(True), "one by one": run(False)}
    for once in runs.values():
        once(options.repeats)  # warm up
    return interleaved(runs, options.repeats)


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--sessions", [1, 2, 4, 8], "answers at once")
    add(arguments, "--tokens", 32, "of each answer, in every repeat")
    add(arguments, "--memory-tokens", 4096, "of the document in memory")
    add(arguments, "--repeats", 5)
    options = arguments.parse_args()
    prepare(options.threads)
    reader = reader_named(options.model or SHIPPED_NAME, own_process=True)
    rng = Random(f"together {options.seed}")
    book = next(iter(read_documents(options.text)))
    ids = reader.tokenizer.encode(book[: 8 * (options.memory_tokens + max(options.sessions) * 99)])
    held, rest = ids[: options.memory_tokens], ids[options.memory_tokens :]
    found: dict[str, Any] = {}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "memory"
        with MemoryStore.create(path, reader.signature, selector=reader.keeps) as store:
            reader.ingest(Text(reader.tokenizer.decode(held), "book"), store)
            for count in options.sessions:
                places = [rng.randrange(len(rest) - PROMPT) for _ in range(count)]
                prompts = [rest[place : place + PROMPT] for place in places]
                measured = measure(reader, store, prompts, options)
                ratio = paired_ratio(measured["together"], measured["one by one"])
                found[str(count)] = {"measured": measured, "ratio": ratio}
                rates = [f"{statistics.median(values):,.1f}" for values in measured.values()]
                rows.append([str(count), *rates, spread(ratio)])
    print(table(["answers", "together, tokens a second", "one by one", "ratio"], rows))
    write(options, {"by_sessions": found})


if __name__ == "__main__":
    main()
