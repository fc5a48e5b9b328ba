"""Results of `ask` and `search`: answers, matches, and their sources with the text to show."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from textwrap import shorten
from typing import Any, Literal, NamedTuple

from memstore.disk.format.document import Document
from memstore.errors import DocumentNotFound
from memstore.index.word_index import split_words
from memstore.model.adapter import ModelAdapter
from memstore.model.cutting import Level, Unit, divide, split
from memstore.model.session import BlockId, Trace
from memstore.model.tokenizer import TokenText
from memstore.store.memory_store import MemoryStore

# The text of stored documents, read back from their tokens

_CUT = 3  # tokens at most in which a character ends that began before them


class BlockText(NamedTuple):
    """The text of a block, its position in its document, and the gap after the block before it."""

    block: int
    start: int  # characters of the document before the text
    text: str
    characters: int
    gap: str = ""

    @property
    def end(self) -> int:
        """Character offset of its end in the document."""
        return self.start + self.characters


def block_texts(
    tokenizer: TokenText,
    store: MemoryStore,
    document: Document,
    first: int = 0,
    end: int | None = None,
) -> Iterator[BlockText]:
    """The texts of blocks first .. end - 1 of a document (None: all), in order. Raises
    DocumentNotFound, CorruptMemory.
    """
    end = document.blocks if end is None else min(end, document.blocks)
    if first >= end:
        return
    if document.settings.passage_tokens is not None:
        for block, one in enumerate(store.passages(document.id, first, end), first):
            text = tokenizer.decode(one.ids.tolist()).strip()
            yield BlockText(block, one.start, text, one.characters, one.gap)
        return
    # all have the same number of tokens, but for the last one
    size = store.signature.block_size
    last = min(end * size, document.tokens)
    read = store.tokens(document.id, first * size, last + _CUT)
    ids = read.ids.tolist()
    start = read.char_start + tokenizer.characters(read.before.tolist())
    for block in range(first, end):
        at, to = (block - first) * size, min((block + 1) * size, last) - first * size
        text = tokenizer.whole_characters(ids[at:to], ids[to : to + _CUT])
        yield BlockText(block, start, text, tokenizer.characters(ids[at:to]))
        start += tokenizer.characters(ids[at:to])


# What is shown of a block: the whole sentences that it is part of, or the one that answers

_BESIDE = 300  # characters at most that are shown on each side of a block
_WORDS = re.compile(r"\w(?:.*\w)?", re.DOTALL)
_MARKS = re.compile(r"\S(?:.*\S)?", re.DOTALL)
_TERM = re.compile(r"\w+(?:[-.,:/'’]\w+)*")  # "CP-60" and "7,450" are one


def shown_text(
    tokenizer: TokenText, store: MemoryStore, document: Document, block: int
) -> BlockText:
    """The text to show for a block, and its position: a passage unchanged; a block of a fixed
    number of tokens extended to `whole_sentences`. Raises DocumentNotFound, CorruptMemory.
    """
    if document.settings.passage_tokens is not None:
        return next(block_texts(tokenizer, store, document, block, block + 1))
    beside = -(-_BESIDE // store.signature.block_size)  # few tokens are less than a character
    near = list(block_texts(tokenizer, store, document, max(0, block - beside), block + beside + 1))
    own = next(one for one in near if one.block == block)
    begins = near[0].start
    text = "".join(one.text for one in near)
    first, end = whole_sentences(text, own.start - begins, own.end - begins, _BESIDE)
    return BlockText(block, begins + first, text[first:end], end - first)


def whole_sentences(text: str, first: int, end: int, most: int) -> tuple[int, int]:
    """Extend characters [first, end) to the ends of the sentences that they share a word with; to
    whole words, if a sentence extends more than `most` characters beyond them. White space alone
    stays unchanged.
    """
    inside = _WORDS.search(text, first, end) or _MARKS.search(text, first, end)
    if inside is None:
        return first, end
    units = list(split(text))
    begin = max(unit.start for unit in units if unit.start <= inside.start())
    stop = min(unit.end for unit in units if unit.end >= inside.end())
    least, last = first - most, end + most
    words = list(divide(text, Unit(begin, stop, Level.SENTENCE), Level.WORD))
    if begin < least:
        begin = min((at for at, *_ in words if least <= at <= inside.start()), default=least)
    if stop > last:
        stop = max((at for _, at, *_ in words if inside.end() <= at <= last), default=last)
    return begin, stop


def holds(text: str, answer: str) -> bool:
    """Whether a text contains the words of an answer, consecutively."""
    words, said = (" ".join(_TERM.findall(one.casefold())) for one in (text, answer))
    return said != "" and f" {said} " in f" {words} "


def answer_sentence(passage: str, question: str, answer: str = "") -> str:
    """The sentence of a passage that holds an answer, else the one that shares most words with the
    answer and its question.

    Rare words of the passage weigh more, and words of the answer twice as much. Headings are not
    sentences. Of equal sentences the earliest is returned; without sentences, the stripped passage.
    """
    units = [unit for unit in split(passage) if not unit.heading]
    sentences = [passage[unit.start : unit.end] for unit in units]
    if not sentences:
        return passage.strip()
    words = [set(split_words(sentence)) for sentence in sentences]
    frequency = Counter(word for own in words for word in own)
    wanted = Counter(dict.fromkeys(split_words(question), 1))
    wanted.update(dict.fromkeys(split_words(answer), 2))

    def score(sentence: str, own: set[int]) -> tuple[bool, float]:
        shared = sum(wanted[word] / frequency[word] for word in own if word in wanted)
        return holds(sentence, answer), shared

    return max(zip(sentences, words), key=lambda one: score(*one))[0]


# Results


@dataclass(frozen=True)
class Source:
    """A block that was read: the text to show, its place in its document, and the attention to it.

    span: (first, end) characters of the document, those of the whole sentences that the block is
    part of; text: these sentences.
    weight: attention mass summed over layers, heads and answer tokens; for a search, the similarity
    to the phrase (docs/appendix/method.md section 9); for a refusal, the score for the question.
    tiers: the part of it that was read from each tier. place: "page 12", or the headings above it;
    None if the document has none. also: other places of the same text, each a document and its
    characters. sentence: the sentence of the text that matches question and answer best.
    """

    document: str
    block: int
    span: tuple[int, int]
    text: str
    weight: float
    tiers: dict[str, float] = field(default_factory=dict, repr=False)
    place: str | None = None
    also: list[tuple[str, tuple[int, int]]] = field(default_factory=list)
    sentence: str = ""

    @classmethod
    def of(
        cls,
        reader: ModelAdapter,
        store: MemoryStore,
        document: Document,
        block: int,
        weight: float,
        tiers: Mapping[str, float] | None = None,
    ) -> "Source":
        """The source for a block; text and place are those of the whole sentences it is part of.

        weight, tiers: see Source; they are rounded to 4 decimals. Raises DocumentNotFound,
        CorruptMemory.
        """
        shown = shown_text(reader.tokenizer, store, document, block)
        blank, words = len(shown.text) - len(shown.text.lstrip()), len(shown.text.strip())
        return cls(
            document=document.name,
            block=block,
            span=(shown.start, shown.end),
            text=shown.text,
            place=document.places.at(shown.start + blank, shown.start + blank + words),
            weight=round(weight, 4),
            tiers={tier: round(mass, 4) for tier, mass in (tiers or {}).items()},
        )

    def with_sentence(self, question: str, answer: str = "") -> "Source":
        """A copy of this source with the `sentence` for a question and its answer."""
        return replace(self, sentence=answer_sentence(self.text, question, answer))

    @property
    def citation(self) -> dict[str, Any]:
        """What a reply shows of this source, as JSON values."""
        return {
            "document": self.document,
            "block": self.block,
            "span": list(self.span),
            "place": self.place,
            "text": self.text,
            "weight": self.weight,
        } | ({"sentence": self.sentence} if self.sentence else {})


class Found(NamedTuple):
    """A block that a search found, and its similarity to the phrase."""

    document: int
    block: int
    weight: float


Ranked = tuple[Iterator[Found], bool]
"""Blocks ranked by similarity to a phrase, best first; and `answered` as in Matches."""


class Matches(list[Source]):
    """Results of a search, best first. answered: False if the gate would refuse the phrase as a
    question, because no passage seems to answer it.
    """

    def __init__(self, found: Iterable[Source] = (), answered: bool = True) -> None:
        super().__init__(found)
        self.answered = answered


@dataclass(frozen=True)
class Answer:
    """An answer, its sources and its costs.

    answered: False if the gate found no answer in the memory. The text is then empty and the
    sources are the closest passages, with their scores as weights; with from_memory=False
    (AnswerSettings) the text is the model's own. finish_reason: "length" if max_new_tokens or a
    time limit ended it. needed: the score that the gate required of a passage; None for a model
    without a gate. doubt: the probability, 0 to 1, that no passage that was read answers; None if
    the model has not learned to tell. `str` of an answer is the text for a person. lookups:
    {"done", "skipped"}, see Lookups. tiers: {name: counts} of this answer, the fields of TierStats.
    seconds: from the question to the last token.
    """

    text: str
    tokens: list[int]
    sources: list[Source]
    lookups: dict[str, int]
    tiers: dict[str, dict[str, int | float]]
    seconds: float
    first_token_seconds: float
    answered: bool = True
    needed: float | None = None
    doubt: float | None = None
    finish_reason: Literal["stop", "length"] = "stop"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @property
    def refused(self) -> bool:
        """Whether the answer is a refusal, because the memory holds none."""
        return not self.answered and not self.text

    def __str__(self) -> str:
        return refusal(self.sources, self.needed, self.doubt) if self.refused else self.text


NOT_SURE = "Not sure: the memory does not seem to hold an answer"
_SHOWN = 160  # characters of a passage in a refusal


def refusal(
    sources: Sequence[Source], needed: float | None = None, doubt: float | None = None
) -> str:
    """The text of a refusal: its reason (see `not_sure`), and a line for each closest passage."""
    lines = [not_sure([source.weight for source in sources], needed, doubt)]
    for number, source in enumerate(sources, 1):
        place = "" if source.place is None else f", {source.place}"
        text = shorten(source.sentence or source.text, _SHOWN, placeholder="...")
        lines.append(f"{number}. {source.weight:.2f} {source.document}{place}: {text}")
    return "\n".join(lines)


def not_sure(
    scores: Sequence[float], needed: float | None = None, doubt: float | None = None
) -> str:
    """The first line of a refusal. scores: of the closest passages, best first; needed: the score
    that a passage needs, shown if the best has less; doubt: the probability that none answers.
    """
    line = NOT_SURE + ("." if doubt is None else f" (probability {doubt:.2f}).")
    if not scores:
        return line
    below = needed is not None and scores[0] < needed
    return f"{line} Closest passages{f' (an answer needs {needed:.2f})' if below else ''}:"


def sources_of(
    trace: Trace,
    store: MemoryStore,
    most: int,
    answer: str = "",
    same: Mapping[BlockId, Sequence[BlockId]] | None = None,
) -> list[Source]:
    """The `most` document blocks that an answer read most: first those that hold the answer, then
    the others, best first. same: for a block, others with the same text. Documents that were
    deleted since are left out.
    """
    found = list[Source]()
    for (document, block), mass in trace.ranked(len(trace.blocks)):
        if len(found) == most:
            break
        tiers = trace.blocks[document, block]
        with suppress(DocumentNotFound):
            row = store.document(document)
            found.append(Source.of(trace.reader, store, row, block, mass, tiers))
            for other, number in (same or {}).get((document, block), ()):
                row = store.document(other)
                text = shown_text(trace.reader.tokenizer, store, row, number)
                found[-1].also.append((row.name, (text.start, text.end)))
    return sorted(found, key=lambda source: not holds(source.text, answer))
