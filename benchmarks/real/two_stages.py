"""A million passages: does the search in two stages find what the exact one finds, at what cost?

The documents and questions of real.choice_at_1m, whose --work holds the landmarks of what was
really read, in one memory with synthetic documents up to --passages: a synthetic passage goes from
landmark to landmark of the real ones as they follow each other, after every fourth from another
landmark of the same of 4,096 clusters; each landmark is then replaced by any of its cluster, with a
tenth of noise; its words are those of some real passage. No keys and values are stored.

Every question is searched in two stages and exactly, by the reader's selector, words included:
recall is of the exact best --best; "same" the share of questions whose best are the same ones,
which then read the same. Milliseconds are of the thread's processor time, the median.

    python -m benchmarks.real.two_stages --text books-test.jsonl.zst books-val.jsonl.zst \\
        --model smollm2/ --work real/ --documents 16 --questions 20
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from benchmarks.real.passage_model import passage_model
from benchmarks.real.prompting import tokenizer_of
from memstore import MemoryStore
from memstore.disk.format.document import IngestSettings
from memstore.disk.format.passage_parts import Passage
from memstore.model.passages.activation_capture import capture
from memstore.model.passages.selectors.scoring import Scored, score_blocks

_CLUSTERS, _AT_ONCE, _IN_A_DOCUMENT = 4096, 250, 5000


class Read(NamedTuple):
    """Landmarks int8 [tokens, width] of passages, the tokens of each, and each one's words."""

    landmarks: np.ndarray
    lengths: np.ndarray
    words: list[list[tuple[int, int]]]


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
    print("\n" + report(told, rows))
    write(options, told | {"rows": rows})


def own_options(options: argparse.ArgumentParser) -> None:
    """What is asked beside choice_at_1m's."""
    add(options, "--passages", 1_000_000, "in all")
    add(options, "--best", 8, "of the exact search")


def fill(memory: Path, chosen: Chosen, names: list[str], options: argparse.Namespace) -> None:
    """Make the memory: what was read, then synthetic documents."""
    reader, read = chosen.reader, []
    with MemoryStore.create(memory, reader.signature, selector=reader.keeps) as store:
        for name in names:
            kept = chosen.landmarks(name)
            assert kept is not None, "the model's selector keeps no token landmarks"
            landmarks, lengths = kept
            texts = [chosen.blocks.text(block) for block in chosen.blocks.scope([name])]
            words = reader.selector.words(texts)
            read.append(Read(landmarks[:, 0].numpy(), np.array(lengths), words))
            write_document(store, name, read[-1])
        passages = sum(len(one.lengths) for one in read)
        everything = Read(
            np.concatenate([one.landmarks for one in read]),
            np.concatenate([one.lengths for one in read]),
            [words for one in read for words in one.words],
        )
        made = synthetic(everything, options.passages - passages, options.seed)
        for number, document in enumerate(made):
            write_document(store, f"synthetic {number}", document)


def write_document(store: MemoryStore, name: str, read: Read) -> None:
    """A document whose passages are found by this, and have some text."""
    settings = IngestSettings(passage_tokens=64)
    writer = store.write_document(name, source_hash=name, settings=settings)
    assert writer is not None
    ends = np.cumsum(read.lengths)
    with writer:
        for first in range(0, len(ends), _AT_ONCE):
            last = min(first + _AT_ONCE, len(ends))
            begin = int(ends[first] - read.lengths[first])
            sizes = read.lengths[first:last].tolist()
            # other tokens in every passage: what is stored is named by them
            some = [
                Passage(np.arange(size) + (hash((name, first + at)) & 0xFFFFFF), 0, "", at, size)
                for at, size in zip((ends[first:last] - sizes).tolist(), sizes)
            ]
            landmarks = torch.from_numpy(read.landmarks[begin : ends[last - 1], None].copy())
            words = read.words[first:last]
            writer.add_passages(some, {}, given=[], landmarks=landmarks, words=words)
        writer.finish()


def synthetic(read: Read, passages: int, seed: int) -> Iterator[Read]:
    """Documents of synthetic passages, of the statistics of these."""
    rng = np.random.default_rng(seed)
    vectors = read.landmarks.astype(np.float32) / np.float32(127)
    kmeans = faiss.Kmeans(vectors.shape[1], _CLUSTERS, niter=6, spherical=True, seed=seed)
    kmeans.train(vectors[rng.permutation(len(vectors))[:200_000]])
    cluster = kmeans.index.search(vectors, 1)[1][:, 0]
    order, size = np.argsort(cluster, kind="stable"), np.bincount(cluster, minlength=_CLUSTERS)
    begin = np.cumsum(size) - size

    def alike(tokens: np.ndarray) -> np.ndarray:
        of = cluster[tokens]
        return order[begin[of] + (rng.random(len(of)) * size[of]).astype(np.int64)]

    for first in range(0, passages, _IN_A_DOCUMENT):
        n = min(_IN_A_DOCUMENT, passages - first)
        like = rng.integers(0, len(read.lengths), n)
        lengths = read.lengths[like]
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
        yield Read(made.round().astype(np.int8), lengths, [read.words[one] for one in like])


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
    exact = reader.selector.scores(captured, question.text, store, scope)
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
