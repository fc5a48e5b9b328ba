"""How soon does a real model answer from what it has read before, and how fast does it go on?

A document of --length tokens of a book is in a memory; the model is loaded and has answered before.
To the first token of an answer, everything timed from the question as a string on:

- from the memory, its best --passages chosen and read, with its page cache warm; from a new
  process, which opens the memory with the model loaded (page cache dropped before);
- the same passages as text in the prompt of the stock model, which were chosen before the clock
  began;
- BM25 over the same passages (bm25s, indexed before), as many at most as text in the prompt;
- the whole document in the prompt, read in chunks of 512 by the stock model, --full times.

Decoding: one token after the other from the memory, by the same reader without a memory, by the
stock model without one. Scoring: the reader's selector over --index-tokens (random landmarks, words
of books), as a part of the time to the first token. Taken in turns; medians, of the clock and of
this process's own time on the processor, which others do not disturb; the model computes in --dtype
everywhere. With --keep text the memory holds no keys and values of the document, nor those that a
question before computed: the text of passages is read through the model for each question.

    python -m benchmarks.real.speed --text books-test.jsonl.zst --model smollm2/ --work real/
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn.functional import normalize

from benchmarks.common.memories import drop_cache
from benchmarks.common.options import add, prepare
from benchmarks.common.results import write_part
from benchmarks.common.stock import Stock
from benchmarks.common.tables import spread, table, tokens_number, tokens_text
from benchmarks.common.timing import in_fresh_process, interleaved, paired_ratio, timed
from benchmarks.real.baselines import Words
from benchmarks.real.blocks import Blocks, passages
from benchmarks.real.choice_at_1m import Found
from benchmarks.real.hay import Hay
from benchmarks.real.memory import Memory
from benchmarks.real.methods import best_first
from benchmarks.real.passage_model import parser, passage_model
from benchmarks.real.plan import Question
from benchmarks.real.prompting import Prompted, tokenizer_of
from memstore import MemoryStore
from memstore.disk.format.block_words import BlockWords
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.index.late_interaction import INT8_STEPS
from memstore.model.passages.activation_capture import capture
from memstore.model.passages.passage_session import PassageSession
from memstore.training.corpus import read_documents

CHUNK = 512  # tokens that the stock model reads at once
QUESTION = "What is the name of the old man who lives in the house near the river?"


class Asked:
    """A memory that is asked."""

    def __init__(self, memory: Memory, document: str, settings: dict[str, Any]) -> None:
        self.memory, self.reader = memory, memory.reader
        self.document, self.settings = document, settings

    def session(self, retrieve: bool = True) -> PassageSession:
        session: PassageSession = self.reader.session(
            self.memory.store, [self.document], retrieve=retrieve, **self.settings
        )
        return session

    def chosen(self) -> list[int]:
        """The passages that are read."""
        ids, words = self.reader.turn_ids(QUESTION, first=True)
        with self.session() as session:
            return [one.block for one in session.choose(QUESTION, ids, words)]

    def first_token(self) -> int:
        """The first token of an answer."""
        with self.session() as session:
            state = session.ask(QUESTION, lambda: None)
            return int(session.logits(state[None]).argmax())

    def decode(self, tokens: int, retrieve: bool) -> float:
        """Tokens a second of the processor, after the question."""
        with self.session(retrieve) as session:
            state = session.ask(QUESTION, lambda: None)
            token = int(session.logits(state[None]).argmax())
            began = time.process_time()
            for _ in range(tokens):
                state = session.read_token(token)
                token = int(self.reader.logits(state[None], quantized=True).argmax())
            return tokens / (time.process_time() - began)

    def parts(self) -> dict[str, Callable[[], Any]]:
        """What a question to the first token is made of, each to be done by itself."""
        reader = self.reader
        ids, words = reader.turn_ids(QUESTION, first=True)
        captured = capture(reader, ids).part(words)
        document = self.memory.store.document(self.document)
        scope = [(document.id, 0, document.blocks)]
        with self.session() as reading:
            chosen = reading.choose(QUESTION, ids, words)

        def walk() -> None:
            with self.session(retrieve=False) as session:
                session.read(chosen)
                session.feed(ids)

        def only_read() -> None:
            with self.session(retrieve=False) as session:
                session.read(chosen)

        return {
            "a session": lambda: self.session().close(),
            "the question to the tap": lambda: capture(reader, ids),
            "its blocks' scores": lambda: reader.selector.scores(
                captured, QUESTION, self.memory.store.retrieval, scope
            ),
            f"a session that reads {len(chosen)} blocks": only_read,
            "the same, and the question through all layers": walk,
        }


def main() -> None:
    options = read_options()
    prepare(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        prompted = Prompted(options.model, options.dtype)
        hay = Hay(
            lambda text: offsets(prompted, text),
            list(read_documents(options.text)),
            Random(f"speed {options.seed}"),
        )
        documents = {"book": hay.prose(options.length)}
        blocks = Blocks(passages(tokenizer_of(options.model)), documents)
        reader = reading(options)
        kept = "" if options.keep == "kv" else f"-{options.keep}"
        directory = work / f"speed-{options.dtype}-{options.length}-{options.seed}{kept}"
        with Memory(reader, directory, blocks) as memory:
            memory.read_in(["book"], options.keep)
            found = measure(memory, prompted, hay, options)
        fresh = [
            in_fresh_process(opened, options, directory) for _ in range(min(3, options.repeats))
        ]
    found["first"]["a new process, from opening the memory"] = fresh
    report(found, options)
    write_part(options, f"speed-{options.dtype}{kept}", found)


def read_options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--work", type=Path, help="keep the memory here")
    add(options, "--length", "32K", "tokens of the document", type=tokens_number)
    add(options, "--keep", "kv", "of the document's passages", choices=("kv", "text"))
    add(options, "--passages", [1, 4, 8], "that are read, by the memory and as text")
    add(options, "--full", 1, "times that the whole document is read in the prompt, 0 or more")
    add(options, "--tokens", 100, "decoded at a time")
    add(options, "--index-tokens", "1M", type=tokens_number)
    add(options, "--repeats", 9)
    given = options.parse_args()
    given.passages = sorted(set(given.passages))
    return given


def offsets(prompted: Prompted, text: str) -> list[tuple[int, int]]:
    """The characters of each token."""
    found = prompted.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans: list[tuple[int, int]] = found.offset_mapping
    return spans


def measure(
    memory: Memory,
    prompted: Prompted,
    hay: Hay,
    options: argparse.Namespace,
    document: str = "book",
) -> dict[str, Any]:
    most = max(options.passages)
    asked = Asked(memory, document, exactly(most))
    as_shipped = Asked(memory, document, {})
    stock, words = Stock(prompted.model, CHUNK), Words(memory.blocks)
    question = Question("", "", options.length, (document,), QUESTION, "", (), "all")
    scope = memory.blocks.scope([document])

    def by_words() -> int:
        scores = words.scores(question)
        best = sorted(best_first(scores)[:most].tolist())
        texts = memory.blocks.texts([scope[at] for at in best])
        return stock.read(prompted.ids(prompted.prompt(question, texts)))[1]

    def as_text(k: int) -> Callable[[], int]:
        """The passages that the memory reads, in the prompt."""
        of_k = Asked(memory, document, exactly(k))
        texts = memory.blocks.texts([(document, block) for block in of_k.chosen()])
        return lambda: stock.read(prompted.ids(prompted.prompt(question, texts)))[1]

    def whole() -> int:
        prompt = prompted.prompt(question, [memory.blocks.documents[document]])
        return stock.read(prompted.ids(prompt))[1]

    busy: dict[str, list[float]] = {}

    def seconds(name: str, work: Callable[[], Any]) -> Callable[[int], float]:
        def once(_: int) -> float:
            if options.keep == "text":  # of which nothing computed before may be held
                memory.reopen()
                asked.chosen()
            began = time.process_time()
            taken, _ = timed(work)
            busy.setdefault(name, []).append(time.process_time() - began)
            return taken

        return once

    scoring = choice_of(memory, hay, options.index_tokens)
    first = {
        _read(most): asked.first_token,
        _as_text(most): as_text(most),
        "memory, as it ships": as_shipped.first_token,
        "BM25 and its blocks as text": by_words,
        f"scores of {tokens_text(options.index_tokens)} tokens": scoring,
        **asked.parts(),
    }
    for k in options.passages[:-1]:
        first[_read(k)] = Asked(memory, document, exactly(k)).first_token
        first[_as_text(k)] = as_text(k)
    alone = prompted.ids(prompted.prompt(question, []))
    decoding: dict[str, Callable[[int], float]] = {
        "memory": lambda _: asked.decode(options.tokens, True),
        "the reader without memory": lambda _: asked.decode(options.tokens, False),
        "the stock model": lambda _: 1 / stock.decode(alone, options.tokens, time.process_time),
    }
    for work in first.values():
        work()
    taken = interleaved(
        {name: seconds(name, work) for name, work in first.items()}, options.repeats
    )
    decoded = interleaved(decoding, options.repeats)
    full = "the whole document in the prompt"
    if options.full:
        taken[full] = [seconds(full, whole)(repeat) for repeat in range(options.full)]
    return {"first": taken, "busy": busy, "decoding": decoded}


def reading(options: argparse.Namespace) -> HuggingFacePassageModel:
    """A reader that looks up whatever it is asked: the book does not answer the question, and the
    gate would skip what is to be timed.
    """
    reader = passage_model(options.model, options.dtype)
    reader.gate = None
    return reader


def exactly(k: int) -> dict[str, Any]:
    """Settings by which the best k blocks are read."""
    return {"top_k": k, "score_range": 1e9}


def _read(passages: int) -> str:
    return f"memory, {passages} passages"


def _as_text(passages: int) -> str:
    return f"the same {passages} as text"


def choice_of(memory: Memory, hay: Hay, tokens: int) -> Callable[[], Any]:
    """Scores all blocks of `tokens` tokens: landmarks by chance, words of books."""
    reader, form = memory.reader, memory.reader.keeps
    found, step = Found(form), min(tokens, 32 * 1024)  # not every book is longer
    generator = torch.Generator().manual_seed(0)
    counts = []
    for number in range(-(-tokens // step)):
        blocks = Blocks(memory.blocks.cut, {"": hay.prose(step)})
        texts = [blocks.text(block) for block in blocks.scope([""])]
        counts.append(len(texts))
        if form.heads:
            lengths = [len(reader.tokenizer.encode(text)) for text in texts]
            size = (sum(lengths), form.heads, form.width)
            units = normalize(torch.randn(size, generator=generator), dim=-1)
            kept = found.tokens.dtype
            landmarks = (units * INT8_STEPS).round() if kept == torch.int8 else units
            found.tokens.add(number, 0, landmarks.to(kept), lengths)
        if (words := reader.selector.words(texts)) is not None:
            found.words.add(number, 0, BlockWords.of(words))
    scope = [(number, 0, count) for number, count in enumerate(counts)]
    ids, words = reader.turn_ids(QUESTION, first=True)
    captured = capture(reader, ids).part(words)
    return lambda: reader.selector.scores(captured, QUESTION, found, scope)


def opened(options: argparse.Namespace, directory: Path) -> float:
    """Seconds from opening the memory to the first token of an answer, of a process that has done
    nothing but loading the model; the memory's pages are not in the page cache.
    """
    prepare(options.threads)
    reader = reading(options)
    drop_cache(directory)
    began = time.perf_counter()
    with (
        MemoryStore.open(directory, reader.signature, read_only=True) as store,
        reader.session(store, ["book"], **exactly(max(options.passages))) as session,
    ):
        state = session.ask(QUESTION, lambda: None)
        int(session.logits(state[None]).argmax())
        return time.perf_counter() - began


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    first, busy, decoding = found["first"], found["busy"], found["decoding"]
    own = _read(max(options.passages))
    memory = first[own]
    lines = []
    for name, seconds in first.items():
        line = [name]
        for taken, base in ((seconds, memory), (busy.get(name), busy[own])):
            if taken is None:
                line += ["", ""]
                continue
            median = statistics.median(taken)
            line += [f"{1000 * median:.0f}", f"{median / statistics.median(base):.2f}"]
        lines.append(line)
    print(f"to the first token, {tokens_text(options.length)} tokens, {options.dtype}\n")
    print(table(["what", "ms", "of the memory's", "ms of a core", "of the memory's"], lines))
    lines = []
    for k in options.passages:
        pairs = [(taken[_read(k)], taken[_as_text(k)]) for taken in (first, busy)]
        ms = [f"{1000 * statistics.median(taken):.0f}" for taken in pairs[0]]
        lines.append([k, *ms, *(spread(paired_ratio(*pair)) for pair in pairs)])
    head = ["passages", "memory, ms", "as text, ms", "memory's of it, time", "core"]
    print("\n" + table(head, lines))
    for kind, taken in (("time", first), ("core", busy)):
        rag = paired_ratio(taken[own], taken["BM25 and its blocks as text"])
        print(f"\nthe memory's against BM25's prompt in the same repeat, {kind}: {spread(rag)}")
    print()
    lines = [
        [name, f"{statistics.median(rates):.1f}", spread(paired_ratio(decoding["memory"], rates))]
        for name, rates in decoding.items()
    ]
    print(table(["decoding", "tokens a second of a core", "the memory's of these"], lines))


if __name__ == "__main__":
    main()
