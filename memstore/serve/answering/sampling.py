"""How an answer is generated and when it ends, as clients ask for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memstore.model.reader import TextTokenizer
from memstore.model.said import Said


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


def said_by(tokenizer: TextTokenizer, sampling: Sampling) -> Said:
    """What is said of an answer so far: nothing."""
    return Said(tokenizer, stop=sampling.stop, sentence=sampling.sentence, raw=sampling.raw)


def ends(said: Said) -> Callable[[int], bool]:
    """For `generate`: has what was said so far come to its end?"""
    return lambda token: said.ended


def stop_texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop texts as a tuple, as clients give them."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
