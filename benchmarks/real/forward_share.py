"""How much of the time to the first token is no forward pass of the model?

A document of --length tokens is in a memory, page cache warm, and the model has answered before. Of
every question the processor's time from the typed string to the first token, and how much of it is
spent in the model's layers and head (attention to what is remembered is a layer's part): in the
pass over the question alone, by which passages are chosen, and in that behind the passages. Medians
of --repeats questions.

    python -m benchmarks.real.forward_share --text books-val.jsonl.zst --model smollm2/
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_number
from benchmarks.real.passage_model import parser, passage_model
from memstore import MemoryStore
from memstore.training.corpus import read_documents

QUESTIONS = [
    "What did the old man say about the sea?",
    "Where was the letter found by the captain?",
    "Who is the owner of the house on the hill?",
    "When did the ship leave the harbour?",
    "What was the price of the horse?",
]


class Passes:
    """Counts the processor's seconds in forward passes of a reader, by which pass it was."""

    def __init__(self, reader: Any) -> None:
        self.seconds: list[float] = []
        reader.hidden, reader.logits = self._counted(reader.hidden), self._counted(reader.logits)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*given, **named)
            finally:
                self.seconds.append(time.process_time() - began)

        return counted


def main() -> None:
    options = parser(__doc__, dtype="bfloat16")
    add(options, "--length", "32K", "tokens of the document", type=tokens_number)
    add(options, "--passages", [1, 4, 8], "that are read")
    add(options, "--repeats", 20, "questions")
    given = options.parse_args()
    prepare(given.threads)
    reader = passage_model(given.model, given.dtype)
    ids = reader.tokenizer.encode("".join(read_documents(given.text))[: 8 * given.length])
    passes = Passes(reader)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory"
        with MemoryStore.create(path, reader.signature, selector=reader.keeps) as store:
            reader.ingest(reader.tokenizer.decode(ids[: given.length]), store, name="book")
            rows = {k: asked(reader, store, passes, k, given.repeats) for k in given.passages}
    print(report(rows))
    write(given, {"rows": rows})


@torch.no_grad()
def asked(
    reader: Any, store: MemoryStore, passes: Passes, passages: int, repeats: int
) -> list[list[float]]:
    """Of every question the processor's seconds: in all, in the pass over the question alone, and
    in the rest of its passes.
    """
    rows = []
    for question in islice(cycle(QUESTIONS), repeats + len(QUESTIONS)):
        passes.seconds.clear()
        began = time.process_time()
        with reader.session(store, top_k=passages, score_range=1e9, caution=0.0) as session:
            state = session.ask(question, lambda: None)
            int(reader.logits(state[None], quantized=True).argmax())
        alone, *others = passes.seconds
        rows.append([time.process_time() - began, alone, sum(others)])
    return rows[len(QUESTIONS) :]


def report(rows: dict[int, list[list[float]]]) -> str:
    """A number of passages a line: ms, and the shares of what is no forward pass."""
    lines = []
    for passages, taken in rows.items():
        ms = [f"{1000 * statistics.median(column):.0f}" for column in zip(*taken, strict=True)]
        outside = [1000 * (whole - alone - rest) for whole, alone, rest in taken]
        shares = [(whole - alone - rest) / whole for whole, alone, rest in taken]
        lines.append(
            [passages, *ms, f"{statistics.median(outside):.1f}", f"{statistics.median(shares):.3f}"]
        )
    head = ["passages", "ms of a core", "the question alone", "behind the passages"]
    return table([*head, "no forward pass", "its share"], lines)


if __name__ == "__main__":
    main()
