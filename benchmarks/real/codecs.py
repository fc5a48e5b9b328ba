"""What does a real model's memory cost in each codec, and are its answers the same?

The documents of recall's questions (see recall.py) are read into a memory of each codec, in turns,
and every question is asked of each of them, in turns as well, after the bytes that it reads were
forgotten by the memory's main memory (not by the page cache). Against the first codec: answers that
became right and wrong, the difference of their shares with its 95% interval (paired), how far the
logits of the answer's first token are apart, and how often another token is the best. Tokens a
second are those of `ingest`, seconds those from a question to its first token; ratios are medians
of pairs.

    python -m benchmarks.real.codecs --text books-val.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.intervals import mean_interval
from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_number, tokens_text
from benchmarks.common.timing import timed
from benchmarks.real.passage_model import parser, passage_model
from benchmarks.real.plan import Plan, Question
from benchmarks.real.prompting import counting
from benchmarks.real.questions import TASKS, build
from memstore import MemoryStore
from memstore.disk.format.codec import CODECS
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.training.corpus import read_documents

ASKED = ["passkey", "fact", "of_20", "natural"]


class Asked(NamedTuple):
    """What came of a question in one codec."""

    right: float
    logits: Tensor  # of the answer's first token
    seconds: float  # to these
    read: list[tuple[int, int]]


def main() -> None:
    options = read_options()
    prepare(options.threads)
    reader = passage_model(options.model, options.dtype)
    texts = list(read_documents(options.text))
    plan = build(
        counting(options.model), texts, [options.length], {options.length: options.trials}, 0
    )
    questions = plan.of(options.tasks, [options.length])
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        figures = read_in(reader, plan, questions, work, options.codecs)
        rows = ask(reader, questions, work, options.codecs)
    print("\n" + costs(rows, figures))
    print("\n" + answers(rows, options.tasks, options.length))
    plain = {
        codec: [(row.right, row.seconds, row.read) for row in of] for codec, of in rows.items()
    }
    write(options, {"figures": figures, "tasks": [q.task for q in questions], "rows": plain})


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--work", type=Path, help="keep the memories here")
    add(options, "--length", "8K", "tokens of memory", type=tokens_number)
    add(options, "--trials", 50, "questions a task")
    add(options, "--tasks", ASKED, choices=TASKS, metavar="TASK")
    add(options, "--codecs", list(CODECS), choices=CODECS, metavar="CODEC")
    return options.parse_args()


def read_in(
    reader: HuggingFacePassageModel,
    plan: Plan,
    questions: Sequence[Question],
    work: Path,
    codecs: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Read what the questions are about into a memory of each codec; what that cost."""
    found: dict[str, dict[str, Any]] = {codec: {"rates": {}} for codec in codecs}
    names = list(dict.fromkeys(name for question in questions for name in question.documents))
    for turn, name in enumerate(names):
        for codec in codecs if turn % 2 else reversed(codecs):
            with opened(reader, work, codec) as store:
                if not store.has(name):
                    read = partial(reader.ingest, plan.documents[name], store, name=name)
                    seconds, document = timed(read)
                    found[codec]["rates"][name] = document.tokens / seconds
    for codec in codecs:
        with opened(reader, work, codec) as store:
            of = [store.document(name) for name in names]
        found[codec]["bytes"] = sum(document.bytes for document in of)
        found[codec]["tokens"] = sum(document.tokens for document in of)
        long = {document.name for document in of if document.tokens >= 1024}
        found[codec]["rates"] = {n: r for n, r in found[codec]["rates"].items() if n in long}
        print(f"  {codec}: {found[codec]['bytes'] / found[codec]['tokens']:.0f} bytes a token")
    return found


def opened(reader: HuggingFacePassageModel, work: Path, codec: str) -> MemoryStore:
    """The memory of a codec, made if need be."""
    path = work / f"codec-{codec}"
    if path.exists():
        return MemoryStore.open(path, reader.signature)
    return MemoryStore.create(path, reader.signature, codec=codec, selector=reader.keeps)


def ask(
    reader: HuggingFacePassageModel,
    questions: Sequence[Question],
    work: Path,
    codecs: Sequence[str],
) -> dict[str, list[Asked]]:
    """Every question to every memory."""
    rows: dict[str, list[Asked]] = {codec: [] for codec in codecs}
    began = time.perf_counter()
    for turn, question in enumerate(questions):
        for codec in codecs if turn % 2 else reversed(codecs):
            with opened(reader, work, codec) as store:
                store.ready(question.documents)
                rows[codec].append(asked(reader, store, question))
        if (turn + 1) % 50 == 0:
            print(f"  {turn + 1}/{len(questions)} in {time.perf_counter() - began:.0f} s")
    return rows


def asked(reader: HuggingFacePassageModel, store: MemoryStore, question: Question) -> Asked:
    """Ask one question."""
    encode = reader.tokenizer.encode
    with reader.session(store, question.documents) as session:

        def first() -> Tensor:
            state = session.ask(question.text, lambda: None)
            return session.feed(encode(question.primed))[-1] if question.primed else state

        seconds, state = timed(first)
        logits = session.logits(state[None])[0].float()
        read = [(block.document, block.block) for block in session.chosen]
        if not session.answered:
            return Asked(0.0, logits, seconds, read)
        if question.rule != "forced":
            said = reader.tokenizer.decode(list(session.generate(state, question.most)))
            return Asked(question.marks(said), logits, seconds, read)
        ids = encode(question.following)
        states = torch.cat([state[None], session.feed(ids[:-1])])
        right = session.logits(states).argmax(-1).tolist() == ids
        return Asked(float(right), logits, seconds, read)


def costs(rows: dict[str, list[Asked]], figures: dict[str, dict[str, Any]]) -> str:
    """Bytes, ingest and asking: a codec a row."""
    head = ["codec", "bytes a token", "of the first", "ingest, tokens a second", "ratio"]
    head += ["first token after, s", "ratio"]
    first = next(iter(rows))
    lines = []
    for codec, of in rows.items():
        size, size0 = (figures[c]["bytes"] / figures[c]["tokens"] for c in (codec, first))
        rates, rates0 = figures[codec]["rates"], figures[first]["rates"]
        read = [rates[name] / rates0[name] for name in rates if name in rates0]
        waited = [row.seconds / row0.seconds for row, row0 in zip(of, rows[first])]
        lines.append(
            [
                codec,
                f"{size:.0f}",
                f"{size / size0:.2f}",
                f"{statistics.median(rates.values()):.0f}" if rates else "",
                f"{statistics.median(read):.2f}" if read else "",
                f"{statistics.median(row.seconds for row in of):.3f}",
                f"{statistics.median(waited):.2f}",
            ]
        )
    return table(head, lines)


def answers(rows: dict[str, list[Asked]], tasks: Sequence[str], length: int) -> str:
    """Right answers, and what another codec changes: codecs by what was asked."""
    first = next(iter(rows))
    head = ["codec", *(f"{task} at {tokens_text(length)}" for task in tasks)]
    head += ["all", "less than the first", "lost, won", "other blocks", "another token"]
    head += ["logits apart: mean, most"]
    trials = len(rows[first]) // len(tasks)
    lines = []
    for codec, of in rows.items():
        right = [row.right for row in of]
        shares = [
            f"{statistics.mean(right[at : at + trials]):.2f}" for at in range(0, len(right), trials)
        ]
        changed = [row0.right - row.right for row, row0 in zip(of, rows[first])]
        mean, low, high = mean_interval(changed)
        apart = [(row.logits - row0.logits).abs() for row, row0 in zip(of, rows[first])]
        best = sum(int(r.logits.argmax() != r0.logits.argmax()) for r, r0 in zip(of, rows[first]))
        lines.append(
            [
                codec,
                *shares,
                f"{statistics.mean(right):.3f}",
                f"{mean:.3f} ({low:.3f}-{high:.3f})",
                f"{sum(c > 0 for c in changed)}, {sum(c < 0 for c in changed)}",
                sum(row.read != row0.read for row, row0 in zip(of, rows[first])),
                best,
                f"{float(torch.stack(apart).mean()):.3f}, {float(torch.stack(apart).max()):.2f}",
            ]
        )
    return table(head, lines)


if __name__ == "__main__":
    main()
