"""Needles in book text: what is hidden, the memories it is hidden in, and the questions that ask
for it.

A needle is written into a *passage* of some hundred tokens of book text, and every passage is
ingested as a document of its own; books without needles are ingested as *fillers* of several sizes.
A trial attaches its passage among as many fillers as its length asks for, at a random place in
their order, so that one ingest of a passage serves every length. All blocks that are attached
compete in one search, and old blocks all stand at the same distance, so this is the same as one
long document, but for the few blocks on both sides of a needle's passage; `in_place` documents
check that.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from common import Books, load_model, prepare, tokens_text

from memstore import LandmarkModel, MemoryStore
from memstore.model import facts as language
from memstore.model.facts import Fact, Pools, Sentence, Split
from memstore.model.session import ScratchSession
from memstore.model.tokenizer import Tokenizer
from memstore.model.units import Read

TASKS = {
    "passkey": "pass key, the paper's words",
    "fact": "one fact, a number",
    "fact_unrelated": "one fact, a number, 200 unrelated tokens before the question",
    "fact_forms": "one fact, a number, in any of training's sentence forms",
    "fact_any": "one fact, any value (words, names, unseen formats)",
    "rephrased": "one fact, a number, sentence and question in unseen forms",
    "of_20": "one of 20 facts of the same form",
    "of_100": "one of 100 facts of the same form",
    "updated": "updated facts, the last value wins",
    "split": "value split across blocks",
    "in_place": "one fact or pass key inside one long document",
    "streamed": "pass key, streamed (the paper's prompt, book text)",
    "streamed_grass": "pass key, streamed (the paper's prompt and filler)",
}
STORED = (
    "passkey",
    "fact",
    "fact_unrelated",
    "fact_forms",
    "fact_any",
    "rephrased",
    "of_20",
    "of_100",
    "updated",
    "split",
)
STREAMED = ("streamed", "streamed_grass")
PAPER_KEYS = 50_000  # the paper draws its pass keys from 1 .. 50,000
UNRELATED = 200  # tokens of text between memory and question
_ENDS = ".,;:!?\n"  # what may follow a value
_SMALL, _LARGE = 1024, 2048  # tokens of the small fillers


@dataclass(frozen=True)
class Question:
    """What is asked of a memory that holds the documents `passages`, and the value (with the space
    before it) that is right.
    """

    task: str
    prompt: str
    value: str
    passages: list[str]
    before: str = ""  # unrelated text that the session reads first
    old: str = ""  # a value that was replaced
    length: int = 0  # the only length that can be asked, for in_place


@dataclass(frozen=True)
class Plan:
    """What a memory was built with, and what can be asked of it."""

    settings: dict[str, Any]
    fillers: list[tuple[str, int]]  # name, tokens
    tokens: dict[str, int]  # of each passage
    questions: list[Question] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path) -> "Plan | None":
        """The plan of an earlier build; None if there is none."""
        path = directory / "plan.json"
        if not path.exists():
            return None
        values = json.loads(path.read_text())
        questions = [Question(**question) for question in values.pop("questions")]
        fillers = [(name, tokens) for name, tokens in values.pop("fillers")]
        return cls(**values, fillers=fillers, questions=questions)

    def save(self, directory: Path) -> None:
        """Write plan.json, last: its presence says that the memory is whole."""
        (directory / "plan.json").write_text(json.dumps(asdict(self)))

    def of(self, task: str) -> list[Question]:
        """The questions of a task."""
        return [question for question in self.questions if question.task == task]

    def documents(self, question: Question, length: int, rng: Random) -> list[str] | None:
        """The documents of one trial, in order; None if the passages alone are longer than
        `length`.
        """
        if question.length:
            return question.passages if question.length == length else None
        room = length - sum(self.tokens[name] for name in question.passages)
        if room < -_SMALL // 2:
            return None
        chosen: list[str] = []
        left = sum(tokens for _, tokens in self.fillers)
        if room > left + _SMALL // 2:
            raise ValueError(
                f"the fillers of this memory do not reach {length:,} tokens; build it with longer "
                "ones"
            )
        for size in sorted({tokens for _, tokens in self.fillers}, reverse=True):
            same = [name for name, tokens in self.fillers if tokens == size]
            left -= size * len(same)
            needed = -(-(room - left) // size) if left else round(room / size)
            # as few large ones as will do: small ones make more orders
            count = max(0, min(needed, len(same)))
            chosen += rng.sample(same, count)
            room -= count * size
        rng.shuffle(chosen)
        for name in question.passages:
            chosen.insert(rng.randint(0, len(chosen)), name)
        return chosen


def filler_sizes(longest: int) -> list[int]:
    """Tokens of the filler documents that reach every length up to `longest`."""
    sizes = [_SMALL] * 4
    if longest > 2 * _LARGE:
        sizes += [_LARGE] * (31 if longest >= 16 * _LARGE else longest // _LARGE)
    for size, most in ((24 * 1024, 8), (112 * 1024, 1 << 20)):
        missing = longest - sum(sizes)
        if missing > 0:
            sizes += [size] * min(-(-missing // size) + 3, most)
    return sizes


class Writer:
    """Writes needles into passages of book text.

    split: whether names, attributes and formats of values are training's or held out. Sentences and
    questions have forms that training knows, except where a task asks for `forms="held_out"`. size:
    tokens of a passage; twice that where it holds several sentences.
    """

    def __init__(
        self, tokenizer: Tokenizer, books: Books, rng: Random, split: Split, size: int = 512
    ) -> None:
        self.tokenizer, self.books, self.rng, self.split, self.size = (
            tokenizer,
            books,
            rng,
            split,
            size,
        )
        self.pools = Pools.of(split, books.words if split == "held_out" else ())
        texts = [tokenizer.decode([token]) for token in range(tokenizer.landmark_id)]
        self.ends = np.array([text[-1:] in (".", "!", "?", "\n") for text in texts])

    def text(self, tokens: int) -> str:
        """About `tokens` tokens of a book, from the beginning of a sentence."""
        ids = self.books.place(self.rng, tokens + 64)
        ends = np.flatnonzero(self.ends[ids[:64]])
        first = int(ends[0]) + 1 if len(ends) else 0
        return self.tokenizer.decode(ids[first : first + tokens].tolist())

    def passage(
        self, sentences: Sequence[str], tokens: int, filler: np.ndarray | None = None
    ) -> str:
        """`sentences`, in their order, each after a random sentence of book text; about `tokens`
        tokens in all.
        """
        encoded = [self.tokenizer.encode(" " + sentence) for sentence in sentences]
        if filler is None:
            filler = self.books.place(self.rng, max(tokens - sum(map(len, encoded)), tokens // 4))
        ends = np.flatnonzero(self.ends[filler]) + 1
        places = sorted(
            self.rng.choices(
                ends.tolist() if len(ends) > 8 else range(1, len(filler)), k=len(sentences)
            )
        )
        pieces, last = [], 0
        for place, ids in zip(places, encoded):
            pieces += [*filler[last:place].tolist(), *ids]
            last = place
        return self.tokenizer.decode(pieces + filler[last:].tolist())

    def fact(self, **choice: Any) -> Fact:
        """A fact of the split whose value is a number of random digits, unless `choice` says
        otherwise.
        """
        return language.draw_fact(
            self.rng, self.split, pools=self.pools, **{"kind": "digits"} | choice
        )

    def state(self, fact: Fact, forms: Split | None = None) -> str:
        """The sentence that states it: the plain form, or any of a split's."""
        return language.statement(
            fact, self.rng.choice(language.STATEMENTS[forms]) if forms else 0
        ).text

    def ask(self, fact: Fact, forms: Split | None = None) -> Sentence:
        """The question for it, likewise."""
        return language.question(fact, self.rng.choice(language.QUESTIONS[forms]) if forms else 0)

    # One task each: (passages, questions)

    def passkey(self, tokens: int = 0) -> tuple[list[str], list[Question]]:
        key = str(self.rng.randint(1, PAPER_KEYS))
        asked = language.pass_key_question(key)
        text = self.passage([language.pass_key_statement(key).text], tokens or self.size)
        return [text], [Question("passkey", asked.prompt, asked.answer, [])]

    def one_fact(self, tokens: int = 0) -> tuple[list[str], list[Question]]:
        fact = self.fact()
        asked = self.ask(fact)
        return [self.passage([self.state(fact)], tokens or self.size)], [
            Question("fact", asked.prompt, asked.answer, []),
            Question("fact_unrelated", asked.prompt, asked.answer, [], before=self.text(UNRELATED)),
        ]

    def fact_forms(self) -> tuple[list[str], list[Question]]:
        fact = self.fact()
        asked = self.ask(fact, "train")
        return [self.passage([self.state(fact, "train")], self.size)], [
            Question("fact_forms", asked.prompt, asked.answer, [])
        ]

    def fact_any(self) -> tuple[list[str], list[Question]]:
        fact = self.fact(kind=None)
        asked = self.ask(fact)
        return [self.passage([self.state(fact)], self.size)], [
            Question("fact_any", asked.prompt, asked.answer, [])
        ]

    def rephrased(self) -> tuple[list[str], list[Question]]:
        fact = self.fact()
        asked = self.ask(fact, "held_out")
        return [self.passage([self.state(fact, "held_out")], self.size)], [
            Question("rephrased", asked.prompt, asked.answer, [])
        ]

    def many(
        self, task: str, count: int, passages: int, asked: int
    ) -> tuple[list[str], list[Question]]:
        """`count` numbers that share attribute and kind of name, spread over some passages."""
        rng = self.rng
        kind = rng.choice(("words", "name") if count > 40 else ("colour_noun", "words", "name"))
        attribute = rng.choice(self.pools.attributes)
        facts: dict[str, Fact] = {}
        values: set[str] = set()
        while len(facts) < count:
            fact = self.fact(entity_kind=kind)
            if fact.entity not in facts and (fact.value not in values or len(fact.value) < 2):
                facts[fact.entity] = Fact(fact.entity, attribute, fact.value)
                values.add(fact.value)
        every = list(facts.values())
        texts = [
            self.passage([self.state(f) for f in every[at::passages]], 2 * self.size)
            for at in range(passages)
        ]
        questions = [self.ask(fact) for fact in rng.sample(every, asked)]
        return texts, [
            Question(task, question.prompt, question.answer, []) for question in questions
        ]

    def updated(self) -> tuple[list[str], list[Question]]:
        """A fact that gets a new value once or twice, anywhere later in the passage."""
        rng, fact = self.rng, self.fact()
        sentences, values = [self.state(fact)], [fact.value]
        for _ in range(rng.choice((1, 1, 2))):
            while (value := language.draw_value(rng, self.pools, "digits")) in values:
                pass
            values.append(value)
            fact = Fact(fact.entity, fact.attribute, value)
            sentences.append(language.update(fact, 0).text)
        asked = self.ask(fact)
        return [self.passage(sentences, 2 * self.size)], [
            Question("updated", asked.prompt, asked.answer, [], old=" " + values[-2])
        ]

    def split_value(self, block_size: int) -> tuple[list[str], list[Question]]:
        """A fact whose value stands in two blocks."""
        encode = self.tokenizer.encode
        while True:
            fact = self.fact()
            sentence = self.state(fact)
            before = encode(" " + sentence[: sentence.index(fact.value)].rstrip(" "))
            value = encode(" " + fact.value)
            if len(value) < 2:
                continue
            filler = self.books.place(self.rng, self.size + block_size)
            ends = np.flatnonzero(self.ends[filler[: self.size - 64]]) + 1
            place = int(self.rng.choice(ends[ends > block_size].tolist() or [block_size]))
            first = place + len(before)
            dropped = (first + self.rng.randrange(1, len(value))) % block_size
            ids = [
                *filler[dropped:place].tolist(),
                *encode(" " + sentence),
                *filler[place : self.size].tolist(),
            ]
            text = self.tokenizer.decode(ids)
            first -= dropped
            if (
                encode(text)[: first + len(value)] == ids[: first + len(value)]
                and ids[first:][: len(value)] == value
            ):
                assert first // block_size != (first + len(value) - 1) // block_size
                asked = self.ask(fact)
                return [text], [Question("split", asked.prompt, asked.answer, [])]


def build(directory: Path, settings: dict[str, Any]) -> float:
    """Ingest everything that `settings` ask for into directory/memory and write the plan; seconds
    it took.

    settings: model, text, seed, trials, tasks, longest (tokens), in_place, in_place_length, split,
    passage (tokens), threads; codec, if not the default.
    """
    began = time.perf_counter()
    prepare(settings["threads"])
    model = load_model(settings["model"])
    settings = settings | {"weights": model.signature.weights}
    known = Plan.load(directory)
    if known is not None and known.settings == settings:
        print(f"using the memory in {directory}", flush=True)
        return 0.0
    rng = Random(f"needles {settings['seed']}")
    books = Books.read(settings["text"], model.tokenizer, directory / "tokens")
    writer = Writer(model.tokenizer, books, rng, settings["split"], settings["passage"])
    sizes = filler_sizes(settings["longest"]) if set(STORED) & set(settings["tasks"]) else []
    plan = Plan(settings, [(f"filler {n}", size) for n, size in enumerate(sizes)], {})
    with MemoryStore.create(
        directory / "memory", model.signature, codec=settings.get("codec", "zstd")
    ) as store:

        def ingest(name: str, text: str) -> int:
            tokens = model.ingest(text, store, name=name).tokens
            done[0] += tokens
            if time.perf_counter() - said[0] > 15:
                said[0] = time.perf_counter()
                rate = done[0] / (time.perf_counter() - began)
                print(f"  ingested {done[0]:,} tokens, {rate:,.0f} a second", flush=True)
            return tokens

        done, said = [0], [began]
        for name, size in plan.fillers:
            ingest(name, model.tokenizer.decode(books.run(rng, size).tolist()))
        for texts, questions in _needles(writer, settings, model.config.block_size):
            names = [f"{questions[0].task} {len(plan.tokens) + n}" for n in range(len(texts))]
            plan.tokens.update({name: ingest(name, text) for name, text in zip(names, texts)})
            plan.questions.extend(
                Question(**asdict(question) | {"passages": names}) for question in questions
            )
        seconds = time.perf_counter() - began
        held = store.stats()
        print(
            f"memory: {held['tokens']:,} tokens in {held['documents']} documents, "
            f"{held['file_bytes'] / 1e6:,.0f} MB, "
            f"built in {seconds:.0f} s",
            flush=True,
        )
    plan.save(directory)
    return seconds


def _needles(
    writer: Writer, settings: dict[str, Any], block_size: int
) -> Iterator[tuple[list[str], list[Question]]]:
    tasks, trials = settings["tasks"], settings["trials"]
    one_by_one: dict[str, Callable[[], tuple[list[str], list[Question]]]] = {
        "passkey": writer.passkey,
        "fact": writer.one_fact,
        "fact_forms": writer.fact_forms,
        "fact_any": writer.fact_any,
        "rephrased": writer.rephrased,
        "of_20": lambda: writer.many("of_20", 20, 1, 1),
        "updated": writer.updated,
        "split": lambda: writer.split_value(block_size),
    }
    for task, write in one_by_one.items():
        if task in tasks or (task == "fact" and "fact_unrelated" in tasks):
            for _ in range(trials):
                yield write()
    if "of_100" in tasks:
        for _ in range(-(-trials // 4)):  # four questions for every hundred facts
            yield writer.many("of_100", 100, 4, 4)
    if "in_place" in tasks:
        length = settings["in_place_length"]
        for n in range(settings["in_place"]):
            texts, questions = writer.passkey(length) if n % 2 else writer.one_fact(length)
            yield texts, [Question(**asdict(questions[0]) | {"task": "in_place", "length": length})]


@dataclass
class Reply:
    """What came out: the value right, and also nothing after it but the end of the value."""

    value: bool
    right: bool
    text: str
    old: bool = False  # the value that was replaced came instead


def reply(
    model: LandmarkModel, session: ScratchSession, question: Question, *, generate: bool
) -> Reply:
    """Ask in a fresh session.

    generate: decode token by token. Otherwise the value is fed with the question and every row's
    best token is compared: the same as greedy decoding where each row chooses its own blocks
    (per_token_per_head), in one step.
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
    top_k: int | None = None,
    score_range: float | None = None,
    granularity: str | None = None,
    cmt_cutoff: float | None = None,
) -> dict[str, Any] | None:
    """Ask every question of a task against `length` tokens of memory; None if that length cannot be
    asked.

    blocks_read: by all lookups that were done; a block is read by a row that gives it any
    attention.
    """
    granularity = granularity or model.config.granularity
    replies: list[tuple[Question, Reply]] = []
    lookups = {"done": 0, "skipped": 0}
    blocks_read = 0

    def count(reads: list[Read]) -> None:
        nonlocal blocks_read
        blocks_read += len(reads)

    began = time.perf_counter()
    for n, question in enumerate(plan.of(task)[:trials]):
        documents = plan.documents(question, length, Random(f"{seed} {task} {length} {n}"))
        if documents is None:
            return None
        with model.session(
            store,
            documents,
            on_read=count,
            read_all_rows=True,
            top_k=top_k,
            score_range=score_range,
            granularity=granularity,
            cmt_cutoff=cmt_cutoff,
        ) as session:
            replies.append(
                (
                    question,
                    reply(model, session, question, generate=granularity != "per_token_per_head"),
                )
            )
            lookups["done"] += session.attention.lookups.done
            lookups["skipped"] += session.attention.lookups.skipped
    if not replies:
        return None
    return {
        "task": task,
        "length": length,
        "top_k": top_k or model.config.top_k,
        "score_range": model.config.score_range if score_range is None else score_range,
        "granularity": granularity,
        "cmt_cutoff": model.config.cmt_cutoff if cmt_cutoff is None else cmt_cutoff,
        "trials": len(replies),
        "right": sum(r.right for _, r in replies),
        "value_right": sum(r.value for _, r in replies),
        "old_value": sum(r.old for _, r in replies),
        "lookups": lookups,
        "blocks_read": blocks_read,
        "seconds": round(time.perf_counter() - began, 2),
        "wrong": [
            {"prompt": q.prompt, "value": q.value, "got": r.text} for q, r in replies if not r.right
        ][:40],
    }


def streamed(
    model: LandmarkModel,
    books: Books,
    task: str,
    length: int,
    *,
    trials: int,
    seed: int,
    top_k: int | None = None,
) -> dict[str, Any]:
    """The paper's protocol: the whole prompt through one session that retrieves from its own
    blocks, the question at its end.
    """
    rng = Random(f"streamed {seed} {task} {length}")
    replies: list[tuple[Question, Reply]] = []
    began = time.perf_counter()
    grass = model.tokenizer.encode(" " + language.GRASS)
    for _ in range(trials):
        key = str(rng.randint(1, PAPER_KEYS))
        asked = language.pass_key_question(key)
        if task == "streamed":
            filler = books.run(rng, length).tolist()
        else:
            filler = grass * (length // len(grass) + 1)
        head = model.tokenizer.encode(language.PASS_KEY_HEAD + " ")
        needle = model.tokenizer.encode(" " + language.pass_key_statement(key).text)
        room = length - len(head) - len(needle)
        place = rng.randint(0, room)
        prompt = [*head, *filler[:place], *needle, *filler[place:room]]
        with (
            MemoryStore.in_memory(model.signature) as store,
            model.session(store, [], top_k=top_k) as session,
        ):
            session.feed(prompt)
            question = Question(task, " " + asked.prompt, asked.answer, [])
            replies.append((question, reply(model, session, question, generate=False)))
    return {
        "task": task,
        "length": length,
        "top_k": top_k or model.config.top_k,
        "score_range": model.config.score_range,
        "granularity": model.config.granularity,
        "cmt_cutoff": model.config.cmt_cutoff,
        "trials": len(replies),
        "right": sum(r.right for _, r in replies),
        "value_right": sum(r.value for _, r in replies),
        "old_value": 0,
        "seconds": round(time.perf_counter() - began, 2),
        "wrong": [
            {"prompt": q.prompt, "value": q.value, "got": r.text} for q, r in replies if not r.right
        ][:40],
    }


def describe(length: int) -> str:
    """A length as the tables print it."""
    return tokens_text(length)
