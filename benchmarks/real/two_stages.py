"""A million passages: does the search in two stages find what the exact one finds, at what cost?

The documents and questions of real.choice_at_1m, whose --work holds the landmarks of what was
really read, in one memory with synthetic documents up to --passages: a synthetic passage goes from
landmark to landmark of the real ones as they follow each other, after every fourth from another
landmark of the same of 4,096 clusters; each landmark is then replaced by any of its cluster, with a
tenth of noise; its words and its text, but for two tokens, are those of some real passage. No keys
and values are stored: passages that are read are computed.

Every question is searched in two stages and exactly, by the reader's selector, words included:
recall is of the exact best --best; "same" the share of questions whose best are the same ones.
Milliseconds are of the thread's processor time, the median. --answers: every question is answered
by both, also where the gate says that nothing answers it.

    python -m benchmarks.real.two_stages --text books-test.jsonl.zst books-val.jsonl.zst \\
        --model smollm2/ --work real/ --documents 16 --questions 20
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import faiss
import numpy as np
import torch

from benchmarks.common.main_memory import status_bytes
from benchmarks.common.options import add
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.common.timing import timed
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.choice_at_1m import Chosen, planned, read_options
from benchmarks.real.memory import answer
from benchmarks.real.passage_model import passage_model
from benchmarks.real.plan import Question
from benchmarks.real.prompting import tokenizer_of
from benchmarks.real.synthetic_passages import fill
from memstore import MemoryStore
from memstore.model.passages.activation_capture import capture
from memstore.model.passages.selector import Scored, score_blocks


def main() -> None:
    options = read_options(__doc__, own_options)
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    plan = planned(options, options.work)
    blocks = Blocks(passages(tokenizer_of(options.model)), plan.documents)
    reader = passage_model(options.model, options.dtype)
    chosen = Chosen(reader, blocks, options.work, f"{options.dtype}-{options.seed}")
    questions = [
        question
        for task in options.tasks
        for question in [q for q in plan.questions if q.task == task][: options.asked]
    ]
    names = list(dict.fromkeys(name for q in questions for name in q.documents))
    memory = options.work / f"passages-{options.passages}"
    told: dict[str, Any] = {}
    if not (memory / "filled").exists():
        shutil.rmtree(memory, ignore_errors=True)
        told["seconds to write"] = timed(lambda: fill(memory, chosen, names, options))[0]
        (memory / "filled").touch()
    made = memory / "made.json"
    if not (memory / "index" / "passages.idx").exists():
        with MemoryStore.open(memory) as store:
            began = time.process_time()
            told["seconds to make the lists"], told["lists"] = timed(store.build_index)
            told["seconds of a core for that"] = time.process_time() - began
        made.write_text(json.dumps(told), encoding="utf-8")
        print("the lists are made; run it again, so that what making them left does not count")
        return
    told = json.loads(made.read_text(encoding="utf-8"))
    own = [
        capture(reader, ids).part(words)
        for question in questions
        for ids, words in [reader.turn_ids(question.text, first=True)]
    ]
    before = resident()
    with MemoryStore.open(memory, read_only=True) as store:
        scope = [(document.id, 0, document.blocks) for document in store.documents()]
        told["passages"] = sum(end for _, _, end in scope)
        told["tokens"] = sum(document.tokens for document in store.documents())
        asked = list(zip(questions, own))
        two, told["first"], told["ms"] = search(reader, store, scope, asked)
        told["ms, asked again"] = search(reader, store, scope, asked)[2]
        told["resident"] = {kind: size - before[kind] for kind, size in resident().items()}
        rows = []
        for (question, captured), found in zip(asked, two):
            rows.append(compared(reader, store, scope, question, captured, found, options.best))
            print(f"  {question.name}: {rows[-1]}", flush=True)
        told["resident, exact"] = {kind: size - before[kind] for kind, size in resident().items()}
        if options.answers:
            for row, said in zip(rows, answered(reader, store, questions)):
                row |= said
    print("\n" + report(told, rows))
    write(options, told | {"rows": rows})


def own_options(options: argparse.ArgumentParser) -> None:
    """What is asked beside choice_at_1m's."""
    add(options, "--passages", 1_000_000, "in all")
    add(options, "--best", 8, "of the exact search")
    options.add_argument("--answers", action="store_true", help="generate them by both searches")


def search(
    reader: Any, store: MemoryStore, scope: list[tuple[int, int, int]], asked: list[Any]
) -> tuple[list[Scored], dict[str, float], list[float]]:
    """Every question in two stages; seconds of the first, and milliseconds of each later on."""
    found, spent = [], []
    began = time.perf_counter()
    for question, captured in [asked[0], *asked]:
        start = time.thread_time()
        found.append(score_blocks(reader.selector, captured, question.text, store, scope))
        spent.append(1000 * (time.thread_time() - start))
        if len(found) == 1:
            first = {"seconds": time.perf_counter() - began, "of a core": spent[0] / 1000}
    assert len(found[0].scores) < found[0].blocks, "the memory is too small for two stages"
    return found[1:], first, spent[1:]


def compared(
    reader: Any,
    store: MemoryStore,
    scope: list[tuple[int, int, int]],
    question: Any,
    captured: Any,
    found: Scored,
    best: int,
) -> dict[str, Any]:
    """Two stages beside the exact search."""
    start = time.thread_time()
    exact = reader.selector.scores(captured, question.text, store.retrieval, scope)
    spent = 1000 * (time.thread_time() - start)
    places = [(number, block) for number, first, end in found.scope for block in range(first, end)]
    whole = np.cumsum([0, *(end for _, _, end in scope)])
    number = {document: int(first) for (document, _, _), first in zip(scope, whole)}
    listed = torch.tensor([number[document] + block for document, block in places])
    top, wanted = found.scores.topk(best), exact.topk(best)
    chosen = listed[top.indices]
    gate = reader.gate
    return {
        "question": question.name,
        "task": question.task,
        "listed": len(places),
        "exact ms": spent,
        "recall in the list": float(torch.isin(wanted.indices, listed).float().mean()),
        "recall": float(torch.isin(wanted.indices, chosen).float().mean()),
        "same": set(chosen.tolist()) == set(wanted.indices.tolist()),
        "apart": float((found.scores - exact[listed]).abs().max()),
        "answers": [
            bool(gate.answers(found.scores, blocks=found.blocks)),
            bool(gate.answers(exact)),
        ],
    }


def answered(
    reader: Any, store: MemoryStore, questions: list[Question]
) -> Iterator[dict[str, Any]]:
    """What is answered to every question in two stages, and where every passage is scored."""
    for question in questions:
        found = []
        for shortlist in (store.retrieval.shortlist, lambda *_: None):
            searched = mock.patch.object(store, "shortlist", shortlist)
            with searched, reader.session(store, caution=0.0) as session:
                found.append(answer(reader, session, question))
        right, said = zip(*found)
        print(f"  {question.name}: {right} {said}", flush=True)
        yield {"right": right, "said": said}


def resident() -> dict[str, int]:
    """Bytes in main memory: the process's own, and of files."""
    return {"own": status_bytes("RssAnon"), "files": status_bytes("RssFile")}


def report(told: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """What was found, and what it cost."""
    mean = {
        name: statistics.fmean(float(row[name]) for row in rows)
        for name in ("recall", "recall in the list", "same")
    }
    exact = [row["exact ms"] for row in rows]
    alike = statistics.fmean(row["answers"][0] == row["answers"][1] for row in rows)
    lines = [
        ["recall of the exact best", f"{mean['recall']:.3f}"],
        ["of these on the shortlist", f"{mean['recall in the list']:.3f}"],
        ["questions with the same best", f"{mean['same']:.3f}"],
        ["the gate says the same", f"{alike:.3f}"],
        ["ms of a core a question", f"{statistics.median(told['ms']):.1f}"],
        ["asked again", f"{statistics.median(told['ms, asked again']):.1f}"],
        ["every passage scored", f"{statistics.median(exact):.0f}"],
        ["seconds to the first", f"{told['first']['seconds']:.1f}"],
        ["every passage scored", f"{exact[0] / 1000:.1f}"],
        ["MB resident, own", f"{told['resident']['own'] / 1e6:.0f}"],
        ["every passage scored", f"{told['resident, exact']['own'] / 1e6:.0f}"],
        ["MB resident, of files", f"{told['resident']['files'] / 1e6:.0f}"],
        ["differences of scores, at most", f"{max(row['apart'] for row in rows):.1e}"],
    ]
    lines += [[name, f"{told[name]:.0f}"] for name in told if name.startswith("seconds")]
    if "said" in rows[0]:
        asked = [row for row in rows if not row["task"].startswith("absent")]
        for at, way in enumerate(("two stages", "every passage scored")):
            right = statistics.fmean(row["right"][at] for row in asked)
            lines.append([f"right, {way}", f"{right:.3f} of {len(asked)}"])
        other = sum(row["said"][0] != row["said"][1] for row in rows)
        lines.append(["answers that differ", f"{other} of {len(rows)}"])
    kinds = dict.fromkeys(row["task"] for row in rows)
    by = {
        kind: statistics.fmean(row["recall"] for row in rows if row["task"] == kind)
        for kind in kinds
    }
    lines += [[f"recall, {kind}", f"{recall:.3f}"] for kind, recall in by.items()]
    head = f"{told['passages']:,} passages, {told['tokens']:,} tokens, {len(rows)} questions"
    return head + "\n\n" + table(["what", ""], lines)


if __name__ == "__main__":
    main()
