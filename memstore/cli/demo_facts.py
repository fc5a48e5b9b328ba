"""The demonstration: random facts hidden in a long real text, read once, then asked about by a new
process.
"""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, NamedTuple

from memstore.child import python_command
from memstore.cli.readers import reader_for_command
from memstore.cli.terminal import console
from memstore.disk.format.document import SOURCE
from memstore.errors import DocumentExists, InvalidInput, MemstoreError
from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.landmark_api import LandmarkAPI
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.model.model_api import ModelAPI
from memstore.model.texts.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.training.recipes.facts import (
    Fact,
    Pools,
    draw_pass_key,
    pass_key_question,
    pass_key_statement,
    question,
    statement,
)

# read by default: by the model that ships, and by one that takes its time
TOKENS, FEWER_TOKENS = 1 << 17, 1 << 13
DOCUMENT = "demo"
# Its row says so where others say which file they were read from; what is put in its place, or
# appended to it, says so no more.
_WRITTEN = {"written_by": "memstore demo"}
# Things that numbers are given to; two facts may share one, never the thing it belongs to.
_ATTRIBUTES = (
    "code",
    "password",
    "number",
    "pin",
    "token",
    "serial number",
    "access code",
    "id",
    "room number",
)
# Where a sentence or a paragraph has just ended.
_BREAK = re.compile(r"(?<=[.!?])(?: |\n)|\n\n")
_STANDARD_LIBRARY = (
    "argparse",
    "asyncio.base_events",
    "collections",
    "datetime",
    "decimal",
    "doctest",
    "email.message",
    "inspect",
    "logging",
    "pathlib",
    "pickle",
    "statistics",
    "subprocess",
    "tarfile",
    "threading",
    "turtle",
    "typing",
    "unittest.mock",
    "urllib.request",
    "zipfile",
)


class Hidden(NamedTuple):
    """A fact, the sentence that was written into the text, its place there, and the question about
    it.
    """

    fact: Fact
    sentence: str
    place: int  # characters of the text before the sentence
    question: str


def run_demo(
    *,
    text: Path | None = None,
    seed: int | None = None,
    questions: int = 20,
    store: Path | None = None,
    tokens: int | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Hide `questions` facts in a text, ingest it, ask about them in a new process; return plain
    values.

    text: None takes Python's own documentation. seed: None draws one. store: None uses a directory
    that is removed again. tokens: how much of the text to read; None is 131,072 of Python's (8,192
    with a Hugging Face model), or the whole of a file. Raises what ingesting and asking raise, and
    DocumentExists for a store that has a document of the same name already, which is another's.
    """
    seed = SystemRandom().randrange(10**6) if seed is None else seed
    reader = reader_for_command(model)
    primed = isinstance(reader, LandmarkAPI)  # it answers in the words that it was trained with
    most = TOKENS if isinstance(reader, LandmarkModel) else FEWER_TOKENS
    plain = cut(reader, _read(text), tokens or (most if text is None else None))
    facts = draw_facts(Random(seed), questions)
    written, hidden = hide(Random(seed + 1), plain, facts)
    if not primed:
        hidden = [each._replace(question=_as_typed(each.fact)) for each in hidden]
    with ExitStack() as stack:
        if store is None:
            store = (
                Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memstore-demo-")))
                / "memory"
            )
        began = time.monotonic()
        with _memory(store, reader) as memory, console.reading("reading") as show:
            _check_ours(memory)
            document = reader.ingest(
                Text(written, DOCUMENT, source=_WRITTEN),
                memory,
                mode="replace" if memory.has(DOCUMENT) else "new",
                progress=lambda state: show(state.characters, state.total_characters, state.tokens),
            )
            file_bytes = memory.stats()["file_bytes"]
        reading_seconds = time.monotonic() - began
        console.note(
            f"read {document.tokens:,} tokens in {reading_seconds:.1f} s; asking in a new process"
        )
        began = time.monotonic()
        replies = _ask_in_new_process(store, model, [each.question for each in hidden])
        asking_seconds = time.monotonic() - began
    rows = [
        _judge(each, reply, primed) for each, reply in zip(hidden, replies["answers"], strict=True)
    ]
    return {
        "right": sum(row["right"] for row in rows),
        "of": len(rows),
        "questions": rows,
        "seed": seed,
        "text": "Python's own documentation" if text is None else str(text),
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


def print_demo(result: dict[str, Any]) -> None:
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


# The text


def python_text() -> Iterator[str]:
    """Long texts that every Python has: its language reference, then sources of its standard
    library.
    """
    with suppress(ImportError):  # some systems leave it out
        from pydoc_data.topics import topics

        yield "\n".join(topics.values())
    for name in _STANDARD_LIBRARY:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin).read_text(encoding="utf-8")


def _read(path: Path | None) -> Iterator[str]:
    return python_text() if path is None else Text(path).pieces()


def cut(reader: ModelAPI, pieces: Iterator[str], tokens: int | None) -> str:
    """The beginning of a text, about `tokens` long, to the end of a line."""
    taken: list[str] = []
    left = tokens
    for segment in Tokenizer.segments(pieces):
        if left is not None:
            ids = reader.tokenizer.encode(segment)
            if len(ids) >= left:
                characters = reader.tokenizer.characters(ids[:left])
                taken.append(segment[:characters].rpartition("\n")[0] or segment[:characters])
                break
            left -= len(ids)
        taken.append(segment)
    return "".join(taken)


def draw_facts(rng: Random, count: int) -> list[Fact]:
    """One pass key and count - 1 facts of 4 to 6 digits, about things of which no two share a
    word.
    """
    pools = Pools.of("train")
    things = zip(
        rng.sample(pools.colours, len(pools.colours)), rng.sample(pools.nouns, len(pools.colours))
    )
    facts = [draw_pass_key(rng)]
    for colour, noun in list(things)[: count - 1]:
        digits = "".join(rng.choices("0123456789", k=rng.choice((4, 5, 6))))
        facts.append(Fact(f"{colour} {noun}", rng.choice(_ATTRIBUTES), digits))
    return facts


def hide(rng: Random, text: str, facts: Sequence[Fact]) -> tuple[str, list[Hidden]]:
    """Write each fact as a sentence of its own into a random place between two sentences of the
    text.

    Returns the text with the facts, and what was hidden in the order of `facts`. Raises
    InvalidInput for a short text.
    """
    places = [match.end() for match in _BREAK.finditer(text)]
    if len(places) < len(facts):
        raise InvalidInput(
            f"the text has {len(places)} places between sentences; hiding {len(facts)} facts takes "
            "a longer one"
        )
    chosen = rng.sample(places, len(facts))
    parts: list[str] = []
    hidden: dict[int, Hidden] = {}
    start = length = 0
    for place, number in sorted((place, number) for number, place in enumerate(chosen)):
        fact = facts[number]
        stated = pass_key_statement(fact) if fact.is_pass_key else statement(fact)
        asked = pass_key_question(fact) if fact.is_pass_key else question(fact)
        parts += [text[start:place], stated.text + text[place - 1]]
        length += place - start
        hidden[number] = Hidden(fact, stated.text, length, asked.prompt)
        start = place
        length += len(parts[-1])
    return "".join([*parts, text[start:]]), [hidden[number] for number in range(len(facts))]


# The memory and the new process


def _memory(path: Path, reader: ModelAPI) -> MemoryStore:
    if (path / "data.mdb").exists():
        return MemoryStore.open(path, reader.signature)
    return MemoryStore.create(path, reader.signature, codec=reader.codec, selector=reader.keeps)


def _check_ours(memory: MemoryStore) -> None:
    """Refuse to replace somebody's own document. Raises DocumentExists."""
    if memory.has(DOCUMENT) and memory.document(DOCUMENT).metadata.get(SOURCE) != _WRITTEN:
        raise DocumentExists(
            f"{memory.place} has a document {DOCUMENT!r} that no demonstration of this version "
            "wrote; give --store another directory, or forget it first"
        )


def _ask_in_new_process(store: Path, model: str | None, questions: Sequence[str]) -> dict[str, Any]:
    """What `memstore ask - --json` answers; every question gets a session of its own there."""
    arguments = ["ask", "-", "--store", str(store), "--document", DOCUMENT, "--json"]
    done = subprocess.run(
        python_command("memstore", *arguments, *(["--model", model] if model else [])),
        input="\n".join(questions),
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise MemstoreError(f"the process that asks ended with status {done.returncode}")
    replies: dict[str, Any] = json.loads(done.stdout)
    return replies


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
