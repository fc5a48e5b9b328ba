"""What a passage model is: an adapter whose blocks are passages, chosen once for a question."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from memstore.model.adapter import AttentionSpec, ModelAdapter
from memstore.model.passages.adaptation import Refusal
from memstore.model.passages.selector import Gate, Selector
from memstore.model.rotary import Positions


class PassageModel(ModelAdapter):
    """A reader whose blocks are passages: chosen once for a question, by a selector, and read by
    every memory layer where a prompt would have them. Its `attend` gets keys without position; they
    are stored so. shape.block_size is the most tokens that a passage has.
    """

    selector: Selector
    gate: Gate | None  # says whether anything in a memory answers; None = it always may
    adapted_passages = False  # are passages computed with a reading adapter,
    adapted_turns = False  # and questions and answers, in a session that reads passages?
    refusal: Refusal | None = None  # how such a session says that nothing answers
    prefix_ids: list[int]  # what every text and every question begins with (attention sinks)
    separator_ids: list[int]  # between what is read of a memory and the local text
    forms: Sequence[AttentionSpec]
    passage_tokens: int  # that passages are filled up to

    @abstractmethod
    def rotate(self, layer: int, x: Tensor, positions: Tensor | range | Positions) -> Tensor:
        """Queries or keys [B, H, T, D] of a layer, turned to positions [T]; a range of them, where
        they follow one another, is the fastest.
        """

    @abstractmethod
    def turn_ids(self, question: str, *, first: bool) -> tuple[list[int], range]:
        """A question as the next turn of a conversation, behind the prefix if it is the first; and
        which of these ids are the question's own words.
        """

    @abstractmethod
    def ends_turn(self, token: int) -> bool:
        """Does an answer end with this token?"""
