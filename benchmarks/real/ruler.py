"""Tasks after the description of RULER (Hsieh et al., 2024, section 3): needles in a haystack,
variables to be tracked, frequent words. Written anew; no code is theirs.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from benchmarks.real.hay import Needle, Offsets
from benchmarks.real.plan import Plan, Question, Stated
from benchmarks.real.shared_hay import SharedHay
from memstore.training.selectors.questions import of_split
from memstore.training.selectors.word_pools import word_pools

TASKS = {
    "single 1": "RULER, one needle in noise",
    "single 2": "RULER, one needle in books",
    "single 3": "RULER, one needle in books, a UUID",
    "multi-key 1": "RULER, one of 4 needles in books",
    "multi-key 2": "RULER, one of nothing but needles",
    "multi-key 3": "RULER, the same, keys and values UUIDs",
    "multi-value": "RULER, four values of a key",
    "multi-query": "RULER, four keys asked for",
    "variables": "RULER, a chain of five variables",
    "frequent words": "RULER, the three most frequent words",
}
_CHUNK, _CHUNKS = 1024, 24  # tokens of a part of coded text, and how many there are
_VOCABULARY, _ALPHA = 60, 2.0
_FREQUENT_UP_TO = 16 * 1024


def build(
    offsets: Offsets, texts: Sequence[str], lengths: Sequence[int], samples: int, seed: int
) -> Plan:
    """All tasks at each length, `samples` of each."""
    keys = _Keys(Random(f"keys {seed}"))
    plan = Plan()
    for made in (
        _in_noise(offsets, lengths, samples, seed, keys),
        _in_books(offsets, texts, lengths, samples, seed, keys),
        _in_needles("multi-key 2", offsets, lengths, samples, seed, keys.next),
        _in_needles("multi-key 3", offsets, lengths, samples, seed, keys.uuid),
        _frequent_words(offsets, lengths, samples, seed),
    ):
        plan.merge(made)
    return plan


class _Keys:
    """Names and values, none given twice."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        words = word_pools()
        nouns = [*words.things, *words.places, *words.beings]
        first = [word for pair in of_split(words.qualities, "held-out") for word in pair]
        second = [word for pair in of_split(nouns, "held-out") for word in pair]
        self._left = [f"{one}-{other}" for one in first for other in second]
        rng.shuffle(self._left)

    def next(self) -> str:
        return self._left.pop()

    def uuid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def number(self) -> str:
        return str(self.rng.randrange(1_000_000, 10_000_000))


def _needle(key: str, value: str, kind: str = "number") -> Needle:
    return Needle(f"One of the special magic {kind}s for {key} is: {value}.", value)


def _one(key: str, value: str, kind: str = "number") -> tuple[str, str, tuple[str, ...]]:
    name = f"special magic {kind} for {key} mentioned in the provided text"
    return f"What is the {name}?", f"The {name} is", (value,)


def _all(keys: str, values: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    name = f"special magic numbers for {keys} mentioned in the provided text"
    return f"What are all the {name}?", f"The {name} are", tuple(values)


def _in_noise(
    offsets: Offsets, lengths: Sequence[int], samples: int, seed: int, keys: _Keys
) -> Plan:
    hay = SharedHay("ruler noise", offsets, None, lengths, seed)
    for number in range(samples):
        key, value = keys.next(), keys.number()
        stated = hay.passages(f"single 1 {number}", [_needle(key, value)])
        hay.ask("single 1", number, _one(key, value), stated)
    for number in range(samples):
        value = str(hay.rng.randrange(10_000, 100_000))
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        names = ["".join(hay.rng.choices(letters, k=5)) for _ in range(5)]
        sentences = [f"VAR {names[0]} = {value}."]
        sentences += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
        needles = [Needle(text, own) for text, own in zip(sentences, names)]
        question = f"Find all variables that are assigned the value {value} in the text above."
        primed = (
            "According to the chain of variable assignment in the text above, 5 variables are "
            f"assigned the value {value}, they are:"
        )
        stated = hay.passages(f"variables {number}", needles)
        hay.ask("variables", number, (question, primed, tuple(names)), stated, most=40)
    return hay.plan


def _in_books(
    offsets: Offsets,
    texts: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int,
    keys: _Keys,
) -> Plan:
    hay = SharedHay("ruler books", offsets, texts, lengths, seed)
    for number in range(samples):
        key, value = keys.next(), keys.number()
        stated = hay.passages(f"single 2 {number}", [_needle(key, value)])
        hay.ask("single 2", number, _one(key, value), stated)
        key, value = keys.next(), keys.uuid()
        stated = hay.passages(f"single 3 {number}", [_needle(key, value, "uuid")])
        hay.ask("single 3", number, _one(key, value, "uuid"), stated, most=48)
        four = [(keys.next(), keys.number()) for _ in range(4)]
        stated = hay.passages(f"multi-key 1 {number}", [_needle(*pair) for pair in four])
        others = [place.document for place in stated]
        at = hay.rng.randrange(4)
        hay.ask("multi-key 1", number, _one(*four[at]), [stated[at]], others=others)
        key, values = keys.next(), [keys.number() for _ in range(4)]
        needles = [_needle(key, value) for value in values]
        stated = hay.passages(f"multi-value {number}", needles)
        hay.ask("multi-value", number, _all(key, values), stated, most=48)
        four = [(keys.next(), keys.number()) for _ in range(4)]
        stated = hay.passages(f"multi-query {number}", [_needle(*pair) for pair in four])
        asked = ", ".join(key for key, _ in four[:3]) + f", and {four[3][0]}"
        values = [value for _, value in four]
        hay.ask("multi-query", number, _all(asked, values), stated, most=64)
    return hay.plan


def _in_needles(
    task: str,
    offsets: Offsets,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    draw: Callable[[], str],
) -> Plan:
    """Hay of nothing but needles; each sample asks for one of them."""
    kind = "number" if task == "multi-key 2" else "uuid"
    rng = Random(f"{task} {seed}")
    own = _Keys(rng)
    planted: dict[str, list[tuple[str, str, Stated]]] = {}

    def fill(name: str, tokens: int) -> str:
        text, planted[name] = "", []
        length, left = 0, tokens
        while True:
            key, value = draw(), own.number() if kind == "number" else own.uuid()
            needle = _needle(key, value, kind)
            left -= len(offsets(f" {needle.text}"))
            if left < 0:
                return text
            planted[name].append((key, value, needle.places(name, length)[0]))
            text += f"{needle.text} "
            length = len(text)

    hay = SharedHay(task, offsets, None, lengths, seed, fill)
    for length in hay.lengths:
        every = [needle for name in hay.parts[length] for needle in planted[name]]
        for number, (key, value, place) in enumerate(rng.sample(every, samples)):
            most = 16 if kind == "number" else 48
            hay.ask(task, number, _one(key, value, kind), [place], most=most, lengths=[length])
    return hay.plan


def _frequent_words(offsets: Offsets, lengths: Sequence[int], samples: int, seed: int) -> Plan:
    """Coded words whose frequencies fall as in a zeta distribution, the first a dummy; a sample
    reads some of the parts, and the counts of those decide.
    """
    rng, plan = Random(f"frequent words {seed}"), Plan()
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(rng.choices(letters, k=6)) for _ in range(_VOCABULARY)]
    shares = [1 / rank**_ALPHA for rank in range(1, _VOCABULARY + 2)]
    counts: dict[str, Counter[str]] = {}
    for number in range(_CHUNKS):
        ranked = rng.sample(vocabulary, 12)
        rest = [word for word in vocabulary if word not in ranked]
        drawn = rng.choices(["...", *ranked, *rest], shares, k=_CHUNK)
        text = " ".join(drawn)
        text = text[: offsets(text)[_CHUNK - 1][1]].rpartition(" ")[0]
        name = f"frequent words {number}"
        plan.documents[name], counts[name] = text, Counter(text.split())
    for length in sorted(n for n in lengths if n <= _FREQUENT_UP_TO):
        for number in range(samples):
            while True:
                chosen = rng.sample(sorted(counts), length // _CHUNK)
                total: Counter[str] = sum((counts[name] for name in chosen), Counter())
                best = [(w, c) for w, c in total.most_common(5) if w != "..."]
                if best[2][1] > 1.1 * best[3][1]:
                    break
            plan.questions.append(
                Question(
                    f"frequent words {number} at {length}",
                    "frequent words",
                    length,
                    tuple(chosen),
                    "What are the three most frequently appeared words in the above coded text? "
                    'Do not count the dots "...".',
                    "The three most frequently appeared words are:",
                    tuple(word for word, _ in best[:3]),
                    "all",
                    (),
                    40,
                )
            )
    return plan
