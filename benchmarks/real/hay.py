"""The hay that sentences are planted in: prose of books, cut to a number of tokens."""

import re
from collections.abc import Callable, Sequence
from random import Random

Offsets = Callable[[str], list[tuple[int, int]]]  # the characters of each token of a text
_SENTENCE_END = re.compile(r"(?<=[a-z][.!?])[\"”’']?(?=\s)")


class Hay:
    """Prose of books, in lengths counted with a model's tokens."""

    def __init__(self, offsets: Offsets, texts: Sequence[str], rng: Random) -> None:
        self.offsets, self.rng = offsets, rng
        self.texts = [flowing(text) for text in texts]

    def prose(self, tokens: int) -> str:
        """`tokens` consecutive tokens, from the beginning of a sentence of a random book. Raises
        SystemExit if no book is that long.
        """
        text = self._from_a_book(8 * tokens + 1000)
        ends = self.offsets(text)
        if len(ends) < tokens:
            raise SystemExit(f"no book has {tokens:,} tokens; give longer texts")
        return text[: ends[tokens - 1][1]]

    def _from_a_book(self, characters: int) -> str:
        room = [max(0, len(text) - characters // 2) for text in self.texts]
        if not any(room):
            return max(self.texts, key=len)
        book = self.rng.choices(self.texts, room)[0]
        start = self.rng.randrange(max(1, len(book) - characters // 2))
        after = next_sentence_end(book, start)
        return book[after:][:characters].lstrip()


def flowing(text: str) -> str:
    """A book as flowing text: no carriage returns, emphasis or hard line ends."""
    text = text.replace("\r", "").replace("_", "").replace("*", "")
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return re.sub(r"[ \t]+", " ", re.sub(r"\n{2,}", "\n\n", text))


def next_sentence_end(text: str, start: int) -> int:
    """The end of the first sentence that ends at `start` or later; `start` if none does."""
    found = _SENTENCE_END.search(text, start)
    return found.end() if found else start
