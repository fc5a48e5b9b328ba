"""Ingesting needles into a memory on disk and asking for them; and asking models that store no
documents, which read the text again for each question.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.baselines.reading import AnyModel, BaselineModel, Reading
from benchmarks.common.needle_writer import PAPER_KEYS, Writer, needles
from benchmarks.common.needles import Plan, Question, filler_sizes
from benchmarks.common.options import named_model, prepare
from benchmarks.common.text import Books
from memstore import LandmarkModel, MemoryStore
from memstore.model.landmark.landmark_session import LandmarkSession
from memstore.model.lookup_settings import LookupSettings
from memstore.model.session import StepReads
from memstore.training import facts as language

_ENDS = ".,;:!?\n"  # what may follow a value
_TEXTS = "texts.npz"  # of a directory: ids of documents, by name


def build_settings(
    options: argparse.Namespace, tasks: Iterable[str], longest: int, passage: int = 512
) -> dict[str, Any]:
    """Settings of `build`: tasks, the longest memory in tokens, tokens of the passage around a
    needle, and what a benchmark's options say.
    """
    same = {name: getattr(options, name) for name in ("model", "text", "seed", "trials", "threads")}
    return same | {"tasks": sorted(tasks), "longest": longest, "passage": passage}


def build(directory: Path, settings: dict[str, Any]) -> None:
    """Ingest what `settings` name (see `build_settings`) into directory/memory; write the plan."""
    prepare(settings["threads"])
    model = named_model(settings["model"])
    weights = model.weights if isinstance(model, BaselineModel) else model.signature.weights
    settings = settings | {"weights": weights}
    known = Plan.load(directory)
    if known is not None and known.settings == settings:
        print(f"using the memory in {directory}", flush=True)
        return
    rng = Random(f"needles {settings['seed']}")
    books = Books.read(settings["text"], model.tokenizer, directory / "tokens")
    writer = Writer(model.tokenizer, books, rng, settings["passage"])
    sizes = filler_sizes(settings["longest"])
    plan = Plan(settings, [(f"filler {n}", size) for n, size in enumerate(sizes)], {})
    with _keeping(model, directory) as keep:
        for name, size in plan.fillers:
            keep(name, model.tokenizer.decode(books.run(rng, size).tolist()))
        for texts, questions in needles(writer, settings, model.shape.block_size):
            names = [f"{questions[0].task} {len(plan.tokens) + n}" for n in range(len(texts))]
            plan.tokens.update({name: keep(name, text) for name, text in zip(names, texts)})
            plan.questions.extend(
                Question(**asdict(question) | {"passages": names}) for question in questions
            )
    plan.save(directory)


@contextmanager
def _keeping(model: AnyModel, directory: Path) -> Iterator[Callable[[str, str], int]]:
    """A function that stores a document (name, text) and returns its tokens: in a memory, or in a
    file of texts for a model that stores no documents.
    """
    if isinstance(model, BaselineModel):
        texts, tokenizer = dict[str, Any](), model.tokenizer

        def note(name: str, text: str) -> int:
            texts[name] = np.array(tokenizer.encode(text))
            return len(texts[name])

        yield note
        np.savez(directory / _TEXTS, **texts)
        return
    with MemoryStore.create(directory / "memory", model.signature) as store:
        yield lambda name, text: model.ingest(text, store, name=name).tokens
        held = store.stats()
        sizes = f"{held['tokens']:,} tokens, {held['file_bytes'] / 1e6:,.0f} MB"
        print(f"memory: {held['documents']} documents, {sizes}", flush=True)


@dataclass
class Reply:
    """What came out: the value right, and also nothing after it but the end of the value."""

    value: bool
    right: bool
    text: str
    old: bool = False  # the value that was replaced came instead


def reply(
    model: AnyModel, session: LandmarkSession | Reading, question: Question, *, generate: bool
) -> Reply:
    """Ask in a fresh session.

    generate: decode token by token. Otherwise the value is fed after the question, and every row's
    best token is compared with it. In one step this equals greedy decoding where each row chooses
    its own blocks (per_token_per_head).
    """
    tokenizer = model.tokenizer
    if question.before:
        session.feed(tokenizer.encode(question.before))
        prompt = tokenizer.encode(" " + question.prompt)
        value = tokenizer.encode(" " + question.prompt + question.value)[len(prompt) :]
    else:
        prompt = tokenizer.encode(question.prompt)
        value = tokenizer.encode(question.prompt + question.value)[len(prompt) :]
    if generate:
        if len(prompt) > 1:
            session.feed(prompt[:-1])
        assert isinstance(session, LandmarkSession)
        got = list(session.generate(session.feed(prompt[-1:])[-1], len(value) + 1))
    else:
        states = session.feed([*prompt, *value])[len(prompt) - 1 :]
        got = session.logits(states).argmax(-1).tolist()
    text = tokenizer.decode(got)
    right = got[:-1] == value
    old = bool(question.old) and text.startswith(question.old)
    return Reply(right, right and tokenizer.decode(got[-1:])[:1] in _ENDS, text, old)


def ask(
    model: LandmarkModel,
    store: MemoryStore,
    plan: Plan,
    task: str,
    length: int,
    *,
    trials: int,
    seed: int,
    **lookup: Any,
) -> dict[str, Any] | None:
    """Ask every question of a task against `length` tokens of memory; None if that length cannot be
    asked.

    blocks_read: number of blocks read by all lookups; a row reads a block if it gives the block any
    attention. memory_share: mean share of attention that a (token, head, layer) gives to memory.
    """
    settings = model.lookup.changed(**lookup)
    one_by_one = settings.granularity != "per_token_per_head"
    replies: list[tuple[Question, Reply]] = []
    lookups = {"done": 0, "skipped": 0}
    blocks_read, mass = 0, 0.0

    def count(reads: StepReads) -> None:
        nonlocal blocks_read, mass
        blocks_read += len(reads.units)
        mass += float(reads.masses.sum())

    began = time.perf_counter()
    for n, question in enumerate(plan.of(task)[:trials]):
        documents = plan.documents(question, length, Random(f"{seed} {task} {length} {n}"))
        if documents is None:
            return None
        with model.session(
            store, documents, on_read=count, read_all_rows=True, **lookup
        ) as session:
            replies.append((question, reply(model, session, question, generate=one_by_one)))
            lookups["done"] += session.attention.lookups.done
            lookups["skipped"] += session.attention.lookups.skipped
    if not replies:
        return None
    share = round(mass / max(1, sum(lookups.values())), 4)
    counted = {"lookups": lookups, "blocks_read": blocks_read, "memory_share": share}
    return asked(task, length, settings) | counted | judged(replies, began)


def ask_streamed(
    model: BaselineModel, directory: Path, task: str, length: int, *, trials: int, seed: int
) -> dict[str, Any] | None:
    """Ask every question of a task after `length` tokens of text, which are read anew for each.

    Returns None if a text of this length cannot be asked about. attended: tokens that a token
    attends to, the mean over layers; state_bytes: the size of the kept state.
    """
    plan, texts = Plan.load(directory), np.load(directory / _TEXTS)
    assert plan is not None
    replies: list[tuple[Question, Reply]] = []
    attended, size, began = 0.0, 0, time.perf_counter()
    for n, question in enumerate(plan.of(task)[:trials]):
        documents = plan.documents(question, length, Random(f"{seed} {task} {length} {n}"))
        if documents is None:
            return None
        with model.session() as reading:
            for name in documents:
                reading.feed(texts[name].tolist())
            size = max(size, reading.past.bytes)
            replies.append((question, reply(model, reading, question, generate=False)))
            attended = reading.past.attended.per_token
    if not replies:
        return None
    kept = {"attended": attended, "state_bytes": size}
    return asked(task, length, model.lookup) | kept | judged(replies, began)


def asked(task: str, length: int, settings: LookupSettings) -> dict[str, Any]:
    """What was asked, and how memory was looked up."""
    names = ("granularity", "top_k", "cmt_cutoff")
    return {"task": task, "length": length} | {name: getattr(settings, name) for name in names}


def judged(replies: list[tuple[Question, Reply]], began: float) -> dict[str, Any]:
    """How many were right, the seconds since `began`, and the first wrong ones."""
    wrong = [(question, reply) for question, reply in replies if not reply.right]
    return {
        "trials": len(replies),
        "right": len(replies) - len(wrong),
        "value_right": sum(reply.value for _, reply in replies),
        "old_value": sum(reply.old for _, reply in replies),
        "seconds": round(time.perf_counter() - began, 2),
        "wrong": [{"prompt": q.prompt, "value": q.value, "got": r.text} for q, r in wrong[:40]],
    }


@contextmanager
def fresh_session(model: AnyModel) -> Iterator[LandmarkSession | Reading]:
    """A session before any text."""
    if isinstance(model, BaselineModel):
        with model.session() as reading:
            yield reading
    else:
        with MemoryStore.in_memory(model.signature) as store, model.session(store, []) as session:
            yield session


def streamed(
    model: AnyModel, books: Books, length: int, *, trials: int, seed: int
) -> dict[str, Any]:
    """The paper's protocol: the whole prompt through one session that retrieves from its own
    blocks, the question at its end.
    """
    rng = Random(f"streamed {seed} streamed {length}")
    replies: list[tuple[Question, Reply]] = []
    began = time.perf_counter()
    for _ in range(trials):
        key = language.pass_key(str(rng.randint(1, PAPER_KEYS)))
        sentence = language.question(language.PASS_KEY_QUESTION, key)
        stated = language.sentence(language.PASS_KEY_STATEMENTS["train"][0], key)
        filler = books.run(rng, length).tolist()
        head = model.tokenizer.encode(language.PASS_KEY_HEAD + " ")
        needle = model.tokenizer.encode(f" {stated.text}")
        room = length - len(head) - len(needle)
        place = rng.randint(0, room)
        prompt = [*head, *filler[:place], *needle, *filler[place:room]]
        with fresh_session(model) as session:
            session.feed(prompt)
            question = Question("streamed", " " + sentence.prompt, sentence.answer, [])
            replies.append((question, reply(model, session, question, generate=False)))
    return asked("streamed", length, model.lookup) | judged(replies, began)
