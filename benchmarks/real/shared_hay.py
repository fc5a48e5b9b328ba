"""Haystacks that many samples share: parts of books or noise, the same ones for every length, among
which a sample hides the passages that hold its own sentences.
"""

from collections.abc import Callable, Sequence
from random import Random

from benchmarks.real.hay import Hay, Needle, Offsets
from benchmarks.real.plan import Plan, Question, Rule, Stated

PASSAGE = 128  # tokens around a sentence
_KEPT_FREE = 512  # tokens of a length that samples fill themselves
_PARTS = 4  # that a length has more than the one before it


class SharedHay:
    """Builds a plan in which samples share their hay. texts: books; None: noise."""

    def __init__(
        self,
        kind: str,
        offsets: Offsets,
        texts: Sequence[str] | None,
        lengths: Sequence[int],
        seed: int,
        fill: Callable[[str, int], str] | None = None,
    ) -> None:
        """kind: a name for the documents. fill: makes a part of (its name, its tokens), if it is
        neither prose nor noise.
        """
        self.kind, self.rng, self.plan = kind, Random(f"{kind} {seed}"), Plan()
        self.hay = Hay(offsets, texts, self.rng)
        self.lengths = sorted(lengths)
        self.parts: dict[int, list[str]] = {}  # by length
        below = _KEPT_FREE
        named: list[str] = []
        for length in self.lengths:
            size = (length - below) // _PARTS
            for _ in range(_PARTS):
                name = f"{kind} {len(named)}"
                self.plan.documents[name] = (
                    fill(name, size) if fill is not None else self.hay.prose(size)
                )
                named.append(name)
            self.parts[length] = list(named)
            below = length

    def passages(
        self, name: str, needles: Sequence[Needle], tokens: int = PASSAGE, each: int = 1
    ) -> list[Stated]:
        """Needles in passages of the same hay, `each` of them in one, in their order."""
        stated: list[Stated] = []
        for at in range(0, len(needles), each):
            own = f"{name} {at // each}"
            text, places = self.hay.plant(own, tokens, [needles[at : at + each]])
            self.plan.documents[own] = text
            stated += places[0]
        return stated

    def ask(
        self,
        task: str,
        number: int,
        words: tuple[str, str, tuple[str, ...]],
        stated: Sequence[Stated],
        *,
        others: Sequence[str] = (),
        rule: Rule = "all",
        most: int = 16,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Ask for what `stated` passages say, at every length: the parts of the hay in a random
        order, and among them the passages (and `others`) in theirs.

        words: the question, the words that begin its answer, the parts of the answer.
        """
        text, primed, answers = words
        for length in self.lengths if lengths is None else lengths:
            documents = self.rng.sample(self.parts[length], len(self.parts[length]))
            own = list(dict.fromkeys((*others, *(place.document for place in stated))))
            own = [name for name in own if name not in documents]
            slots = sorted(self.rng.choices(range(len(documents) + 1), k=len(own)))
            for slot, passage in reversed(list(zip(slots, own))):
                documents.insert(slot, passage)
            self.plan.questions.append(
                Question(
                    f"{task} {number} at {length}",
                    task,
                    length,
                    tuple(documents),
                    text,
                    primed,
                    answers,
                    rule,
                    tuple(stated),
                    most,
                )
            )
