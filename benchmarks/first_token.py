"""How soon does an answer begin, from a memory and from the same passages as text?

A document is in a memory. For each number of passages, ways to the first token of an answer, taken
in turns:

- memory: a session chooses the passages, leases them from a tier and reads the question;
- text: the same search, then the stock model reads the same tokens as a prompt;
- found text: that prompt, found before the clock starts, as by a search that takes no time;
- llama.cpp, with --llama-python and --gguf: the same prompt, found and tokenised before, is read in
  a process of its own, with flash attention.

Also, with a model from a directory or package: the first answer of a new process whose memory file
the page cache has dropped.

    python -m benchmarks.first_token --model smollm2 --text books-test.jsonl.zst
    python -m benchmarks.first_token --shape 8B --device cuda --passages 8 64 256

--shape takes random weights in the shape of a Llama 3 model, with a reading adapter of zeros.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.memories import drop_cache
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.random_decoder import SHAPES, made_up_words, random_decoder
from benchmarks.common.results import write
from benchmarks.common.stock import Stock
from benchmarks.common.tables import spread, table
from benchmarks.common.timing import in_fresh_process, interleaved, paired_ratio, timed
from benchmarks.real.llama_cpp import LlamaCpp
from benchmarks.real.passage_model import DTYPES, passage_model
from memstore import MemoryStore
from memstore.block import BlockKey
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.reading_adapter import ReadingAdapter
from memstore.model.passages.adaptation import Adaptation
from memstore.model.passages.passage_session import PassageSession
from memstore.model.passages.selector import Selector
from memstore.training.corpus import read_documents

QUESTION = "What is the name of the old man who lives in the house near the river?"
COLD = 8  # passages that a new process reads
FRESH = 3  # new processes
LONGEST_PROMPT = 8192  # tokens that llama.cpp has room for, as many as SmolLM2 was trained for
_EACH = 96  # tokens of the document for each passage that is read: it has more passages than that


class Asked:
    """A document of a memory, asked so that `passages` of its passages are read."""

    def __init__(
        self, reader: HuggingFacePassageModel, store: MemoryStore, question: str, passages: int
    ) -> None:
        self._reader, self._store, self._question = reader, store, question
        self._stock = Stock(reader.model, 512 if reader.device.type == "cpu" else 4096)
        self._passages = passages

    def session(self) -> PassageSession:
        session: PassageSession = self._reader.session(
            self._store, ["book"], top_k=self._passages, score_range=1e9
        )
        return session

    def from_memory(self) -> int:
        """The first token of an answer."""
        with self.session() as session:
            state = session.ask(self._question, lambda: None)
            return int(session.logits(state[None]).argmax())

    def from_text(self, prompt: Sequence[int] | None = None) -> int:
        """The stock model's first token after the same passages in its prompt. prompt: its ids, if
        they are known.
        """
        return self._stock.read(self.prompt() if prompt is None else prompt)[1]

    def prompt(self) -> list[int]:
        """Ids of the passages that are found and of the question, as the model's own prompt."""
        document = self._store.document("book")
        found = self._reader.search(
            self._question, self._store, documents=["book"], top_k=self._passages
        )
        ids = [*self._reader.prefix_ids]
        for block in sorted(source.block for source in found):
            (passage,) = self._store.passages(document.id, block, block + 1)
            ids += passage.ids.tolist()
        turn, _ = self._reader.turn_ids(self._question, first=True)
        return [*ids, *self._reader.separator_ids, *turn]

    def read(self) -> list[tuple[int, int]]:
        """Document and block of the passages that are read."""
        with self.session() as session:
            session.ask(self._question, lambda: None)
            return [(one.document, one.block) for one in session.chosen]

    def leave_device(self) -> None:
        """Have the passages in the host tier alone."""
        places = self._store.retrieval.stored_at(self.read())
        device = self._store.tiers.device
        assert device is not None
        device.drop([BlockKey(at[0], 0, at[1], 0) for at in places if at is not None])


def main() -> None:
    options = read_options()
    prepare(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.work or Path(temporary)) / "memory"
        reader = model_of(options)
        with opened(options, reader, directory) as store:
            found = measure(reader, store, options)
        if options.shape is None and options.device is None:
            found["new_process"] = [
                in_fresh_process(cold, options, directory) for _ in range(FRESH)
            ]
    print(report(found))
    write(options, found)
    if options.plot is not None:
        draw(found, options.plot)


def read_options() -> argparse.Namespace:
    options = plain_parser(__doc__)
    options.add_argument("--model", help="a directory or package of Hugging Face's make")
    options.add_argument("--shape", choices=SHAPES, help="of random weights, without --model")
    options.add_argument("--text", nargs="+", help="books, with --model: .jsonl.zst or .txt")
    options.add_argument("--device", help="of the model and a tier of its own, such as cuda")
    add(options, "--dtype", "float32", "of the weights", choices=DTYPES)
    add(options, "--codec", "int8", "of the memory")
    add(options, "--passages", [1, 4, 8, 16, 32], "that are read")
    add(options, "--repeats", 9)
    options.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    options.add_argument("--gguf", help="the same weights, for llama.cpp")
    options.add_argument("--work", type=Path, help="keep the memory here")
    options.add_argument("--plot", type=Path, help="draw the table into this PNG (matplotlib)")
    given = options.parse_args()
    if (given.model is None) == (given.shape is None) or (given.model and not given.text):
        options.error("name a --model with --text, or a --shape")
    if (given.llama_python is None) != (given.gguf is None):
        options.error("name --llama-python and --gguf together")
    return given


def model_of(options: argparse.Namespace) -> HuggingFacePassageModel:
    """The model under test, without a gate: the document does not answer the question."""
    if options.model is not None:
        device = options.device or "cpu"
        reader = passage_model(options.model, options.dtype, device=device)
    else:
        tokens = 4096 + _EACH * max(options.passages)
        place = torch.device(options.device or "cpu")
        dtype = DTYPES[options.dtype]
        model, tokenizer = random_decoder(SHAPES[options.shape], tokens, place, dtype, options.seed)
        reader = HuggingFacePassageModel(
            model,
            tokenizer,
            Adaptation(Selector()),
            weights=f"random {options.shape}",
            adapter=ReadingAdapter.untrained(model, 16),
        )
    reader.gate = None
    return reader


def opened(
    options: argparse.Namespace, reader: HuggingFacePassageModel, directory: Path
) -> MemoryStore:
    """The memory, new or kept from before."""
    more: dict[str, Any] = {"host_budget": 4 << 30}
    if options.device is not None:
        more |= {"device": options.device, "device_budget": 4 << 30}
    if directory.exists():
        return MemoryStore.open(directory, reader.signature, **more)
    more |= {"selector": reader.keeps, "codec": options.codec}
    return MemoryStore.create(directory, reader.signature, **more)


def measure(
    reader: HuggingFacePassageModel, store: MemoryStore, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds to the first token by way and number of passages."""
    text, question = text_of(reader, options)
    tokens, rival = {}, None
    if options.llama_python is not None:
        rival = LlamaCpp(
            options.llama_python, options.gguf, options.threads, flash=True, context=LONGEST_PROMPT
        )
    if not store.ready():
        reader.ingest(text, store, name="book", keep="kv")
    ways: dict[str, Callable[[int], float]] = {}
    for count in options.passages:
        asked = Asked(reader, store, question, count)
        read = asked.read()
        tokens[str(count)] = sum(
            len(one.ids) for at in read for one in store.passages(at[0], at[1], at[1] + 1)
        )
        prompt = asked.prompt()
        ways[f"text, {count}"] = seconds(asked.from_text)
        ways[f"found text, {count}"] = seconds(partial(asked.from_text, prompt))
        if rival is not None:
            written = reader.tokenizer.decode(prompt)
            ways[f"llama.cpp, {count}"] = partial(first_of, rival, written)
        if options.device is None:
            ways[f"host tier, {count}"] = seconds(asked.from_memory)
        else:
            ways[f"device tier, {count}"] = seconds(asked.from_memory)
            ways[f"host tier, {count}"] = seconds(asked.from_memory, asked.leave_device)
    for way in ways.values():
        way(0)  # warm up
    return {"tokens": tokens, "seconds": interleaved(ways, options.repeats)}


def seconds(
    work: Callable[[], int], before: Callable[[], None] = lambda: None
) -> Callable[[int], float]:
    """A measurement of `work`; what comes before does not count."""

    def once(_: int) -> float:
        before()
        return timed(work)[0]

    return once


def first_of(rival: LlamaCpp, prompt: str, _: int) -> float:
    """Seconds that llama.cpp takes to the first token after a prompt."""
    return rival.answer(prompt, 0)[0]


def text_of(reader: HuggingFacePassageModel, options: argparse.Namespace) -> tuple[str, str]:
    """A document of more passages than are read, and a question of it."""
    wanted = _EACH * max(options.passages)
    if options.model is None:
        text = made_up_words(wanted, options.seed)
        return text, f"What of {' '.join(text.split()[100:112])}"
    books = " ".join(getattr(one, "text", one) for one in read_documents(options.text))
    ids = reader.tokenizer.encode(books[: 8 * wanted])[:wanted]
    return reader.tokenizer.decode(ids), QUESTION


def cold(options: argparse.Namespace, directory: Path) -> float:
    """Seconds from opening the memory to the first token, in a process that has loaded the model;
    the memory's pages are not in the page cache.
    """
    prepare(options.threads)
    reader = model_of(options)
    drop_cache(directory)
    began = time.perf_counter()
    with MemoryStore.open(directory, reader.signature, read_only=True) as store:
        Asked(reader, store, QUESTION, COLD).from_memory()
        return time.perf_counter() - began


def report(found: dict[str, Any]) -> str:
    """The table: a number of passages a line."""
    tiers = sorted({name.split(",")[0] for name in found["seconds"]} - {"text"})
    lines = []
    for count, tokens in found["tokens"].items():
        text = found["seconds"][f"text, {count}"]
        line: list[object] = [count, tokens, f"{1000 * statistics.median(text):.0f}"]
        for tier in tiers:
            taken = found["seconds"][f"{tier}, {count}"]
            line += [f"{1000 * statistics.median(taken):.0f}", spread(paired_ratio(taken, text))]
        lines.append(line)
    head = ["passages", "tokens", "text, ms"]
    parts = [table(head + [f"{t}{x}" for t in tiers for x in (", ms", " / text")], lines)]
    if "new_process" in found:
        fresh = 1000 * statistics.median(found["new_process"])
        parts.append(f"new process, {COLD} passages, page cache cold: {fresh:.0f} ms")
    return "\n\n".join(parts)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw milliseconds to the first token by tokens read."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    tokens = list(found["tokens"].values())
    colours = {"text": "#b03a48", "host tier": "#1f5fa8", "device tier": "#2e8b57"}
    colours["llama.cpp"] = "#c98a1b"
    labels = {"text": "the same passages as text", "llama.cpp": "the same by llama.cpp, no search"}
    for way in sorted({name.split(",")[0] for name in found["seconds"]} - {"found text"}):
        times = [
            1000 * statistics.median(found["seconds"][f"{way}, {count}"])
            for count in found["tokens"]
        ]
        label = labels.get(way, f"memory, {way}")
        axes.plot(tokens, times, marker="o", color=colours[way], label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens read")
    axes.set_ylabel("first token, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
