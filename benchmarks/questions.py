"""Questions that people asked, answered from one memory of many documents, and by rivals.

The contexts of a set are documents of one memory. A seeded 30% of them stay out, and their
questions are those that nothing answers. Every way of answering generates at most 24 tokens with
the same weights, greedily.

ways: "memory" is what `memstore ask` does; "text" reads the memory's passages in the prompt;
"bm25@K", "minilm@K" and "fused@K" choose the best K of the same passages and read them as text;
"gold" reads the passage that is known to be right.
"""

import json
import random
import re
import string
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

import memstore
from benchmarks.common import options, results
from benchmarks.common.intervals import clustered_interval
from benchmarks.real.baselines import Chooser, chooser
from benchmarks.real.plan import Blocks, Question, Span
from benchmarks.real.text_reader import TextReader
from memstore.hf.load import load_reader
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.hf.reading_adapter import UNKNOWN
from memstore.memory import Memory
from memstore.model.lookup_settings import CAUTION
from memstore.model.passages.adaptation import Evidence
from memstore.training.reading_questions import read_questions

TOKENS = 24  # of an answer, at most
LEFT_OUT = 0.3  # of the contexts
SETS = {
    "newwiki": ("squadshifts_newwiki", "en"),
    "piaf": ("piaf", "fr"),
    "2wiki": ("2wiki_sample", "en"),
    "fairytale": ("fairytaleqa", "en"),
}
WAYS = ("memory", "text", "fused@1", "fused@2", "fused@4", "gold")
_OTHERS = ("bm25", "minilm", "fused")
_WAY = re.compile(rf"memory|text|gold|({'|'.join(_OTHERS)})@[1-9]\d*")
_MOST_GOLD, _MOST_TEXT = 4, 64  # passages
_ALL = "memory"  # all passages are blocks of one document for the choosers
_CURVE = ("right", "refused", "unanswerable refused")
_ARTICLES = re.compile(r"\b(a|an|the|der|die|das|le|la|les|l|un|une)\b")


@dataclass(frozen=True)
class Asked:
    """A question with its answers.

    accepted: an answer is right if it holds all strings of one of these; empty where nothing in the
    memory answers. document: the one that answers. group: the article; intervals are clustered by
    it.
    """

    question: str
    accepted: tuple[tuple[str, ...], ...]
    document: str
    group: str


@dataclass(frozen=True)
class Said:
    """What came of a question. doubt: the probability that nothing that was read answers; first,
    seconds: to the first token and to the last; found: the rank of the right passage, None where it
    is not there; read: passages.
    """

    text: str
    doubt: float
    first: float
    seconds: float
    found: int | None = None
    read: tuple[int, ...] = ()

    def refused(self, above: float) -> bool:
        return self.doubt > above or self.text.startswith(UNKNOWN[:-1])


def plain(text: str) -> str:
    """Lower case without punctuation, accents and articles."""
    text = unicodedata.normalize("NFKD", text.lower())
    text = "".join(c if c not in string.punctuation + "’‘“”«»" else " " for c in text)
    text = "".join(c for c in text if not unicodedata.combining(c))
    return " ".join(_ARTICLES.sub(" ", text).split())


def is_right(said: str, asked: Asked) -> bool:
    words = f" {plain(said)} "
    return any(all(f" {plain(part)} " in words for part in some) for some in asked.accepted)


def token_f1(said: str, asked: Asked) -> float:
    """The best F1 of the words of an answer and the words of any accepted answer."""
    words = Counter(plain(said).split())
    best = 0.0
    for some in asked.accepted:
        wanted = Counter(plain(" ".join(some)).split())
        if common := (words & wanted).total():
            best = max(best, 2 * common / (words.total() + wanted.total()))
    return best


def planned(name: str, path: Path, count: int, seed: int) -> tuple[dict[str, str], list[Asked]]:
    """The documents of a set by name, and its questions."""
    rng = random.Random(seed)
    if name == "office":
        return {}, _office(path)
    source, lang = SETS[name]
    contexts = [one for one in read_questions(path) if (one.source, one.lang) == (source, lang)]
    out = set(rng.sample(range(len(contexts)), round(LEFT_OUT * len(contexts))))
    documents = {f"{at:04}": one.context for at, one in enumerate(contexts) if at not in out}
    asked = [
        Asked(q.question, () if at in out else _accepted(q.answers), f"{at:04}", one.title)
        for at, one in enumerate(contexts)
        for q in one.questions
        if q.answers
    ]
    rng.shuffle(asked)
    return documents, asked[:count]


def _accepted(answers: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple((answer,) for answer in answers)


def _office(path: Path) -> list[Asked]:
    """The questions about the folder."""
    found = []
    for line in (path / "questions.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        accepted = tuple(tuple(some) for some in row["accepted"] or ())
        found.append(Asked(row["question"], accepted, "|".join(row["documents"] or ()), row["id"]))
    return found


class Passages:
    """The passages of a memory, and how well each suits a question by words and by meaning."""

    def __init__(self, memory: Memory, work: Path) -> None:
        self.places: list[tuple[str, int]] = []
        self.ids: list[list[int]] = []
        for document in memory.documents():
            for block, passage in enumerate(memory.store.passages(document.id, 0, document.blocks)):
                self.places.append((document.name, block))
                self.ids.append(passage.ids.tolist())
        decode = memory.reader.tokenizer.decode
        self.texts = [decode(ids) for ids in self.ids]
        ends = list(accumulate(map(len, self.texts), initial=0))
        spans = [Span(*pair) for pair in pairwise(ends)]
        self._blocks = Blocks(lambda text: spans, {_ALL: "".join(self.texts)})
        self._chooser: Any = cache(lambda way: chooser(way, self._blocks, work))

    def right(self, asked: Asked) -> list[int]:
        """The passages that hold an answer, of the documents that are known to."""
        names = asked.document.split("|")
        return [
            at
            for at, (document, _) in enumerate(self.places)
            if any(name and name in document for name in names) and is_right(self.texts[at], asked)
        ]

    def found(self, memory: Memory, asked: Asked) -> list[int]:
        """The passages that the memory finds, best first."""
        place = {one: at for at, one in enumerate(self.places)}
        best = memory.search(asked.question, top_k=16)
        return [place[one.document, one.block] for one in best]

    def gold(self, asked: Asked) -> list[int]:
        """The passage that answers.

        If none has the answer verbatim, it is the best one by words of the right document.
        """
        names = asked.document.split("|")
        return self.right(asked)[:1] or [
            at for at in self.ranked("bm25", asked.question) if self.places[at][0] in names
        ]

    def ranked(self, way: str, question: str) -> list[int]:
        """All passages, best first by bm25, minilm or fused."""
        asked = Question("", "", 0, (_ALL,), question, "", (), "all")
        made: Chooser = self._chooser(way)
        return np.argsort(-made.scores(asked), kind="stable").tolist()


def ask_memory(memory: Memory, passages: Passages, asked: Asked, k: int | None) -> Said:
    """k: passages to read at most; None for as many as the product does."""
    assert isinstance(memory.reader, HuggingFacePassageModel)
    # always answer: refusals are counted later
    never = None if memory.reader.refusal is None else 0.0
    answer = memory.ask(
        asked.question, max_new_tokens=TOKENS, top_k=k, caution=never, max_sources=64
    )
    doubt = float(not answer.answered) if answer.doubt is None else answer.doubt
    order = passages.found(memory, asked)
    place = {one: at for at, one in enumerate(passages.places)}
    read = sorted(place[one.document, one.block] for one in answer.sources)
    return Said(
        answer.text.strip(),
        doubt,
        answer.first_token_seconds,
        answer.seconds,
        rank(order, set(passages.right(asked))),
        tuple(read),
    )


def judged(reader: HuggingFacePassageModel, memory: Memory, question: str) -> Evidence | None:
    """By what the memory judges a question; None where its model does not."""
    with reader.session(memory.store) as session:
        session.ask(question, lambda: None)
        return session.evidence


def rank(order: Sequence[int], right: set[int]) -> int | None:
    return next((at for at, one in enumerate(order) if one in right), None)


def ask_text(
    way: str,
    reader: TextReader,
    passages: Passages,
    asked: Asked,
    order: Sequence[int],
    known: Evidence | None,
) -> Said:
    """Asks with passages as text.

    order: passages to read, best first, unless the way chooses them itself; known: see
    TextReader.answer.
    """
    began = time.perf_counter()
    name, _, count = way.partition("@")
    most = int(count) if count else _MOST_GOLD if name == "gold" else _MOST_TEXT
    if name in _OTHERS:
        order = passages.ranked(name, asked.question)
    chosen = sorted(order[:most])
    searched = time.perf_counter() - began
    ids = [passages.ids[at] for at in chosen]
    said, doubt, first = reader.answer(ids, asked.question, TOKENS, known)
    seconds = time.perf_counter() - began
    found = rank(order[:16], set(passages.right(asked)))
    return Said(said, doubt, searched + first, seconds, found, tuple(chosen))


def marks(asked: Sequence[Asked], said: Sequence[Said], above: float) -> dict[str, float]:
    """1 for each answerable question with a right answer, else 0."""
    return {
        a.question: float(is_right(s.text, a) and not s.refused(above))
        for a, s in zip(asked, said)
        if a.accepted
    }


def summary(asked: Sequence[Asked], said: Sequence[Said], above: float) -> dict[str, Any]:
    """What a way of answering did. above: the doubt from which it refuses."""
    answerable = [(a, s) for a, s in zip(asked, said) if a.accepted]
    others = [s for a, s in zip(asked, said) if not a.accepted]
    right = [is_right(s.text, a) and not s.refused(above) for a, s in answerable]
    _, low, high = clustered_interval(right, [a.group for a, _ in answerable])
    return {
        "right": mean(right),
        "interval": [low, high],
        "f1": mean([0.0 if s.refused(above) else token_f1(s.text, a) for a, s in answerable]),
        "wrong": mean([not s.refused(above) for _, s in answerable]) - mean(right),
        "refused": mean([s.refused(above) for _, s in answerable]),
        "unanswerable refused": mean([s.refused(above) for s in others]),
        "found 1": mean([s.found is not None and s.found < 1 for _, s in answerable]),
        "found 4": mean([s.found is not None and s.found < 4 for _, s in answerable]),
        "found 8": mean([s.found is not None and s.found < 8 for _, s in answerable]),
        "passages": mean([len(s.read) for s in said]),
        "first": float(np.median([s.first for s in said])),
        "seconds": float(np.median([s.seconds for s in said])),
    }


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def asked_by_all(
    given: Any, memory: Memory, passages: Passages, asked: Sequence[Asked]
) -> dict[str, Any]:
    """What every way of answering did, by name."""
    reader = memory.reader
    assert isinstance(reader, HuggingFacePassageModel)
    refusal, found, read = reader.refusal, dict[str, Any](), dict[str, tuple[int, ...]]()
    told: dict[str, dict[str, float]] = {}
    above = 0.5 if refusal is None else refusal.threshold(CAUTION)
    known: dict[str, Evidence | None] = {}
    if refusal is not None and set(given.ways) - {"memory"}:
        known = {one.question: judged(reader, memory, one.question) for one in asked}
    for way in given.ways:
        some = [one for one in asked if one.accepted] if way == "gold" else asked
        if way == "memory":
            said = [ask_memory(memory, passages, one, given.top_k) for one in some]
            read = {one.question: what.read for one, what in zip(some, said)}
        else:
            prompted = TextReader(reader)
            said = []
            for one in some:
                order: Sequence[int] = ()
                if way == "text":  # what the memory read
                    order = read[one.question]
                elif way == "gold":
                    order = passages.gold(one)
                seen = known.get(one.question)
                said.append(ask_text(way, prompted, passages, one, order, seen))
        found[way] = summary(some, said, above)
        told[way] = marks(some, said, above)
        if way != "memory" and "memory" in told:
            both = [one for one in some if one.question in told["memory"]]
            gains = [told["memory"][one.question] - told[way][one.question] for one in both]
            found[way]["memory minus this"] = clustered_interval(gains, [one.group for one in both])
        print(way, json.dumps(found[way]), flush=True)
        found[way]["curve"] = {
            cut: {k: v for k, v in summary(some, said, cut).items() if k in _CURVE}
            for cut in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
        }
        if given.out:
            found[way]["said"] = [[s.text, round(s.doubt, 4), s.found] for s in said]
    return found


def found_by_all(
    memory: Memory, passages: Passages, asked: Sequence[Asked]
) -> dict[str, dict[str, Any]]:
    """How often each way of choosing has a right passage among its best 1, 4 and 8, of the
    questions whose answer is in a passage verbatim.
    """
    some = [(one, set(right)) for one in asked if (right := passages.right(one))]
    groups = [one.group for one, _ in some]
    ranks: dict[str, list[int | None]] = {}
    for way in _OTHERS:
        ranks[way] = [rank(passages.ranked(way, one.question)[:16], right) for one, right in some]
    ranks["memory"] = [rank(passages.found(memory, one), right) for one, right in some]
    found: dict[str, dict[str, Any]] = {}
    for way, theirs in ranks.items():
        found[way] = {"questions": len(some)}
        for k in (1, 4, 8):
            within = [float(at is not None and at < k) for at in theirs]
            ours = [float(at is not None and at < k) for at in ranks["memory"]]
            found[way][f"found {k}"] = mean(within)
            gains = [a - b for a, b in zip(ours, within)]
            found[way][f"memory minus this, {k}"] = clustered_interval(gains, groups)
        print(way, json.dumps(found[way]), flush=True)
    return found


def main() -> None:
    parser = options.plain_parser(__doc__)
    options.add(parser, "--set", "newwiki", choices=[*SETS, "office"])
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines, or a folder")
    options.add(parser, "--count", 300, "questions")
    options.add(parser, "--ways", list(WAYS))
    parser.add_argument("--top-k", type=int, help="passages that the memory reads at most")
    about = "passages that it reads, in deviations below the best; 1e9: all of --top-k"
    parser.add_argument("--score-range", type=float, help=about)
    about = "how much less it attends to a passage, per deviation; default: the model's"
    parser.add_argument("--score-bias", type=float, help=about)
    parser.add_argument("--only-search", action="store_true", help="find passages, answer nothing")
    options.add(parser, "--model", "smollm2")
    given = parser.parse_args()
    if unknown := [way for way in given.ways if not _WAY.fullmatch(way)]:
        parser.error(f"{unknown[0]} is not a way; memory, text, gold, bm25@K, minilm@K or fused@K")
    if "text" in given.ways and "memory" not in given.ways[: given.ways.index("text")]:
        parser.error("text reads what memory read: name memory before it")
    options.prepare(given.threads)
    documents, asked = planned(given.set, given.questions, given.count, given.seed)
    reader = load_reader(given.model)
    assert isinstance(reader, HuggingFacePassageModel)
    weighed = {"score_range": given.score_range, "score_bias": given.score_bias}
    reader.lookup = reader.lookup.changed(**weighed)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place, memstore.open(f"{place}/m", reader) as memory:
        if documents:
            for name, text in documents.items():
                memory.add(text=text, name=name)
        else:
            memory.add([p for p in given.questions.iterdir() if p.name != "questions.jsonl"])
        passages = Passages(memory, Path(place))
        sizes = f"{len(memory.documents())} documents, {len(passages.texts)} passages"
        print(f"{sizes}, {len(asked)} questions")
        if given.only_search:
            found |= found_by_all(memory, passages, asked)
        else:
            found |= asked_by_all(given, memory, passages, asked)
    results.write(given, {"set": given.set, "ways": found})


if __name__ == "__main__":
    main()
