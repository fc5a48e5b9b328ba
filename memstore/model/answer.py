"""Result types of `ask` and `search`: the text, and the blocks that were read for it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from textwrap import shorten
from typing import Any, Literal, NamedTuple

from memstore.disk.format.document import Document
from memstore.model.adapter import ModelAdapter
from memstore.model.session import AskSession
from memstore.model.texts.document_text import shown_text
from memstore.store.memory_store import MemoryStore

Reads = Mapping[tuple[int, int, str], float]
"""What was read of a block: by (layer, head, tier), how much."""


@dataclass(frozen=True)
class Source:
    """A block that was read: what is shown of it, where that stands in its document, and how
    strongly the block was attended.

    span: (first, end) characters of the document, those of the whole sentences that the block is
    part of (memstore.model.texts.document_text); text: they.
    weight: attention mass summed over layers, heads and answer tokens; of a search, how like the
    phrase it is (docs/appendix/method.md section 9); of a refusal, its score for the question.
    reads: one entry a (layer, head, tier): the part read there. place: "page 12", or the headings
    that it stands under; None where the document has none. also: where the same text stands
    besides, each a document and its characters.
    """

    document: str
    block: int
    span: tuple[int, int]
    text: str
    weight: float
    reads: list[dict[str, Any]] = field(repr=False)
    place: str | None = None
    also: list[tuple[str, tuple[int, int]]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        reader: ModelAdapter,
        store: MemoryStore,
        document: Document,
        block: int,
        reads: Reads,
        weight: float | None = None,
    ) -> "Source":
        """A block of a document; weight: None for the sum of what was read. Raises
        DocumentNotFound, CorruptMemory.
        """
        shown = shown_text(reader.tokenizer, store, document, block)
        blank, words = len(shown.text) - len(shown.text.lstrip()), len(shown.text.strip())
        return cls(
            document=document.name,
            block=block,
            span=(shown.start, shown.end),
            text=shown.text,
            place=document.places.at(shown.start + blank, shown.start + blank + words),
            weight=round(sum(reads.values()) if weight is None else weight, 4),
            reads=[
                {"layer": layer, "head": head, "tier": tier, "weight": round(mass, 4)}
                for (layer, head, tier), mass in sorted(reads.items(), key=lambda item: -item[1])
            ],
        )

    @property
    def citation(self) -> dict[str, Any]:
        """What a reply shows of it, as JSON values."""
        return {
            "document": self.document,
            "block": self.block,
            "span": list(self.span),
            "place": self.place,
            "text": self.text,
            "weight": self.weight,
        }


class Found(NamedTuple):
    """A block that a search found, how like the phrase it is, and what was read of it."""

    document: int
    block: int
    weight: float
    reads: Reads


class Ranking(NamedTuple):
    """Blocks by how like a phrase they are, best first; answered: as in Matches."""

    found: Iterator[Found]
    answered: bool = True


class Matches(list[Source]):
    """What a search found, best first. answered: False where the gate would refuse the phrase as a
    question: none of the passages seems to answer it.
    """

    def __init__(self, found: Iterable[Source] = (), answered: bool = True) -> None:
        super().__init__(found)
        self.answered = answered

    def _repr_html_(self) -> str:
        """The passages, as a notebook shows them."""
        return _listed(self)


@dataclass(frozen=True)
class Answer:
    """What was answered, from where, and what it cost.

    answered: False where the gate found no answer in the memory. The text is then empty and the
    sources are the closest passages, with their scores as weights; with from_memory=False
    (AnswerSettings) the text is the model's own. finish_reason: "length" if max_new_tokens or a
    time limit ended it. needed: the score that the gate wanted of a passage; None for a model
    without a gate. doubt: the probability, 0 to 1, that nothing that was read answers; None
    if it has not learned to say so. `str` of an answer is what to show a person. lookups: {"done",
    "skipped"}, see Lookups. tiers: {name: counts} of this answer, the fields of TierStats. seconds:
    from the question to the last token.
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
        """Whether nothing was answered because the memory holds no answer."""
        return not self.answered and not self.text

    def __str__(self) -> str:
        return refusal(self.sources, self.needed) if self.refused else self.text

    def _repr_html_(self) -> str:
        """The answer and its passages, as a notebook shows them."""
        said = NOT_SURE if self.refused else self.text
        return f"<p><b>{escape(said)}</b></p>{_listed(self.sources)}"


NOT_SURE = "Not sure: the memory does not seem to hold an answer."
_SHOWN = 160  # characters of a passage in a refusal


def refusal(sources: Sequence[Source], needed: float | None = None) -> str:
    """What a person reads where the memory holds no answer: the closest passages, a line each with
    its score, and the score that was needed.
    """
    if not sources:
        return NOT_SURE
    lines = [f"{NOT_SURE} Closest passages{_needed(needed)}:"]
    for number, source in enumerate(sources, 1):
        place = "" if source.place is None else f", {source.place}"
        text = shorten(source.text, _SHOWN, placeholder="...")
        lines.append(f"{number}. {source.weight:.2f} {source.document}{place}: {text}")
    return "\n".join(lines)


def _needed(needed: float | None) -> str:
    return "" if needed is None else f" ({needed:.2f} needed)"


def closest_sources(reader: ModelAdapter, session: AskSession, most: int) -> list[Source]:
    """The closest passages of a question that a session's gate refused, best first, at most so
    many; their weights are their scores.
    """
    store = session.store
    known = store.readable()
    return [
        Source.of(reader, store, known[document], block, {}, score)
        for document, block, score in session.closest
        if document in known
    ][:most]


def _listed(sources: Iterable[Source]) -> str:
    items = "".join(f"<li>{_html(source)}</li>" for source in sources)
    return f"<ol>{items}</ol>"


def _html(source: Source) -> str:
    place = "" if source.place is None else f", {escape(source.place)}"
    return f"<i>{escape(source.document)}{place}</i>: {escape(source.text.strip())}"
