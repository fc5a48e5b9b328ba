"""How much faster are several answers generated together than one after the other?

Sessions of one model, each asked with words of its own from the text, with one document of the same
text in memory. A round is a token for each of them: read in one pass through the layers, or session
by session. Medians of rounds taken in turns; the ratio is the median over repeats of the ratio
within a repeat.

    python -m benchmarks.speed.together --text books-test.jsonl.zst --sessions 1 2 4 8
    python -m benchmarks.speed.together --text books-test.jsonl.zst --model smollm2/
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.options import add, parser, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import spread, table
from benchmarks.common.timing import interleaved, paired_ratio, timed
from memstore import MemoryStore
from memstore.hf.models_by_name import reader_named
from memstore.model.landmark import SHIPPED_NAME
from memstore.model.model_api import ModelAPI
from memstore.model.session import read_pending
from memstore.model.source_text import Text
from memstore.training.corpus import read_documents

PROMPT = 32  # tokens of a question
BEGUN = 4  # tokens of an answer before it is timed


def measure(
    reader: ModelAPI, store: MemoryStore, questions: Sequence[str], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens a second of all sessions, together and one by one, of every repeat."""

    def rate(together: bool, repeat: int) -> float:
        with ExitStack() as held:
            answers = []
            for question in questions:
                session: Any = held.enter_context(reader.session(store, caution=0.0))
                state = session.ask(question, lambda: None)
                answers.append(session.generate(state, sys.maxsize, temperature=0.8, seed=repeat))

            def tokens(count: int) -> None:
                for _ in range(count):
                    if together:
                        read_pending(answers)
                    for answer in answers:
                        next(answer)

            tokens(BEGUN)
            seconds, _ = timed(lambda: tokens(options.tokens))
        return len(questions) * options.tokens / seconds

    runs = {"together": partial(rate, True), "one by one": partial(rate, False)}
    for run in runs.values():
        run(options.repeats)  # warm up
    return interleaved(runs, options.repeats)


def main() -> None:
    arguments = parser(__doc__)
    add(arguments, "--sessions", [1, 2, 4, 8], "answers at once")
    add(arguments, "--tokens", 32, "of each answer, in every repeat")
    add(arguments, "--memory-tokens", 4096, "of the document in memory")
    add(arguments, "--repeats", 5)
    options = arguments.parse_args()
    prepare(options.threads)
    reader = reader_named(options.model or SHIPPED_NAME)
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
                questions = [
                    reader.tokenizer.decode(rest[place : place + PROMPT]) for place in places
                ]
                measured = measure(reader, store, questions, options)
                ratio = paired_ratio(measured["together"], measured["one by one"])
                found[str(count)] = {"measured": measured, "ratio": ratio}
                rates = [f"{statistics.median(values):,.1f}" for values in measured.values()]
                rows.append([str(count), *rates, spread(ratio)])
    print(table(["answers at once: tokens a second", *measured, "ratio"], rows))
    write(options, {"by_sessions": found})


if __name__ == "__main__":
    main()
