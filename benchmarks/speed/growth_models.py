"""A model that reads a text in, is asked, and goes on: what `growth` measures of one model and one
length, and of models of random weights by their size.
"""

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn

from benchmarks.common.memories import drop_cache
from benchmarks.common.options import prepare
from benchmarks.common.timing import in_fresh_process
from benchmarks.real.speed import QUESTION
from benchmarks.speed.growth_limits import (
    Machine,
    Seconds,
    measured,
    middle,
    read_from_disk,
    resident,
)
from benchmarks.speed.growth_weights import Weights, loaded
from memstore import MemoryStore
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.texts.source_text import Text

PLENTY = 8.0  # seconds of a core of one reading, after which it is not repeated


def text_of(reader: Any, books: Iterable[str], tokens: int) -> tuple[str, int]:
    """A text of so many tokens, and how many they are."""
    ids: list[int] = []
    for book in books:
        ids += reader.tokenizer.encode(book)
        if len(ids) >= tokens:
            break
    return reader.tokenizer.decode(ids[:tokens]), len(ids[:tokens])


class Asked:
    """A reader that is asked over a memory, and goes on."""

    def __init__(self, reader: Any, store: MemoryStore, tokens: int) -> None:
        self.reader, self.store, self.tokens = reader, store, tokens

    def first_token(self) -> None:
        """From the question as a string to the first token."""
        with self.reader.session(self.store) as session:
            state = session.ask(QUESTION, lambda: None)
            self.reader.logits(state[None], quantized=True).argmax().item()

    def decode(self) -> tuple[Seconds, float]:
        """Seconds a token behind a question; lookups a token, as a share of all that could be."""
        with self.reader.session(self.store) as session:
            state = session.ask(QUESTION, lambda: None)
            token = self._next(state)
            done, skipped = session.lookups.done, session.lookups.skipped
            began, busy = perf_counter(), process_time()
            for _ in range(self.tokens):
                token = self._next(session.read_token(token))
            clock, core = perf_counter() - began, process_time() - busy
            done, skipped = session.lookups.done - done, session.lookups.skipped - skipped
        looked = done / (done + skipped) if done else 0.0
        return {"clock": clock / self.tokens, "core": core / self.tokens}, looked

    def _next(self, state: torch.Tensor) -> int:
        return int(self.reader.logits(state[None], quantized=True).argmax())


def created(reader: Any, path: Path) -> MemoryStore:
    """A new memory, as the command line makes one."""
    kept = {"codec": reader.codec, "selector": reader.keeps}
    return MemoryStore.create(path, reader.signature, **kept)


def read_in(reader: Any, text: str, path: Path) -> None:
    """Read a text into a new memory."""
    shutil.rmtree(path, ignore_errors=True)
    with created(reader, path) as store:
        reader.ingest(Text(text, "book"), store)


def reading_in(
    reader: Any, machine: Machine, text: str, path: Path, repeats: int
) -> dict[str, Seconds]:
    """Seconds to read a text in, and of the machine's own works."""
    few = text[:8000]
    read_in(reader, few, path)
    work = partial(read_in, reader, text, path)
    trial = measured({"": work}, 1, warm=False)[""]
    works: dict[str, Callable[[], object]] = {"read in": work, **machine.works}
    if trial["core"] < PLENTY:
        return measured(works, min(3, repeats), warm=False)
    return {"read in": trial, **measured(machine.works, repeats)}


def decoding(asked: Asked, machine: Machine, repeats: int) -> dict[str, Any]:
    """Seconds to the first token and of every next one, and of the machine's own works."""
    steps: list[Seconds] = []
    looked: list[float] = []

    def decode() -> None:
        seconds, share = asked.decode()
        steps.append(seconds)
        looked.append(share)

    works = {"first token": asked.first_token, "decode": decode, **machine.works}
    found: dict[str, Any] = dict(measured(works, repeats))
    found["decode"] = middle(steps[1:])
    return {"seconds": found, "looked_up": sum(looked[1:]) / len(looked[1:])}


def index_bytes(reader: Any, document: Any) -> int:
    """Bytes that are read to score every block of a document once, in all layers."""
    shape, keeps = reader.shape, reader.keeps
    if keeps is None:
        a_block = shape.num_kv_heads * shape.head_dim * 4
        return len(shape.memory_layers) * document.blocks * a_block
    return document.tokens * keeps.heads * keeps.width * (1 if keeps.dtype == "int8" else 4)


def tokens_through(reader: Any, first_token: Callable[[], None]) -> float:
    """Tokens that go through a layer until the first one of an answer, in the mean of the layers:
    those of the question, and of passages that are read behind another one's keys and values.
    """
    if not isinstance(reader, HuggingFacePassageModel):
        return float(len(reader.question_ids(QUESTION)))
    layers, count = reader.model.get_decoder().layers, 0

    def counted(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal count
        states = given[0] if given else named["hidden_states"]
        count += states.shape[0] * states.shape[1]

    hooks = [one.register_forward_pre_hook(counted, with_kwargs=True) for one in layers]
    first_token()
    for hook in hooks:
        hook.remove()
    return count / len(layers)


def measure(
    reader: Any, text: str, path: Path, options: Any, disk: dict[str, float]
) -> dict[str, Any]:
    """A point: everything of one model and one text but opening."""
    weights = Weights(reader)
    machine = Machine(weights.width, weights.inner, weights.dtype)
    reading = reading_in(reader, machine, text, path, options.repeats)
    with MemoryStore.open(path, reader.signature, read_only=True) as store:
        (document,) = store.ready()
        asked = Asked(reader, store, options.decoded)
        question = tokens_through(reader, asked.first_token)
        found = decoding(asked, machine, options.repeats)
        searched = index_bytes(reader, document)
    weights = Weights(reader)  # those of fewer bits are there now
    limits = machine.limits(found["seconds"]) | disk
    flops, stream = machine.limits(reading)["flop_per_second"], limits["bytes_per_second"]
    stored = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    seconds = {"read in": reading["read in"], **found["seconds"]}
    tokens, looked = document.tokens, found["looked_up"] if reader.keeps is None else 0.0
    floors = {
        "read in": 2 * weights.layers * tokens / flops,
        "first token": max(2 * weights.layers * question / flops, weights.generating / stream)
        + searched / stream,
        "decode": (weights.generating + looked * searched) / stream,
    }
    shares = {name: floor / seconds[name]["core"] for name, floor in floors.items()}
    shares["written"] = document.bytes / seconds["read in"]["clock"] / disk["disk_written"]
    return {
        "x": tokens,
        "tokens": tokens,
        "parameters": weights.all,
        "weights_read": weights.generating,
        "index_bytes": searched,
        "tokens_to_first": question,
        "looked_up": looked,
        "bytes_per_token": document.bytes / tokens,
        "file_bytes_per_token": stored / tokens,
        "seconds": seconds,
        "limits": limits | {"flop_per_second_reading_in": flops},
        "shares": shares,
    }


def opening(name: str, path: Path, times: int) -> dict[str, dict[str, float]]:
    """Of a fresh process: seconds to open a memory, and to list its documents then, its pages in
    the page cache (warm) or not; and from opening to a first token, the model loaded. Medians,
    of `first` with what has to be imported.
    """
    return in_fresh_process(_opening, name, path, times)


def _opening(name: str, path: Path, times: int) -> dict[str, dict[str, float]]:
    prepare(1)
    reader = loaded(name)
    found: dict[str, dict[str, float]] = {}
    for way, cold in (("first", False), ("cold", True), ("warm", False)):
        found[way] = middle([_opened(path, cold) for _ in range(times)])
    answers = []
    for _ in range(times):
        busy, began = process_time(), perf_counter()
        with MemoryStore.open(path, reader.signature, read_only=True) as store:
            Asked(reader, store, 0).first_token()
            answers.append({"clock": perf_counter() - began, "core": process_time() - busy})
    found["to first token"] = middle(answers) | resident()
    return found


def _opened(path: Path, cold: bool) -> dict[str, float]:
    if cold:
        drop_cache(path)
    read, began, busy = read_from_disk(), perf_counter(), process_time()
    with MemoryStore.open(path, read_only=True) as store:
        opened, opened_core = perf_counter(), process_time()
        store.documents()
        listed, listed_core = perf_counter(), process_time()
    return {
        "open": opened - began,
        "open_core": opened_core - busy,
        "list": listed - opened,
        "list_core": listed_core - opened_core,
        "from_disk": read_from_disk() - read,
    }
