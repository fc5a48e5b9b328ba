"""Sampling parameters and stop conditions of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from memstore.model.adapter import TextTokenizer
from memstore.model.texts.detokenizer import Detokenizer


@dataclass(frozen=True)
class Sampling:
    """Of one answer. sentence: end it with its first sentence or line; raw: leave the space around
    it.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    sentence: bool = False
    raw: bool = False

    def detokenizer(self, tokenizer: TextTokenizer) -> Detokenizer:
        """What makes text of the answer's tokens as they come, and knows where it ends."""
        return Detokenizer(tokenizer, stop=self.stop, sentence=self.sentence, raw=self.raw)


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop texts as a tuple, as clients give them."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
