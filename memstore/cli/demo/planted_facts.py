"""The demonstration: random facts hidden in a long real text, read once, then asked about by a new
process.
"""

import os
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from memstore.cli.demo.new_process import ask_in_new_process
from memstore.cli.demo.planted_text import Hidden, cut, draw_facts, hide, read_text
from memstore.cli.options.demo_options import DemoOptions
from memstore.cli.options.model_options import ModelOptions
from memstore.cli.terminal import console
from memstore.disk.format.document import SOURCE, Document
from memstore.errors import DocumentExists
from memstore.hf.models_by_name import MODEL_VARIABLE, reader_named
from memstore.model.landmark.checkpoint import SHIPPED_NAME
from memstore.model.landmark.landmark_api import LandmarkAPI
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.model.model_api import ModelAPI
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.open_options import on_device
from memstore.temporary import temporary_directory
from memstore.training.recipes.facts import Fact

# read by default: by the model that ships, and by one that takes its time
TOKENS, FEWER_TOKENS = 1 << 17, 1 << 13
DOCUMENT = "demo"
# Its row says so where others say which file they were read from; what is put in its place, or
# appended to it, says so no more.
_WRITTEN = {"written_by": "memstore demo"}


def run_planted(options: DemoOptions) -> dict[str, Any]:
    """Hide facts in a text, ingest it, ask about them in a new process; return plain values.

    tokens: None is 131,072 of Python's (8,192 with a Hugging Face model), or the whole of a file.
    Raises what ingesting and asking raise, and DocumentExists for a store that has a document of
    the same name already, which is another's.
    """
    planted = options.planted
    seed = SystemRandom().randrange(10**6) if planted.seed is None else planted.seed
    named = options.by.model or os.environ.get(MODEL_VARIABLE) or SHIPPED_NAME
    by = replace(options.by, model=named)
    reader = _reader(by)
    primed = isinstance(reader, LandmarkAPI)  # it answers in the words that it was trained with
    written, hidden = _hidden(reader, options, seed)
    if not primed:
        hidden = [each._replace(question=_as_typed(each.fact)) for each in hidden]
    with ExitStack() as stack:
        store = options.store
        if store is None:
            folder = stack.enter_context(temporary_directory("memstore-demo-"))
            store = folder / "memory"
        began = time.monotonic()
        document, file_bytes = _ingested(reader, by, store, written)
        reading_seconds = time.monotonic() - began
        console.note(
            f"read {document.tokens:,} tokens in {reading_seconds:.1f} s; asking in a new process"
        )
        began = time.monotonic()
        asked = [each.question for each in hidden]
        replies = ask_in_new_process(store, by, asked, "--document", DOCUMENT)
        asking_seconds = time.monotonic() - began
    rows = [
        _judge(each, reply, primed) for each, reply in zip(hidden, replies["answers"], strict=True)
    ]
    return {
        "right": sum(row["right"] for row in rows),
        "of": len(rows),
        "questions": rows,
        "seed": seed,
        "text": "Python's own documentation" if options.text is None else str(options.text),
        "tokens": document.tokens,
        "bytes": file_bytes,
        "tiers": {
            tier: {
                count: sum(row["tiers"][tier][count] for row in rows)
                for count in ("hits", "misses", "bytes")
            }
            for tier in rows[0]["tiers"]
        },
        "lookups": {
            kind: sum(row["lookups"][kind] for row in rows) for kind in ("done", "skipped")
        },
        "reading_seconds": round(reading_seconds, 3),
        "open_seconds": replies["open_seconds"],
        "asking_seconds": round(asking_seconds, 3),
        "seconds_per_question": round(sum(row["seconds"] for row in rows) / len(rows), 4),
    }


def _hidden(reader: ModelAPI, options: DemoOptions, seed: int) -> tuple[str, list[Hidden]]:
    """The text with its facts, and these."""
    most = TOKENS if isinstance(reader, LandmarkModel) else FEWER_TOKENS
    planted = options.planted
    tokens = planted.tokens or (most if options.text is None else None)
    plain = cut(reader, read_text(options.text), tokens)
    return hide(Random(seed + 1), plain, draw_facts(Random(seed), min(options.questions or 20, 25)))


def _ingested(
    reader: ModelAPI, by: ModelOptions, store: Path, written: str
) -> tuple[Document, int]:
    """The document in a memory, and the bytes of its file."""
    with _memory(store, reader, by) as memory, console.reading("reading") as show:
        _check_ours(memory)
        document = reader.ingest(
            Text(written, DOCUMENT, source=_WRITTEN),
            memory,
            mode="replace" if memory.has(DOCUMENT) else "new",
            progress=lambda state: show(state.characters, state.total_characters, state.tokens),
        )
        return document, memory.stats()["file_bytes"]


def print_planted(result: dict[str, Any]) -> None:
    """The table of questions and the figures, the last line being `facts right: N of M`."""
    rows: list[tuple[object, ...]] = [
        ("question", "expected", "answer", "", "found at", "tier", "seconds")
    ]
    for row in result["questions"]:
        rows.append(
            (
                row["question"],
                row["expected"],
                console.shorten(row["answer"], 24),
                "ok" if row["right"] else "wrong",
                f"{row['span'][0]:,}-{row['span'][1]:,}" if row["span"] else "-",
                row["tier"],
                f"{row['seconds']:.3f}",
            )
        )
    console.say(console.columns(rows))
    tiers = "; ".join(
        f"{name} {counts['hits']:,} hits, {counts['misses']:,} misses"
        for name, counts in result["tiers"].items()
    )
    lookups = result["lookups"]
    times = result["reading_seconds"] / result["seconds_per_question"]
    console.say("")
    console.say(f"text: {result['text']}, {result['tokens']:,} tokens; seed {result['seed']}")
    console.say(f"memory on disk: {console.size(result['bytes'])}")
    console.say(f"tiers: {tiers}")
    console.say(f"lookups: {lookups['done']:,} done, {lookups['skipped']:,} skipped by the gate")
    console.say(
        f"time: {result['reading_seconds']:.1f} s to read the text once (ingest, storing "
        "included); "
        f"{result['seconds_per_question']:.3f} s a question, {times:,.0f}x less than reading it "
        "again; "
        f"{result['open_seconds']:.1f} s for the new process to load the model and open the memory"
    )
    console.say(f"facts right: {result['right']} of {result['of']}")


# The memory and the new process


def _reader(by: ModelOptions) -> ModelAPI:
    return reader_named(by.model or SHIPPED_NAME, compute=by.compute, own_process=True)


def _memory(path: Path, reader: ModelAPI, by: ModelOptions) -> MemoryStore:
    options = on_device({}, by.device)
    if (path / "data.mdb").exists():
        return MemoryStore.open(path, reader.signature, **options)
    return MemoryStore.create(
        path, reader.signature, codec=reader.codec, selector=reader.keeps, **options
    )


def _check_ours(memory: MemoryStore) -> None:
    """Refuse to replace somebody's own document. Raises DocumentExists."""
    if memory.has(DOCUMENT) and memory.document(DOCUMENT).metadata.get(SOURCE) != _WRITTEN:
        raise DocumentExists(
            f"{memory.place} has a document {DOCUMENT!r} that no demonstration of this version "
            "wrote; give --store another directory, or forget it first"
        )


def _as_typed(fact: Fact) -> str:
    """The question as a person types it, of which nothing begins the answer."""
    return f"What is the {fact.attribute}{'' if fact.is_pass_key else f' of the {fact.entity}'}?"


def _judge(hidden: Hidden, reply: dict[str, Any], primed: bool) -> dict[str, Any]:
    """Right is an answer that begins with the value and does not go on as another value; that has
    it somewhere, where the question does not begin the answer.
    """
    answer = reply["text"].strip()
    value = rf"(?<!\w){re.escape(hidden.fact.value)}(?!\w)"
    right = re.match(value, answer) if primed else re.search(value, answer)
    best = reply["sources"][0] if reply["sources"] else None
    return {
        "question": hidden.question,
        "expected": hidden.fact.value,
        "answer": answer,
        "right": right is not None,
        "hidden_at": hidden.place,
        "span": best["span"] if best else None,
        "tier": best["reads"][0]["tier"] if best else "-",
        "sources": reply["sources"],
        "tiers": reply["tiers"],
        "lookups": reply["lookups"],
        "seconds": reply["seconds"],
    }
