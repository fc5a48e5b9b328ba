"""The hay: prose of books or noise, cut to a number of tokens, and sentences planted in it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.real.plan import Stated

Offsets = Callable[[str], list[tuple[int, int]]]  # of a text, each token's characters
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SENTENCE_END = re.compile(r"(?<=[a-z][.!?])[\"”’']?(?=\s)")


@dataclass(frozen=True)
class Needle:
    """A text to plant, and what of it is the value that will be asked for.

    needed: the sentences or lines of it without which nobody could answer, () for all of it. apart:
    it is a paragraph of its own, and not a sentence among others.
    """

    text: str
    value: str
    needed: tuple[str, ...] = ()
    apart: bool = False

    @property
    def around(self) -> tuple[str, str]:
        """What is planted before and behind it."""
        return ("\n\n", "\n\n") if self.apart else (" ", "")

    def places(self, document: str, start: int) -> list[Stated]:
        """Where its needed parts stand once its first character is the text's `start`."""
        if not self.needed:
            at = self.text.rfind(self.value) if self.value else 0
            return [Stated(document, start, start + len(self.text), start + max(0, at))]
        found = []
        for part in self.needed:
            first, at = start + self.text.index(part), part.rfind(self.value)
            value = first + at if at >= 0 else None
            found.append(Stated(document, first, first + len(part), value))
        return found


class Hay:
    """Text to hide sentences in, in lengths counted with a reader's tokens.

    texts: books; None: the noise that the literature uses. Raises SystemExit if no text is as long
    as what is asked for.
    """

    def __init__(self, offsets: Offsets, texts: Sequence[str] | None, rng: Random) -> None:
        self.offsets, self.rng = offsets, rng
        self.texts = None if texts is None else [flowing(text) for text in texts]

    def prose(self, tokens: int) -> str:
        """`tokens` consecutive tokens, from the beginning of a sentence of a random book."""
        characters = 8 * tokens + 1000
        if self.texts is None:
            text = f"{NOISE} " * (characters // len(NOISE) + 1)
        else:
            text = self._from_a_book(characters)
        ends = self.offsets(text)
        if len(ends) < tokens:
            raise SystemExit(f"no book has {tokens:,} tokens; give longer texts")
        return text[: ends[tokens - 1][1]]

    def _from_a_book(self, characters: int) -> str:
        assert self.texts is not None
        room = [max(0, len(text) - characters // 2) for text in self.texts]
        if not any(room):
            return max(self.texts, key=len)
        book = self.rng.choices(self.texts, room)[0]
        start = self.rng.randrange(max(1, len(book) - characters // 2))
        after = _SENTENCE_END.search(book, start)
        return book[after.end() if after else start :][:characters].lstrip()

    def plant(
        self, name: str, tokens: int, groups: Sequence[Sequence[Needle]]
    ) -> tuple[str, list[list[Stated]]]:
        """A document of `tokens` tokens with needles after random sentences; those of a group stand
        in their order, and none is cut off: the document is rather a little longer. Returns the
        text, and where what is needed of each group stands.
        """
        needles = sum(map(len, groups))
        added = sum(
            len(self.offsets(needle.around[0] + needle.text + needle.around[1]))
            for group in groups
            for needle in group
        )
        if added > 0.8 * tokens:
            raise ValueError(f"{needles} sentences of {added} tokens leave no hay in {tokens:,}")
        hay = self.prose(tokens - added + 32)
        ends = [match.end() for match in _SENTENCE_END.finditer(hay)]
        last = len(hay) * (tokens - added - 40) // (tokens - added + 32)
        ends = [end for end in ends if 0 < end < last]
        if len(ends) < needles:
            ends = sorted({*ends, *(m.start() for m in re.finditer(r" ", hay[: max(1, last)]))})
        slots = self.rng.sample(ends, needles)
        order: list[tuple[int, int, int]] = []  # place in the hay, group, number in the group
        for number, group in enumerate(groups):
            own = sorted(slots.pop() for _ in group)
            order += [(slot, number, index) for index, slot in enumerate(own)]
        pieces, length, before = [], 0, 0
        stated: dict[tuple[int, int], list[Stated]] = {}
        for slot, number, index in sorted(order):
            needle = groups[number][index]
            first, behind = needle.around
            pieces += [hay[before:slot], first]
            length += slot - before + len(first)
            stated[number, index] = needle.places(name, length)
            pieces += [needle.text, behind]
            length, before = length + len(needle.text) + len(behind), slot
            if behind and hay[slot : slot + 1] == " ":
                before += 1  # a paragraph begins
        text = "".join([*pieces, hay[before:]])
        ends_of_tokens = self.offsets(text)
        end = ends_of_tokens[min(tokens, len(ends_of_tokens)) - 1][1]
        text = text[: max(end, length)]
        return text, [
            [place for i in range(len(group)) for place in stated[n, i]]
            for n, group in enumerate(groups)
        ]


def flowing(text: str) -> str:
    """A book as flowing text: no carriage returns, emphasis or hard line ends."""
    text = text.replace("\r", "").replace("_", "").replace("*", "")
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return re.sub(r"[ \t]+", " ", re.sub(r"\n{2,}", "\n\n", text))


def next_sentence_end(text: str, start: int) -> int:
    """The end of the first sentence that ends at `start` or later; `start` if none does."""
    found = _SENTENCE_END.search(text, start)
    return found.end() if found else start
