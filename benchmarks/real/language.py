"""Does what a book told before help a real model to go on, beyond its window?

Segments of 64 tokens of books that the model has read into its memory. Before each stand a local
window of --window tokens and, in the memory, the text before that window: --lengths of it may be
read. Passages are chosen once for a segment, by the reader's selector, for the last --rows
tokens of the window; nothing of the segment is known to the choice. Beside it the window alone
("window") and a window that is longer by as many tokens as top_k blocks have ("longer window").

Cross entropy in nats a token; differences to the window alone are paired, with 95% intervals over
segments. The gate is what would say "not in the memory" to a question. A run goes on where it was
killed, with --work.

    python -m benchmarks.real.language --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.common.intervals import mean_interval
from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_number, tokens_text
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.hay import Hay, Offsets
from benchmarks.real.memory import Memory
from benchmarks.real.passage_model import parser, passage_model
from benchmarks.real.prompting import counting
from benchmarks.real.results import Results, Row
from memstore.model.passages.activation_capture import capture
from memstore.model.passages.passage_choice import Chosen
from memstore.model.passages.repositioned_attention import RepositionedAttention, read_prefix
from memstore.model.passages.selector import Gate, confidence, in_range
from memstore.training.corpus import read_documents

SEGMENT, BLOCK = 64, 64  # tokens


class Continuation:
    """A reader that goes on with texts of a memory."""

    def __init__(self, memory: Memory, offsets: Offsets, options: argparse.Namespace) -> None:
        self.offsets, self.texts = offsets, memory.blocks.documents
        self._encoded: dict[str, list[int]] = {}
        self._spans: dict[str, list[tuple[int, int]]] = {}
        self.memory, self.reader, self.store = memory, memory.reader, memory.store
        self.reader.separator_ids = []  # a text goes on, nothing is asked
        self.window, self.rows = options.window, options.rows
        given = {"top_k": options.top_k, "score_range": options.score_range}
        self.settings = {name: value for name, value in given.items() if value is not None}
        lookup = self.reader.lookup.changed(**self.settings)
        self.top_k = lookup.top_k
        self.score_range = lookup.score_range

    def measure(self, document: str, start: int, method: str) -> Row:
        """Go on at token `start` of a document: "nats" a token, and of a memory the "best" score
        and how many "blocks" were read. method: a memory's tokens, or one of the windows.
        """
        targets = self._ids(document, start, start + SEGMENT)
        if method == "window":
            return {
                "nats": self._windowed(self._ids(document, start - self.window, start), targets)
            }
        if method == "longer window":
            longer = self.window + self.top_k * BLOCK
            return {"nats": self._windowed(self._ids(document, start - longer, start), targets)}
        local = self._ids(document, start - self.window, start)
        blocks, best = self._choose(document, local, start - self.window, int(method))
        with self.reader.session(
            self.store, [document], retrieve=False, **self.settings
        ) as session:
            session.read(blocks)
            states = session.feed([*local, *targets[:-1]])[-SEGMENT:]
            nats = cross_entropy(session.logits(states), torch.tensor(targets))
        return {"nats": float(nats), "best": best, "blocks": len(blocks)}

    @torch.no_grad()
    def _windowed(self, local: list[int], targets: list[int]) -> float:
        context = RepositionedAttention(self.reader, read_prefix(self.reader))
        ids = torch.tensor([[*local, *targets[:-1]]], device=self.reader.device)
        states = self.reader.hidden(ids, context.attend)[0, -SEGMENT:]
        return float(cross_entropy(self.reader.logits(states), torch.tensor(targets)))

    def _choose(
        self, document: str, local: list[int], end: int, tokens: int
    ) -> tuple[list[Chosen], float]:
        """Of the passages in so many tokens of a document up to its token `end`, those that the end
        of the local text asks for; and the best score.
        """
        number = self.store.document(document).id
        spans, offsets = self.memory.blocks.spans(document), self._offsets(document)
        before, after = offsets[end][0], offsets[max(0, end - tokens)][0]
        inside = [at for at, span in enumerate(spans) if span[0] >= after and span[1] <= before]
        first, last = inside[0], inside[-1] + 1
        asking = range(len(local) - min(self.rows, len(local)), len(local))
        captured = capture(self.reader, local).part(asking)
        words = self.reader.tokenizer.decode(local[asking.start :])
        scores = self.reader.selector.scores(
            captured, words, self.store.retrieval, [(number, first, last)]
        )
        best = scores.topk(min(self.top_k, len(scores)))
        chosen = best.indices[in_range(best.values, scores, self.score_range)].sort().values
        blocks = [Chosen(number, first + block, float(scores[block])) for block in chosen.tolist()]
        return blocks, confidence(scores)

    def _ids(self, document: str, first: int, end: int) -> list[int]:
        if document not in self._encoded:
            self._encoded[document] = self.reader.tokenizer.encode(self.texts[document])
        return self._encoded[document][first:end]

    def _offsets(self, document: str) -> list[tuple[int, int]]:
        if document not in self._spans:
            self._spans[document] = self.offsets(self.texts[document])
        return self._spans[document]


def main() -> None:
    options = read_options()
    prepare(options.threads)
    longest = options.lengths[-1]
    tokens = longest + options.window + options.segments * options.every
    offsets = counting(options.model)
    texts = book_texts(options, tokens, offsets)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        reader = passage_model(options.model, options.dtype)
        named = f"language-{options.seed}-{tokens}-{options.dtype}"
        with Memory(
            reader, work / f"memory-{named}", Blocks(passages(reader.tokenizer), texts)
        ) as memory:
            memory.read_in(texts)
            continuation = Continuation(memory, offsets, options)
            asked = (options.window, options.rows, continuation.top_k)
            named += f"-{'-'.join(map(str, (*asked, continuation.score_range)))}"
            results = Results(work / f"{named}-{reader.keeps.digest[:8]}.jsonl")
            methods = ["window", "longer window", *map(str, options.lengths)]
            for number in range(options.segments):
                start = longest + options.window + number * options.every
                for document in texts:
                    about = {"question": f"{document} {start}", "document": document}
                    for method in methods:
                        if (about["question"], method) not in results:
                            row = continuation.measure(document, start, method)
                            results.add(about | {"method": method} | row)
                print(f"  {number + 1}/{options.segments} segments of each text", flush=True)
        of = {
            f"{name} {longest + options.window + n * options.every}"
            for name in texts
            for n in range(options.segments)
        }
        rows = [row for row in results if row["question"] in of and row["method"] in methods]
        print(f"\n{len(of)} segments of {len(texts)} texts\n")
        print(differences(rows, methods))
        print("\n" + passed(rows, options.lengths, reader.gate))
        gate = reader.gate and asdict(reader.gate)
        write(options, {"rows": rows, "gate": gate})


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--work", type=Path, help="keep memory and results here")
    add(options, "--lengths", ["1K", "4K", "16K"], "tokens of memory before the window")
    add(options, "--window", 512, "tokens before a segment")
    add(options, "--rows", 64, "the last tokens of the window, which choose")
    add(options, "--texts", 12, "at most, one a book")
    add(options, "--segments", 8, "of each text")
    add(options, "--every", 1024, "tokens from one segment to the next")
    options.add_argument("--top-k", type=int, help="blocks (default: the reader's)")
    options.add_argument("--score-range", type=float, help="(default: the reader's)")
    given = options.parse_args()
    given.lengths = sorted(tokens_number(text) for text in given.lengths)
    sizes = (*given.lengths, given.window, given.every)
    if any(size % BLOCK for size in sizes):
        options.error(f"--lengths, --window and --every are multiples of {BLOCK}")
    return given


def book_texts(options: argparse.Namespace, tokens: int, offsets: Any) -> dict[str, str]:
    """A text of so many tokens of each book that is long enough. Raises SystemExit for none."""
    texts: dict[str, str] = {}
    for number, book in enumerate(read_documents(options.text)):
        if len(texts) == options.texts:
            break
        hay = Hay(offsets, [book], Random(f"language {options.seed} {number}"))
        try:
            texts[f"book {number}"] = hay.prose(tokens)
        except SystemExit:
            continue
    if not texts:
        raise SystemExit(f"no book has {tokens:,} tokens; give longer texts")
    return texts


def nats(rows: Sequence[Row], method: str) -> dict[str, float]:
    """Of each segment."""
    return {row["question"]: row["nats"] for row in rows if row["method"] == method}


def differences(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """A table of nats a token, and of what is gained over the window alone."""
    base = nats(rows, "window")
    lines = []
    for method in methods:
        of = nats(rows, method)
        mean, low, high = mean_interval([of[segment] - base[segment] for segment in base])
        better = sum(of[segment] < base[segment] for segment in base) / len(base)
        gained = ["", ""]
        if method != "window":
            gained = [f"{mean:+.4f} ({low:+.4f} to {high:+.4f})", f"{100 * better:.0f}%"]
        name = f"memory of {tokens_text(int(method))}" if method.isdigit() else method
        lines.append([name, f"{sum(of.values()) / len(of):.4f}", *gained])
    return table(["read", "nats a token", "difference to the window (95%)", "better in"], lines)


def passed(rows: Sequence[Row], lengths: Sequence[int], gate: Gate | None) -> str:
    """A table of how often the gate would let the choice through, and what is gained then."""
    base, lines = nats(rows, "window"), []
    for length in lengths:
        of = [row for row in rows if row["method"] == str(length)]
        least = gate.threshold(length // BLOCK) if gate else float("-inf")
        through = [row for row in of if row["best"] >= least]
        gained = [row["nats"] - base[row["question"]] if row in through else 0.0 for row in of]
        mean, low, high = mean_interval(gained)
        blocks = sum(row["blocks"] for row in of) / len(of)
        share = f"{100 * len(through) / len(of):.0f}%"
        lines.append(
            [
                tokens_text(length),
                share,
                f"{blocks:.1f}",
                f"{mean:+.4f} ({low:+.4f} to {high:+.4f})",
            ]
        )
    head = ["memory of", "passes the gate", "blocks read", "difference, gated (95%)"]
    return table(head, lines)


if __name__ == "__main__":
    main()
