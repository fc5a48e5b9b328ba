"""How fast does a passage model generate from a memory, compared with llama.cpp and its weights?

llama.cpp runs by llama-cpp-python under an interpreter that has it (--llama-python), in a process
of its own that is asked in turns with the memory; it gets the text that the memory reads as its
prompt, before the clock starts. The last of --weights is measured once more while an answer's
sources are collected. Tokens a second of --tokens after the first two, greedy, by the clock and by
processor time. The floor is reading the weights once: their bytes as they are multiplied, at the
rate at which this machine reads main memory in the same turn.

    python -m benchmarks.real.llama_cpp --text books-val.jsonl.zst --model smollm2 \
        --llama-python venv/bin/python --gguf SmolLM2-135M-Instruct.Q4_1.gguf
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.common.options import add, prepare
from benchmarks.common.results import write
from benchmarks.common.tables import table
from benchmarks.real.passage_model import parser, passage_model
from memstore import MemoryStore
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.passages.passage_session import PassageSession
from memstore.model.session import Continuation, OnRead, Trace, draw
from memstore.training.corpus import read_documents

QUESTION = "What does the text say of it, and what follows?"
TEXT = 40_000  # characters of a book
STREAM = 256 << 20  # bytes; many times what a processor's caches hold
TOLD = ", with sources"

RIVAL = """
import json, sys, time
from llama_cpp import Llama
path, threads, flash, context = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "flash", sys.argv[4]
llama = Llama(path, n_ctx=int(context), n_threads=threads, n_threads_batch=threads,
              flash_attn=flash, verbose=False)
print("ready", flush=True)
for line in sys.stdin:
    given = json.loads(line)
    ids = llama.tokenize(given["prompt"].encode(), special=True)
    llama.reset()
    tokens, began = llama.generate(ids, temp=0.0, reset=True), time.perf_counter()
    next(tokens)
    first = time.perf_counter() - began
    next(tokens)
    clock, busy = time.perf_counter(), time.process_time()
    for _ in range(given["tokens"]):
        next(tokens)
    print(json.dumps([first, time.perf_counter() - clock, time.process_time() - busy]), flush=True)
"""


class Taken(NamedTuple):
    """Seconds a token: by the clock, and on the processor."""

    clock: float
    busy: float


class LlamaCpp:
    """llama.cpp in a process of its own, under a Python that has llama-cpp-python."""

    def __init__(
        self, python: str, gguf: str, threads: int, *, flash: bool, context: int = 4096
    ) -> None:
        """context: tokens of the longest prompt with its answer. Raises SystemExit."""
        given = [python, "-c", RIVAL, gguf, str(threads), "flash" if flash else "plain"]
        try:
            self._process = subprocess.Popen(
                [*given, str(context)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise SystemExit(f"cannot run {python}: {error.strerror}") from None
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{python} runs no llama-cpp-python")

    def answer(self, prompt: str, tokens: int) -> tuple[float, Taken]:
        """Read a prompt and generate. Returns the seconds to the first token, and what each of
        `tokens` after the second took.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"prompt": prompt, "tokens": tokens}), file=self._process.stdin)
        self._process.stdin.flush()
        first, clock, busy = json.loads(self._process.stdout.readline())
        return first, Taken(clock / max(1, tokens), busy / max(1, tokens))


def main() -> None:
    options = read_options()
    prepare(options.threads)
    text = next(iter(read_documents(options.text)))[:TEXT]
    readers = {
        weights: passage_model(options.model, options.dtype, weights=weights)
        for weights in options.weights
    }
    with tempfile.TemporaryDirectory() as folder:
        first = next(iter(readers.values()))
        path = Path(folder) / "memory"
        with MemoryStore.create(path, first.signature, selector=first.keeps) as store:
            first.ingest(text, store, name="book")
            prompt = prompt_of(first, store, options.passages)
            turns: dict[str, Callable[[], Taken]] = {
                name: memory_turn(reader, store, options, told=name.endswith(TOLD))
                for name, reader in ways(readers).items()
            }
            turns |= {
                f"llama.cpp{', flash attention' if flash else ''}": rival_turn(
                    options, prompt, flash
                )
                for flash in (False, True)
            }
            turns["reads"] = reading_turn()
            rounds = [
                {name: turn() for name, turn in turns.items()} for _ in range(options.rounds + 1)
            ][1:]  # the first one is warm-up
    sizes = {name: weight_bytes(reader) for name, reader in ways(readers).items()}
    print(report(rounds, sizes))
    write(options, {"rounds": rounds, "bytes": sizes})


def read_options() -> argparse.Namespace:
    options = parser(__doc__, dtype="bfloat16")
    options.add_argument("--gguf", required=True, help="the same weights, for llama.cpp")
    options.add_argument("--llama-python", required=True, help="a Python that has llama-cpp-python")
    add(options, "--weights", ["full", "int8", "auto"], "that tokens are generated with")
    add(options, "--passages", 4, "that are read")
    add(options, "--tokens", 48, "that are generated")
    add(options, "--rounds", 9, "turns of each")
    return options.parse_args()


def ways(readers: Mapping[str, HuggingFacePassageModel]) -> dict[str, HuggingFacePassageModel]:
    """The model by the name of a way to generate: with each kind of weights, and with the last kind
    and sources.
    """
    named = {f"memory, {weights}": reader for weights, reader in readers.items()}
    last, reader = [*named.items()][-1]
    return named | {f"{last}{TOLD}": reader}


def session_of(
    reader: Any, store: MemoryStore, passages: int, on_read: OnRead | None = None
) -> PassageSession:
    """A session that reads `passages` passages for every question."""
    session: PassageSession = reader.session(
        store, ["book"], on_read=on_read, top_k=passages, score_range=1e9, caution=0.0
    )
    return session


def prompt_of(reader: HuggingFacePassageModel, store: MemoryStore, passages: int) -> str:
    """The text of what the memory reads and of the question, as the model's own prompt."""
    with session_of(reader, store, passages) as session:
        session.ask(QUESTION, lambda: None)
        ids = [
            token
            for one in session.chosen
            for passage in store.passages(one.document, one.block, one.block + 1)
            for token in passage.ids.tolist()
        ]
    local, _ = reader.turn_ids(QUESTION, first=True)
    return reader.tokenizer.decode([*reader.prefix_ids, *ids, *reader.separator_ids, *local])


def memory_turn(
    reader: HuggingFacePassageModel, store: MemoryStore, options: argparse.Namespace, *, told: bool
) -> Callable[[], Taken]:
    """Generates from the memory. told: also collect the sources of the answer, as `ask` does."""

    def turn() -> Taken:
        trace = Trace(reader)
        with session_of(reader, store, options.passages, trace if told else None) as session:
            trace.begin(session)
            state = session.ask(QUESTION, trace.start)
            # goes on behind the end of a turn, as llama.cpp does
            tokens = trace.tokens_of(Continuation(session, state, options.tokens + 3, draw))
            next(tokens), next(tokens)
            return taken(lambda: [next(tokens) for _ in range(options.tokens)], options.tokens)

    return turn


def rival_turn(options: argparse.Namespace, prompt: str, flash: bool) -> Callable[[], Taken]:
    """Generate by llama.cpp."""
    rival = LlamaCpp(options.llama_python, options.gguf, options.threads, flash=flash)
    return lambda: rival.answer(prompt, options.tokens)[1]


def weight_bytes(reader: HuggingFacePassageModel) -> int:
    """Bytes of weights that a generated token reads."""
    linear = [part for part in reader.model.modules() if isinstance(part, nn.Linear)]
    return round(sum(map(_bytes_read, linear)))


def _bytes_read(linear: Any) -> float:
    """Of one linear layer, in the form in which tokens are generated."""
    few, share = getattr(linear, "few", None), 1.0
    if few is None:
        return float(linear.weight.nbytes)
    if hasattr(few, "whole"):  # its rows of a matrix that several layers share
        few = few.whole
        rows = few.scales.numel() if hasattr(few, "scales") else few.grids.shape[1]
        share = linear.out_features / rows
    return share * sum(value.nbytes for value in vars(few).values())


def reading_turn() -> Callable[[], Taken]:
    """Read main memory: seconds a byte."""
    stream = torch.rand(STREAM // 4)  # nonzero: every page is its own
    return lambda: taken(stream.sum, STREAM)


def taken(work: Callable[[], object], units: int) -> Taken:
    """Seconds a unit of some work."""
    clock, busy = time.perf_counter(), time.process_time()
    work()
    return Taken((time.perf_counter() - clock) / units, (time.process_time() - busy) / units)


def report(rounds: list[dict[str, Taken]], sizes: dict[str, int]) -> str:
    """A line for each way, with medians of the rounds: its speed, the faster one of llama.cpp, the
    floor.
    """
    names = [name for name in rounds[0] if name != "reads"]
    rivals = [name for name in names if name not in sizes]
    lines = []
    for name in names:
        line: list[object] = [name]
        for way in (0, 1):
            line.append(f"{1 / statistics.median(one[name][way] for one in rounds):.1f}")
            best = (min(one[rival][way] for rival in rivals) / one[name][way] for one in rounds)
            line.append(f"{statistics.median(best):.2f}")
        floor = [sizes.get(name, 0) * one["reads"].clock / one[name].clock for one in rounds]
        line.append(f"{statistics.median(floor):.2f}" if name in sizes else "")
        line.append(f"{sizes[name] / 1e6:.0f}" if name in sizes else "")
        lines.append(line)
    reads = 1e-9 / statistics.median(one["reads"].clock for one in rounds)
    head = ["way", "tokens/s", "of llama.cpp's best", "tokens/s of CPU time", "of its best"]
    head += ["floor / this", "MB of weights"]
    return f"main memory is read at {reads:.1f} GB/s\n\n" + table(head, lines)


if __name__ == "__main__":
    main()
