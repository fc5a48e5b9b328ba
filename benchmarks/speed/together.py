"""How much faster do several answers go on together than one after the other?

Sessions of one reader, each asked with words of its own from the text, with one document of the
same text in memory. A round is a token for each of them: read in one walk through the layers, or
session by session; in one walk also with each answer's sources told, as `ask_many` does, and with
every token traced, as `serve` does. Medians of rounds taken in turns; the ratio of the first two is
the median over repeats of the ratio within a repeat.

    python -m benchmarks.speed.together --text books-test.jsonl.zst --sessions 1 2 4 8
    python -m benchmarks.speed.together --text books-test.jsonl.zst --model smollm2/
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from memstore.model.answer import Collector
from memstore.model.batched_forward import read_pending
from memstore.model.landmark.checkpoint import SHIPPED_NAME
from memstore.model.model_api import ModelAPI
from memstore.model.session import Continuation, Sampler
from memstore.model.texts.source_text import Text
from memstore.serve.answering.trace import Trace
from memstore.training.corpus import read_documents

BEGUN = 4  # tokens of an answer before it is timed
Told = Collector | Trace | None
"""What is told of what is read."""


def begun(
    session: Any, told: Told, question: str, sampler: Sampler
) -> tuple[Continuation, Iterator[int]]:
    """What goes on behind a question, and behind the end of a turn; and its tokens."""
    if isinstance(told, Trace):
        told.begin(session)
    state = session.ask(question, (lambda: None) if told is None else told.start)
    going = Continuation(session, state, sys.maxsize, sampler)
    if not isinstance(told, Trace):
        return going, going
    going.around = told.step
    return going, told.tokens_of(going)


def measure(
    reader: ModelAPI, store: MemoryStore, questions: Sequence[str], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens a second of all sessions, by how they are read, of every repeat."""

    def run(ahead: bool, telling: Callable[[], Told]) -> Callable[[int], float]:
        def once(repeat: int) -> float:
            with ExitStack() as held:
                answers = []
                for question in questions:
                    told = telling()
                    session = reader.session(store, on_read=told, caution=0.0)
                    held.enter_context(session)
                    answers.append(begun(session, told, question, Sampler(0.8, seed=repeat)))
                going = [one for one, _ in answers]

                def tokens(count: int) -> None:
                    for _ in range(count):
                        if ahead:
                            read_pending(going)
                        for _, generated in answers:
                            next(generated)

                tokens(BEGUN)
                seconds, _ = timed(lambda: tokens(options.tokens))
            return len(questions) * options.tokens / seconds

        return once

    runs = {
        "together": run(True, lambda: None),
        "one by one": run(False, lambda: None),
        "together, sources told": run(True, Collector),
        "together, traced": run(True, lambda: Trace(reader)),
    }
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
