"""How often is a passage model's answer right on questions that people ask about a book?

The book and its 30 questions are those of `memstore demo`; they were written by somebody who had
not seen an answer of the system. Methods as in real.recall. An answer is right if one of the
accepted strings occurs in it. Intervals are Wilson's, 95%; "less" is the memory's share less the
method's over the same questions, with Student's interval.

    python -m benchmarks.real.everyday --model smollm2/ --work w/
"""

import argparse
import time
from collections.abc import Sequence

from benchmarks.common.intervals import paired_interval, wilson
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.real.plan import Plan, Question, Stated
from benchmarks.real.recall_tables import counts
from benchmarks.real.results import Row
from benchmarks.real.running import parser, run
from memstore.cli.demo import TEXT, book_questions, chapters

METHODS = [
    "memory", "memory-text", "right", "bm25", "bm25@1", "bm25@4", "minilm", "minilm@4", "rrf",
    "rrf@4", "none",
]  # fmt: skip
TASK = "everyday"
KEPT = ("question", "method", "right", "answered", "said")  # of a row, in the results


def main() -> None:
    options = read_options()
    rows = run("everyday", options, plan)
    print("\n" + marks(rows, options.methods))
    said = [{name: row[name] for name in KEPT if name in row} for row in rows]
    write(options, {"answers": counts(rows), "rows": said})


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.set_defaults(text=[str(TEXT)], methods=METHODS)
    given = options.parse_args()
    given.tasks, given.lengths = [TASK], [0]
    return given


def plan() -> Plan:
    """The chapters, and the questions about all of them."""
    texts = dict(chapters())
    made = Plan(documents=texts)
    for number, one in enumerate(book_questions()):
        start = texts[one.chapter].index(one.passage)
        stated = Stated(one.chapter, start, start + len(one.passage), None)
        made.questions.append(
            Question(
                name=f"{TASK} {number}",
                task=TASK,
                length=0,
                documents=tuple(texts),
                text=one.question,
                primed="",
                answers=tuple(one.answers),
                rule="any",
                most=64,  # as a passage model answers its users
                stated=(stated,),
            )
        )
    return made


def marks(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """Right answers by method, how many were answered, and the memory's less the method's."""
    by = {m: {row["question"]: row for row in rows if row["method"] == m} for m in methods}
    ours = by.get("memory", {})
    lines = []
    for method, found in by.items():
        right = sum(row["right"] > 0 for row in found.values())
        low, high = wilson(right, len(found))
        read = [row for row in found.values() if row.get("answered")]
        less = ""
        if ours and method != "memory":
            each = [ours[name]["right"] - row["right"] for name, row in found.items()]
            first, last = paired_interval(each)
            less = f"{sum(each) / len(each):+.2f} ({first:+.2f} to {last:+.2f})"
        said = f"{right} of {len(found)} ({low:.2f}-{high:.2f})"
        lines.append([method, said, len(read) if read else "", less])
    return table(["method", "right", "answered", "memory less this"], lines)


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.0f} s")
