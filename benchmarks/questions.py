"""Questions that people asked, answered from one memory of many documents, and by rivals.

The contexts of a set are documents of one memory. A seeded 30% of them stay out, and their
questions are those that nothing answers. Every way of answering generates at most 24 tokens with
the same weights, greedily.

ways: "memory" is what `memstore ask` does; "text" reads the memory's passages in the prompt;
"bm25", "minilm" and "fused" choose the best of the same passages otherwise and read them as text;
"gold" reads the passage that is known to be right. "-stock" reads without the reading adapter.
"""

import json
import random
import re
import string
import tempfile
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memstore
from benchmarks.common import options, results
from benchmarks.common.intervals import mean_interval
from benchmarks.real.baselines import Sentences, minilm
from memstore.hf.load import load_reader
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.memory import Memory
from memstore.model.passages.repositioned_attention import RepositionedAttention, read_prefix
from memstore.training.reading_questions import UNKNOWN, read_questions

TOKENS = 24  # of an answer, at most
LEFT_OUT = 0.3  # of the contexts
SETS = {
    "newwiki": ("squadshifts_newwiki", "en"),
    "fairytale": ("fairytaleqa", "en"),
    "piaf": ("piaf", "fr"),
    "2wiki": ("2wiki_sample", "en"),
}
WAYS = (
    "memory",
    "text",
    "bm25",
    "minilm",
    "fused",
    "gold",
    "bm25-stock",
    "fused-stock",
    "gold-stock",
)
_ARTICLES = re.compile(r"\b(a|an|the|der|die|das|le|la|les|l|un|une)\b")


@dataclass(frozen=True)
class Asked:
    """accepted: an answer is right if it holds all strings of one of these; none where nothing in
    the memory answers. document: that does; group: the article, by which intervals are clustered.
    """

    question: str
    accepted: tuple[tuple[str, ...], ...]
    document: str
    group: str


@dataclass(frozen=True)
class Said:
    """What came of a question. found: the rank of the right passage, None where it is not there."""

    text: str
    refused: bool
    seconds: float
    found: int | None = None


def plain(text: str) -> str:
    """Lower case without punctuation, accents and articles."""
    text = unicodedata.normalize("NFKD", text.lower())
    text = "".join(c if c not in string.punctuation + "’‘“”«»" else " " for c in text)
    text = "".join(c for c in text if not unicodedata.combining(c))
    return " ".join(_ARTICLES.sub(" ", text).split())


def is_right(said: str, asked: Asked) -> bool:
    words = f" {plain(said)} "
    return any(all(f" {plain(part)} " in words for part in some) for some in asked.accepted)


def f1(said: str, asked: Asked) -> float:
    """Of tokens, against the nearest of the accepted answers."""
    best, mine = 0.0, plain(said).split()
    for some in asked.accepted:
        theirs = plain(" ".join(some)).split()
        common = sum((Counter(mine) & Counter(theirs)).values())
        if common:
            best = max(best, 2 * common / (len(mine) + len(theirs)))
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
        self._work = work
        self._vectors: np.ndarray | None = None
        self._sentences: Sentences | None = None
        self._words: Any = None

    def right(self, asked: Asked) -> list[int]:
        """The passages that hold an answer, of the documents that are known to."""
        names = asked.document.split("|")
        return [
            at
            for at, (document, _) in enumerate(self.places)
            if any(name and name in document for name in names) and is_right(self.texts[at], asked)
        ]

    def ranked(self, way: str, question: str) -> list[int]:
        """All passages, best first."""
        if way == "fused":  # reciprocal ranks (Cormack et al. 2009)
            scores = np.zeros(len(self.texts))
            for one in ("bm25", "minilm"):
                order = self.ranked(one, question)
                scores[order] += 1 / (61 + np.arange(len(order)))
        elif way == "bm25":
            scores = self._by_words(question)
        else:
            scores = self._by_meaning(question)
        return np.argsort(-scores, kind="stable").tolist()

    def _by_words(self, question: str) -> np.ndarray:
        import bm25s

        if self._words is None:
            self._words = bm25s.BM25()
            tokens = bm25s.tokenize(self.texts, stopwords="en", show_progress=False)
            self._words.index(tokens, show_progress=False)
        asked = bm25s.tokenize(question, stopwords="en", return_ids=False, show_progress=False)[0]
        known = [word for word in asked if word in self._words.vocab_dict]
        return self._words.get_scores(known) if known else np.zeros(len(self.texts))

    def _by_meaning(self, question: str) -> np.ndarray:
        if self._sentences is None:
            self._sentences = Sentences(None, minilm(self._work))  # type: ignore[arg-type]
            self._vectors = self._sentences.embed(self.texts)
        return self._vectors @ self._sentences.embed([question])[0]


class TextReader:
    """Reads passages as text in the prompt, and answers with the weights that a session uses."""

    def __init__(self, reader: HuggingFacePassageModel, adapt: bool) -> None:
        self.reader, self.adapt = reader, adapt and reader.adapted_turns

    @torch.no_grad()
    def answer(self, passages: Sequence[Sequence[int]], question: str) -> str:
        reader = self.reader
        prefix = read_prefix(reader, self.adapt)
        attention = RepositionedAttention(reader, prefix, adapt=self.adapt)
        turn, _ = reader.turn_ids(question, first=True)
        ids = [token for one in passages for token in one]
        ids += [*reader.separator_ids, *turn] if ids else turn
        states = reader.hidden(torch.tensor([ids]), attention.attend, adapt=self.adapt)
        said: list[int] = []
        for _ in range(TOKENS):
            token = int(reader.logits(states[0, -1:], quantized=True).argmax())
            if reader.ends_turn(token):
                break
            said.append(token)
            states = reader.hidden(
                torch.tensor([[token]]), attention.attend, quantized=True, adapt=self.adapt
            )
        return reader.tokenizer.decode(said).strip()


def ask_memory(memory: Memory, passages: Passages, asked: Asked) -> Said:
    began = time.perf_counter()
    answer = memory.ask(asked.question, max_new_tokens=TOKENS, until_sentence=False)
    seconds = time.perf_counter() - began
    refused = not answer.answered or answer.text.strip().startswith(UNKNOWN[:-1])
    best = memory.search(asked.question, top_k=16)
    right = set(passages.right(asked))
    place = {one: at for at, one in enumerate(passages.places)}
    order = [place.get((one.document, one.block), -1) for one in best]
    return Said(answer.text.strip(), refused, seconds, rank(order, right))


def rank(order: Sequence[int], right: set[int]) -> int | None:
    return next((at for at, one in enumerate(order) if one in right), None)


def ask_text(
    way: str, reader: TextReader, passages: Passages, asked: Asked, k: int, memory: Memory
) -> Said:
    began = time.perf_counter()
    right = passages.right(asked)
    if way == "gold":
        order = right[:1]
    elif way == "text":
        best = memory.search(asked.question, top_k=16)
        place = {one: at for at, one in enumerate(passages.places)}
        order = [place[(one.document, one.block)] for one in best]
    else:
        order = passages.ranked(way, asked.question)
    chosen = sorted(order[:k])
    said = reader.answer([passages.ids[at] for at in chosen], asked.question)
    seconds = time.perf_counter() - began
    return Said(said, said.startswith(UNKNOWN[:-1]), seconds, rank(order[:16], set(right)))


def summary(asked: Sequence[Asked], said: Sequence[Said]) -> dict[str, Any]:
    """What a way of answering did."""
    answerable = [(a, s) for a, s in zip(asked, said) if a.accepted]
    others = [s for a, s in zip(asked, said) if not a.accepted]
    right = [is_right(s.text, a) and not s.refused for a, s in answerable]
    by_group: dict[str, list[float]] = defaultdict(list)
    for (a, _), one in zip(answerable, right):
        by_group[a.group].append(one)
    _, low, high = mean_interval([float(np.mean(some)) for some in by_group.values()])
    return {
        "right": mean(right),
        "interval": [low, high],
        "f1": mean([f1(s.text, a) for a, s in answerable]),
        "words": mean([len(s.text.split()) for _, s in answerable]),
        "refused": mean([s.refused for _, s in answerable]),
        "unanswerable refused": mean([s.refused for s in others]),
        "found 1": mean([s.found is not None and s.found < 1 for _, s in answerable]),
        "found 4": mean([s.found is not None and s.found < 4 for _, s in answerable]),
        "found 8": mean([s.found is not None and s.found < 8 for _, s in answerable]),
        "seconds": float(np.median([s.seconds for s in said])),
    }


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def main() -> None:
    parser = options.plain_parser(__doc__)
    options.add(parser, "--set", "newwiki", choices=[*SETS, "office"])
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines, or a folder")
    options.add(parser, "--count", 300, "questions")
    options.add(parser, "--ways", list(WAYS), choices=WAYS)
    options.add(parser, "--k", 4, "passages that are read as text")
    options.add(parser, "--model", "smollm2")
    given = parser.parse_args()
    options.prepare(given.threads)
    documents, asked = planned(given.set, given.questions, given.count, given.seed)
    reader = load_reader(given.model)
    assert isinstance(reader, HuggingFacePassageModel)
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
        for way in given.ways:
            if way == "memory":
                said = [ask_memory(memory, passages, one) for one in asked]
            else:
                kind, _, stock = way.partition("-")
                prompted = TextReader(reader, adapt=not stock)
                said = [ask_text(kind, prompted, passages, one, given.k, memory) for one in asked]
            found[way] = summary(asked, said)
            print(way, json.dumps(found[way]), flush=True)
            if given.out:
                found[way]["said"] = [s.text for s in said]
    results.write(given, {"set": given.set, "ways": found})


if __name__ == "__main__":
    main()
