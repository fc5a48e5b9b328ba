"""What may be chosen for a lookup, and for an answer: checked once, when they are made."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, TypeVar, get_args

import numpy as np

from memstore.errors import InvalidInput

Granularity = Literal["per_token_per_head", "per_token", "per_head", "shared"]
GRANULARITIES = get_args(Granularity)


CAUTION = 0.1
CAUTIONS = (0.02, 0.05, 0.1, 0.2, 0.3)
"""Shares of answerable questions refused, for each of which a threshold is calibrated."""

Steps = tuple[float, float, float, float, float]
"""A threshold for each of CAUTIONS."""


def at_caution(steps: Steps, caution: float) -> float:
    """The threshold for a share of answerable questions that lies between those calibrated."""
    return float(np.interp(caution, CAUTIONS, steps))


_WHOLE = ("top_k", "chunk_blocks", "own_blocks", "local_tokens")
_ANY = ("own_blocks",)  # of these, None is a choice
_SEEDS = -(1 << 63), (1 << 64) - 1  # what torch's generators take


@dataclass(frozen=True)
class LookupSettings:
    """How a lookup is made; nothing of it changes what is trained or stored
    (docs/appendix/method.md 5).

    Raises InvalidInput, which names what is out of range.
    """

    top_k: int = 4  # blocks retrieved per lookup, and recent blocks of a session
    # of these, only those that score at least the best - score_range; None = all
    score_range: float | None = None
    # blocks of the session's own text fade: their scores fall by recency * log(age / top_k)
    recency: float = 0.0
    # with trained landmarks: of blocks of documents that score alike the later ones gain up to so
    # much over each earlier one
    supersede: float = 0.0
    granularity: Granularity = "per_token_per_head"  # over what a choice of blocks is shared
    cmt_cutoff: float = 0.1  # lookups of rows whose gate is below are skipped
    chunk_blocks: int = 8  # blocks read at once
    # of a session's own text only so many of the latest blocks are remembered (the paper's bound on
    # its memory); None = as many as main memory has room for
    own_blocks: int | None = None
    # of a passage model (one that chooses once for a question): tokens of a session's own text
    # that are held whole, the older ones being chosen like passages of documents
    local_tokens: int = 1024
    # the share of answerable questions that may be refused, of those that the model was calibrated
    # with; 0 refuses nothing. The more, the more of the unanswerable ones are refused
    caution: float = CAUTION

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if not (isinstance(value, Integral) or (value is None and name in _ANY)):
                raise InvalidInput(f"{name} must be a whole number, is {value!r}")
        if not 1 <= self.top_k <= 1024:
            raise InvalidInput(f"top_k must lie in 1..1024, is {self.top_k}")
        if not (_is_amount(self.caution) and self.caution <= CAUTIONS[-1]):
            raise InvalidInput(
                f"caution, the share of answerable questions that may be refused, must lie in "
                f"0..{CAUTIONS[-1]}, is {self.caution!r}"
            )
        for name in ("score_range", "recency", "supersede"):
            value = getattr(self, name)
            if value is not None and not _is_amount(value):
                raise InvalidInput(f"{name} must be a finite number of at least 0, is {value!r}")
        if self.granularity not in GRANULARITIES:
            raise InvalidInput(
                f"granularity must be one of {', '.join(GRANULARITIES)}, not {self.granularity!r}"
            )
        if not (_is_amount(self.cmt_cutoff) and self.cmt_cutoff <= 1):
            raise InvalidInput(f"cmt_cutoff must lie in 0..1, is {self.cmt_cutoff!r}")
        if not 64 <= self.local_tokens <= 1 << 26:
            raise InvalidInput(f"local_tokens must lie in 64..{1 << 26}, is {self.local_tokens}")
        if not 1 <= self.chunk_blocks <= 256:
            raise InvalidInput(f"chunk_blocks must lie in 1..256, is {self.chunk_blocks}")
        if self.own_blocks is not None and self.own_blocks < self.top_k:
            raise InvalidInput(
                f"own_blocks must be at least top_k, the {self.top_k} latest that are always "
                f"there; is {self.own_blocks}"
            )

    def changed(self, **settings: Any) -> "LookupSettings":
        """These with others in their place; None leaves one as it is. Raises InvalidInput."""
        return _changed(self, settings, LOOKUP_SETTINGS)


LOOKUP_SETTINGS = tuple(field.name for field in fields(LookupSettings))


class AskOptions(TypedDict, total=False):
    """What `ask` takes beside the question: fields of LookupSettings and of AnswerSettings; None
    leaves one as it is.
    """

    top_k: int | None
    score_range: float | None
    recency: float | None
    supersede: float | None
    granularity: Granularity | None
    cmt_cutoff: float | None
    chunk_blocks: int | None
    own_blocks: int | None
    local_tokens: int | None
    caution: float | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    until_sentence: bool | None
    stop: Sequence[str] | None
    max_sources: int | None
    from_memory: bool | None
    on_text: Callable[[str], None] | None


@dataclass(frozen=True)
class AnswerSettings:
    """How an answer is generated and told: what `ask` and every turn of a chat take.

    Raises InvalidInput, which names what is out of range.
    """

    max_new_tokens: int = 24  # the longest answer
    temperature: float = 0.0  # 0 takes the likeliest token; above samples
    top_p: float = 1.0  # samples are drawn from the likeliest tokens of this probability together
    seed: int | None = None  # makes samples repeatable
    until_sentence: bool = True  # stop at the end of a sentence or line
    stop: Sequence[str] = ()  # texts that end an answer and are no part of it
    max_sources: int = 5  # places in documents that it names
    # where the gate finds no answer in the memory: refuse, and name the closest passages; False has
    # the model answer without the memory
    from_memory: bool = True
    on_text: Callable[[str], None] | None = None  # told the text piece by piece, as it comes

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, Integral) or self.max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens must be at least 1, is {self.max_new_tokens!r}")
        check_sampling(self.temperature, self.top_p, self.seed)

    def tell(self, text: str) -> None:
        """A piece of the answer has come."""
        if self.on_text is not None:
            self.on_text(text)

    def changed(self, **settings: Any) -> "AnswerSettings":
        """These with others in their place; None leaves one as it is. Raises InvalidInput."""
        return _changed(self, settings, ANSWER_SETTINGS)


def check_sampling(temperature: float, top_p: float, seed: int | None) -> None:
    """Raises InvalidInput for what nothing can be sampled by."""
    if not _is_amount(temperature):
        raise InvalidInput(f"temperature must be a finite number of at least 0, is {temperature!r}")
    if not (_is_amount(top_p) and 0 < top_p <= 1):
        raise InvalidInput(f"top_p must lie above 0 and up to 1, is {top_p!r}")
    first, last = _SEEDS
    if seed is not None and not (isinstance(seed, Integral) and first <= int(seed) <= last):
        raise InvalidInput(f"seed must be a whole number from -2**63 to 2**64 - 1, is {seed!r}")


def _is_amount(value: object) -> bool:
    try:
        return isinstance(value, Real) and 0 <= float(value) < math.inf
    except OverflowError:
        return False


ANSWER_SETTINGS = tuple(field.name for field in fields(AnswerSettings))

Settings = TypeVar("Settings", LookupSettings, AnswerSettings)


def _changed(old: Settings, settings: dict[str, Any], known: tuple[str, ...]) -> Settings:
    given = {name: value for name, value in settings.items() if value is not None}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InvalidInput(f"unknown setting {unknown[0]!r}; choose one of {', '.join(known)}")
    return replace(old, **given)
