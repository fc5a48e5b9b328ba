"""Does the search in two stages find what the exact search finds among a million passages, and at
what cost?

The planted questions of --length tokens (see real.recall) are asked of their documents, of as many
more of books as make --documents, and of synthetic documents up to --passages. A synthetic passage
walks from landmark to landmark of the real ones as they follow each other, and after every fourth
jumps to another landmark of the same of 4,096 clusters; each landmark is then replaced by any of
its cluster with a tenth of noise, and its words and its text, but for two tokens, are those of some
real passage. No keys and values are stored.

Every question is searched in two stages and exactly, by the model's selector, words included.
Recall is of the exact best --best; "same" is the share of questions with the same best ones.
Milliseconds are the thread's processor time, the median. The first run makes the memory and its
lists in --work; run it again to measure.

    python -m benchmarks.real.two_stages --text books-test.jsonl.zst --model smollm2/ --work w/
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from torch import Tensor

from benchmarks.common.memories import status_bytes
from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table, tokens_number
from benchmarks.common.text import part
from benchmarks.common.timing import timed
from benchmarks.real.passage_model import parser, passage_model
from benchmarks.real.plan import Question
from benchmarks.real.planted import CORPORA, TASKS, load
from memstore import MemoryStore
from memstore.disk.format.document import IngestSettings
from memstore.disk.tables.texts import Passage
from memstore.index.late_interaction import INT8_STEPS
from memstore.index.word_index import around
from memstore.model.passages.passage_encoding import encode, passages_of
from memstore.model.passages.repositioned_attention import capture
from memstore.model.passages.selector import Query, Scored, score_blocks
from memstore.training.corpus import read_documents

_CLUSTERS, _AT_ONCE, _IN_A_DOCUMENT = 4096, 250, 5000

Scope = list[tuple[int, int, int]]


class Read(NamedTuple):
    """What passages are found by: landmarks int8 [tokens, width], the tokens [n] of each passage,
    and its words.
    """

    landmarks: np.ndarray
    ids: list[np.ndarray]
    words: list[list[tuple[int, int]]]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [passages]: tokens of each."""
        return np.array([len(ids) for ids in self.ids], np.int64)


def main() -> None:
    options = read_options()
    prepare(options.threads)
    faiss.omp_set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    reader = passage_model(options.model, options.dtype)
    documents, questions = planned(options)
    memory, made = options.work / f"passages-{options.passages}", options.work / "made.json"
    if not made.exists():
        shutil.rmtree(memory, ignore_errors=True)
        made.write_text(json.dumps(make(reader, memory, documents, options)), encoding="utf-8")
        print("The lists are made; run it again, so that main memory is that of searching alone.")
        return
    found, rows = measure(reader, memory, questions, options)
    found |= json.loads(made.read_text(encoding="utf-8"))
    print(report(found, rows))
    write(options, found | {"rows": rows})


def read_options() -> argparse.Namespace:
    options = parser(__doc__, dtype="bfloat16")
    options.add_argument("--work", type=Path, required=True, help="the memory is kept here")
    add(options, "--length", "128K", "tokens of a document", type=tokens_number)
    add(options, "--documents", 16, "of this length each")
    add(options, "--passages", 1_000_000, "in all")
    add(options, "--best", 8, "passages of the exact search")
    tasks = [task for task in TASKS if task != "natural"]
    add(options, "--tasks", tasks, choices=tasks, metavar="TASK")
    add(options, "--asked", 5, "questions of each task")
    return options.parse_args()


def planned(options: argparse.Namespace) -> tuple[dict[str, str], list[Question]]:
    """The documents, and the questions about all of them."""
    plan = load(CORPORA[0], list(read_documents(options.text)), [options.length])
    asked = plan.of(options.tasks, [options.length], options.asked)
    documents = {name: plan.documents[name] for one in asked for name in one.documents}
    for number in range(options.documents - len(documents)):
        documents[f"books {number}"] = part(options.text, options.length, number)
    return documents, [replace(question, documents=tuple(documents)) for question in asked]


def make(
    reader: Any, memory: Path, documents: dict[str, str], options: argparse.Namespace
) -> dict[str, float]:
    """Write the memory, make its lists, and return seconds."""
    with MemoryStore.create(memory, reader.signature, selector=reader.keeps) as store:
        real = []
        for name, text in documents.items():
            real.append(read_by(reader, text, options.work / f"{name}.pt"))
            write_document(store, name, real[-1])
        everything = Read(
            np.concatenate([one.landmarks for one in real]),
            [ids for one in real for ids in one.ids],
            [words for one in real for words in one.words],
        )
        missing = options.passages - len(everything.ids)
        for number, read in enumerate(synthetic(everything, missing, options.seed)):
            write_document(store, f"synthetic {number}", read)
        began = time.process_time()
        seconds, _ = timed(store.build_index)
        return {"list seconds": seconds, "list core seconds": time.process_time() - began}


def read_by(reader: Any, text: str, file: Path) -> Read:
    """What a document's passages are found by, from `file` if an earlier run left it there."""
    passages = list(passages_of(reader, [text]))
    ids = [passage.ids for passage in passages]
    if not file.exists():
        read = encode(reader, [one.tolist() for one in ids], layers=reader.selector.layer)
        landmarks: list[Tensor] = [reader.selector.landmarks(one.captured) for one in read]
        torch.save(torch.cat(landmarks), file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
    spans = [(passage.start, passage.end) for passage in passages]
    texts = [(text[start:end], around(text, start, end)) for start, end in spans]
    return Read(torch.load(file).numpy(), ids, reader.selector.words(texts))


def write_document(store: MemoryStore, name: str, read: Read) -> None:
    """Write a document whose passages are found by this, without keys and values."""
    settings = IngestSettings(passage_tokens=64)
    writer = store.write_document(name, source_hash=name, settings=settings)
    assert writer is not None
    ends = np.cumsum(read.lengths)
    with writer:
        for first in range(0, len(ends), _AT_ONCE):
            last = min(first + _AT_ONCE, len(ends))
            begin = int(ends[first] - read.lengths[first])
            sizes = read.lengths[first:last]
            some = [
                Passage(ids, 0, "", at, len(ids))
                for at, ids in zip((ends[first:last] - sizes).tolist(), read.ids[first:last])
            ]
            landmarks = torch.from_numpy(read.landmarks[begin : ends[last - 1]].copy())
            words = read.words[first:last]
            writer.add_passages(some, [], given=[], landmarks=landmarks, words=words)
        writer.finish()


def synthetic(read: Read, passages: int, seed: int) -> Iterator[Read]:
    """Documents of synthetic passages with the statistics of these."""
    rng = np.random.default_rng(seed)
    vectors = read.landmarks.astype(np.float32) / INT8_STEPS
    kmeans = faiss.Kmeans(vectors.shape[1], _CLUSTERS, niter=6, spherical=True, seed=seed)
    kmeans.train(vectors[rng.permutation(len(vectors))[:200_000]])
    vocabulary = max(int(ids.max()) for ids in read.ids)
    cluster = kmeans.index.search(vectors, 1)[1][:, 0]
    order, size = np.argsort(cluster, kind="stable"), np.bincount(cluster, minlength=_CLUSTERS)
    begin = np.cumsum(size) - size

    def alike(tokens: np.ndarray) -> np.ndarray:
        of = cluster[tokens]
        return order[begin[of] + (rng.random(len(of)) * size[of]).astype(np.int64)]

    of_all = read.lengths
    for first in range(0, passages, _IN_A_DOCUMENT):
        n = min(_IN_A_DOCUMENT, passages - first)
        like = rng.integers(0, len(of_all), n)
        lengths = of_all[like]
        walks = np.empty((n, int(lengths.max())), np.int64)
        at = rng.integers(0, len(vectors), n)
        for step in range(walks.shape[1]):
            walks[:, step] = at
            at = (np.where(rng.random(n) < 0.25, alike(at), at) + 1) % len(vectors)
        tokens = walks[np.arange(walks.shape[1]) < lengths[:, None]]
        made = vectors[alike(tokens)]
        made += rng.standard_normal(made.shape, dtype=np.float32) * np.float32(
            0.1 / made.shape[1] ** 0.5
        )
        made *= 127 / np.linalg.norm(made, axis=1, keepdims=True)
        ids = [read.ids[one].copy() for one in like]
        for passage in ids:  # passages are identified by their tokens: no two may be equal
            passage[-2:] = rng.integers(0, vocabulary, len(passage[-2:]))
        yield Read(made.round().astype(np.int8), ids, [read.words[one] for one in like])


def measure(
    reader: Any, memory: Path, questions: Sequence[Question], options: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Costs of both searches, and a row a question."""
    asked = []
    for question in questions:
        ids, words = reader.turn_ids(question.text, first=True)
        asked.append((question, Query(capture(reader, ids).part(words), question.text)))
    before = resident()
    found: dict[str, Any] = {}
    with MemoryStore.open(memory, reader.signature, read_only=True) as store:
        scope = [(document.id, 0, document.blocks) for document in store.documents()]
        found["passages"] = sum(end for _, _, end in scope)
        found["tokens"] = sum(document.tokens for document in store.documents())

        def search(times: str) -> list[Scored]:
            began, spent, listed = time.perf_counter(), [], []
            for _, query in asked:
                start = time.thread_time()
                listed.append(score_blocks(reader.selector, query, store, scope))
                spent.append(1000 * (time.thread_time() - start))
                found.setdefault("seconds to the first", time.perf_counter() - began)
            found[f"ms, {times}"] = spent
            return listed

        search("first time")
        listed = search("again")
        assert len(listed[0].scores) < listed[0].blocks, "too small a memory for two stages"
        found["resident"] = {kind: size - before[kind] for kind, size in resident().items()}
        exact, spent = [], []
        for _, query in asked:
            start = time.thread_time()
            exact.append(reader.selector.scores(query, store.retrieval.selected, scope))
            spent.append(1000 * (time.thread_time() - start))
        found["resident, exact"] = {kind: size - before[kind] for kind, size in resident().items()}

    rows = [
        compare(reader, scope, question, scores, two, options.best) | {"exact ms": ms}
        for (question, _), scores, two, ms in zip(asked, exact, listed, spent)
    ]
    return found, rows


def compare(
    reader: Any, scope: Scope, question: Question, exact: Tensor, two: Scored, best: int
) -> dict[str, Any]:
    """One question: the search in two stages against the exact one."""
    starts = np.cumsum([0, *(end for _, _, end in scope)])
    first = {document: int(at) for (document, _, _), at in zip(scope, starts)}
    places = [
        first[document] + block for document, begin, end in two.scope for block in range(begin, end)
    ]
    listed = torch.tensor(places)
    wanted = exact.topk(best).indices
    chosen = listed[two.scores.topk(best).indices]
    return {
        "question": question.name,
        "task": question.task,
        "listed": len(places),
        "recall in the list": float(torch.isin(wanted, listed).float().mean()),
        "recall": float(torch.isin(wanted, chosen).float().mean()),
        "same": set(chosen.tolist()) == set(wanted.tolist()),
        "gates agree": bool(reader.gate.answers(two.scores, two.blocks))
        == bool(reader.gate.answers(exact, len(exact))),
    }


def resident() -> dict[str, int]:
    """Bytes in main memory: the process's own, and of mapped files."""
    return {"own": status_bytes("RssAnon"), "files": status_bytes("RssFile")}


def report(found: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The table."""

    def mean(name: str) -> str:
        return f"{statistics.fmean(float(row[name]) for row in rows):.3f}"

    exact = [row["exact ms"] for row in rows]
    lines = [
        ["recall of the exact best", mean("recall")],
        ["of these in the list", mean("recall in the list")],
        ["questions with the same best", mean("same")],
        ["questions for which both gates agree", mean("gates agree")],
        ["ms of a core a question", f"{statistics.median(found['ms, first time']):.1f}"],
        ["asked again", f"{statistics.median(found['ms, again']):.1f}"],
        ["every passage scored", f"{statistics.median(exact):.0f}"],
        ["seconds to the first question", f"{found['seconds to the first']:.1f}"],
        ["MB resident, own", f"{found['resident']['own'] / 1e6:.0f}"],
        ["every passage scored", f"{found['resident, exact']['own'] / 1e6:.0f}"],
        ["MB resident, of files", f"{found['resident']['files'] / 1e6:.0f}"],
        ["seconds to make the lists, of a core", f"{found['list core seconds']:.0f}"],
    ]
    head = f"{found['passages']:,} passages, {found['tokens']:,} tokens, {len(rows)} questions"
    return head + "\n\n" + table(["what", ""], lines)


if __name__ == "__main__":
    main()
