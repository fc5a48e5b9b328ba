"""An adaptation: what was found out about a model, so that it can choose and read passages."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from memstore.model.passages.selectors.selector import Gate, Selector
from memstore.model.texts.passage_context import Context

SEPARATOR = "\n\nQuestion: "


@dataclass(frozen=True)
class Adaptation:
    """A model's selector, and how what it finds is read: what `memstore adapt` writes."""

    selector: Selector
    read_from: int = 0  # the first layer that reads blocks; those below are not stored whole
    top_k: int = 8  # blocks read of a question at most
    # of these, the best and those whose score is within so many standard deviations; None = all
    score_range: float | None = None
    separator: str = SEPARATOR  # between what is read and the words of a question
    # is each of several passages computed over those before it: it answers more where a later one
    # counts, and nowhere less (docs/results.md)
    chained: bool = True
    passage_tokens: int = 64  # that a passage is filled up to; a longer sentence stays whole
    context: Context = "none"  # read in front of a passage, though it stands elsewhere
    gate: Gate | None = None  # says whether anything in a memory answers; None = it always may
    weights: str = ""  # digest of the model's; "" = of any
    scores: Mapping[str, float] = field(default_factory=dict)  # on held-out questions


UNADAPTED = Adaptation(Selector(), top_k=4, score_range=1.0)
"""For a model that nothing is known of: the words of a question choose."""
