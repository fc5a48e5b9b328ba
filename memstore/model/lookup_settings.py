"""Settings of lookups and of answers, checked when they are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypedDict, get_args

import numpy as np
from msgspec import Meta

from memstore.decode import Amount, Positive, Settings, Share
from memstore.errors import InvalidInput

Granularity = Literal["per_token_per_head", "per_token", "per_head", "shared"]
GRANULARITIES = get_args(Granularity)


CAUTION = 0.1
CAUTIONS = (0.02, 0.05, 0.1, 0.2, 0.3)
"""Shares of answerable questions refused, for each of which a threshold is calibrated."""

Steps = tuple[float, float, float, float, float]
"""A threshold for each of CAUTIONS."""


Probability = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""The range that torch's generators accept."""


def at_caution(steps: Steps, caution: float) -> float:
    """The threshold for a share of answerable questions, interpolated between those of CAUTIONS."""
    return float(np.interp(caution, CAUTIONS, steps))


@dataclass(frozen=True)
class LookupSettings(Settings):
    """How a lookup is done; no setting changes what is trained or stored (docs/appendix/method.md
    section 5).
    """

    # blocks retrieved per lookup, and recent blocks of a session
    top_k: Annotated[int, Meta(ge=1, le=1024)] = 4
    # passage models: read passages within so many standard deviations of the best; None: all
    score_range: Amount | None = None
    # passage models: subtracted from the attention logits of a passage for each standard deviation
    # of its score below the best, after the first half
    score_bias: Amount = 0.0
    # blocks of the session's own text fade: their scores fall by recency * log(age / top_k)
    recency: Amount = 0.0
    # trained landmarks: the greatest bonus of a later document's block over an earlier one's with a
    # similar score
    supersede: Amount = 0.0
    granularity: Granularity = "per_token_per_head"  # what shares a choice of blocks
    cmt_cutoff: Share = 0.1  # skip lookups of rows whose gate is below
    chunk_blocks: Annotated[int, Meta(ge=1, le=256)] = 8  # blocks read at once
    # latest blocks of a session's own text that are remembered (the paper's bound on its memory);
    # None: as many as main memory holds
    own_blocks: int | None = None
    # passage models: tokens of a session's own text that are held; older ones are dropped
    local_tokens: Annotated[int, Meta(ge=64, le=1 << 26)] = 2048
    # share of answerable questions that may be refused, as calibrated; 0 refuses nothing; higher
    # values also refuse more unanswerable questions
    caution: Annotated[float, Meta(ge=0, le=CAUTIONS[-1])] = CAUTION

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own_blocks is not None and self.own_blocks < self.top_k:
            raise InvalidInput(
                f"own_blocks is {self.own_blocks}; it must be at least top_k ({self.top_k})"
            )


LOOKUP_SETTINGS = tuple(field.name for field in fields(LookupSettings))


class AskOptions(TypedDict, total=False):
    """Options of `ask`: fields of LookupSettings and AnswerSettings; None takes the default."""

    top_k: int | None
    score_range: float | None
    score_bias: float | None
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
class AnswerSettings(Settings):
    """How `ask` and each turn of a chat generate and report an answer."""

    max_new_tokens: Positive = 24  # the longest answer
    temperature: Amount = 0.0  # 0 takes the most probable token; above 0 samples
    top_p: Probability = 1.0  # of the most probable tokens together, to sample from
    seed: Seed | None = None  # makes samples repeatable
    until_sentence: bool = True  # stop at the end of a sentence or line
    stop: Sequence[
        Annotated[str, Meta(min_length=1)]
    ] = ()  # texts that end an answer and are not part of it
    max_sources: Annotated[int, Meta(ge=0)] = 5  # maximum number of sources
    # if the gate finds no answer in the memory: refuse, and name the closest passages; False:
    # answer without the memory
    from_memory: bool = True
    on_text: Callable[[str], None] | None = None  # called with each piece of the text


ANSWER_SETTINGS = tuple(field.name for field in fields(AnswerSettings))
