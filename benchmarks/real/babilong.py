"""Tasks after the description of BABILong (Kuratov et al., 2024): the first five tasks of bAbI
(Weston et al., 2015), their sentences scattered in books. The worlds are written anew.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from benchmarks.real.hay import Needle, Offsets
from benchmarks.real.plan import Plan
from benchmarks.real.shared_hay import SharedHay

TASKS = {
    "qa1": "BABILong, one supporting fact",
    "qa2": "BABILong, two supporting facts",
    "qa3": "BABILong, three supporting facts",
    "qa4": "BABILong, relations of two things",
    "qa5": "BABILong, relations of three things",
}
PEOPLE = ("Mary", "John", "Sandra", "Daniel")
GIVERS = ("Fred", "Jeff", "Bill", "Mary", "Julie")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("football", "apple", "milk", "cake")
_GO = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
_TAKE = ("picked up", "grabbed", "took", "got")
_DROP = ("dropped", "put down", "left", "discarded")
_PASSAGE, _EACH = 224, 4  # tokens of a passage, and sentences in it


class Story(NamedTuple):
    """Sentences; the numbers of those that are needed; question, beginning and answer."""

    sentences: list[str]
    needed: list[int]
    question: str
    primed: str
    answer: str


def build(
    offsets: Offsets, texts: Sequence[str], lengths: Sequence[int], samples: int, seed: int
) -> Plan:
    """The five tasks at each length, `samples` of each."""
    hay = SharedHay("babilong books", offsets, texts, lengths, seed)
    for task in TASKS:
        for number in range(samples):
            story = tell(task, hay.rng)
            needles = [Needle(sentence, "") for sentence in story.sentences]
            stated = hay.passages(f"{task} {number}", needles, _PASSAGE, _EACH)
            words = (story.question, story.primed, (story.answer,))
            others = [place.document for place in stated]
            needed = [stated[at] for at in story.needed]
            hay.ask(task, number, words, needed, others=others, most=6)
    return hay.plan


def tell(task: str, rng: Random) -> Story:
    """A story of a task, and a question about it."""
    if task in ("qa1", "qa2", "qa3"):
        return _world(task, rng)
    return _directions(rng) if task == "qa4" else _gifts(rng)


def _world(task: str, rng: Random) -> Story:
    """People who walk about and carry things; told until the question has an answer."""
    while True:
        sentences: list[str] = []
        at: dict[str, tuple[str, int]] = {}  # each person's place, and the sentence that says it
        holds: dict[str, tuple[str, int]] = {}  # each thing's holder, and since which sentence
        been: dict[str, list[tuple[str, list[int]]]] = {}  # each thing's places, and why
        for _ in range(rng.randint(5, 8) if task == "qa1" else rng.randint(9, 14)):
            person = rng.choice(PEOPLE)
            held = [thing for thing, (holder, _) in holds.items() if holder == person]
            free = [thing for thing in THINGS[:3] if thing not in holds and thing not in been]
            deed = rng.random() if task != "qa1" and person in at else 0.0
            number = len(sentences)
            if deed > 0.6 and free:
                thing = rng.choice(free)
                sentences.append(f"{person} {rng.choice(_TAKE)} the {thing} there.")
                holds[thing] = (person, number)
                been[thing] = [(at[person][0], [number, at[person][1]])]
            elif deed > 0.5 and held:
                thing = rng.choice(held)
                sentences.append(f"{person} {rng.choice(_DROP)} the {thing}.")
                del holds[thing]
            else:
                places = [p for p in PLACES if person not in at or p != at[person][0]]
                place = rng.choice(places)
                sentences.append(f"{person} {rng.choice(_GO)} the {place}.")
                at[person] = (place, number)
                for thing in held:
                    been[thing].append((place, [holds[thing][1], number]))
        story = _asked(task, rng, sentences, at, been)
        if story is not None:
            return story


def _asked(
    task: str,
    rng: Random,
    sentences: list[str],
    at: dict[str, tuple[str, int]],
    been: dict[str, list[tuple[str, list[int]]]],
) -> Story | None:
    if task == "qa1":
        person = rng.choice(sorted(at))
        place, number = at[person]
        primed = f"The most recent location of {person} is the"
        return Story(sentences, [number], f"Where is {person}?", primed, place)
    least = 2 if task == "qa2" else 3
    known = sorted(thing for thing, places in been.items() if len(places) >= least)
    if not known:
        return None
    thing = rng.choice(known)
    last, why = been[thing][-1]
    if task == "qa2":
        return Story(
            sentences, sorted(why), f"Where is the {thing}?", f"The {thing} is in the", last
        )
    before, earlier = been[thing][-2]
    if [place for place, _ in been[thing]].count(last) > 1:
        return None
    return Story(
        sentences,
        sorted({*why, *earlier}),
        f"Where was the {thing} before the {last}?",
        f"Before the {last} the {thing} was in the",
        before,
    )


def _directions(rng: Random) -> Story:
    """Three places in a row, and one beside it."""
    one, middle, other, beside = rng.sample(PLACES, 4)
    direction, across = rng.choice((("north", "east"), ("south", "west"), ("east", "north")))
    facts = [
        f"The {one} is {direction} of the {middle}.",
        f"The {middle} is {direction} of the {other}.",
        f"The {beside} is {across} of the {middle}.",
    ]
    order = rng.sample(range(3), 3)
    sentences = [facts[at] for at in order]
    if rng.random() < 0.5:
        return Story(
            sentences,
            [order.index(0)],
            f"What is {direction} of the {middle}?",
            f"{direction.capitalize()} of the {middle} is the",
            one,
        )
    return Story(
        sentences,
        [order.index(1)],
        f"What is the {middle} {direction} of?",
        f"The {middle} is {direction} of the",
        other,
    )


def _gifts(rng: Random) -> Story:
    """People who hand things on; no pair and thing twice."""
    facts: list[tuple[str, str, str]] = []
    while len(facts) < 6:
        giver, taker = rng.sample(GIVERS, 2)
        thing = rng.choice(THINGS)
        clash = any(
            (giver, thing) == (g, t) or (taker, thing) == (r, t) or (giver, taker) == (g, r)
            for g, t, r in facts
        )
        if not clash:
            facts.append((giver, thing, taker))
    verbs = ("gave", "handed", "passed")
    sentences = [f"{g} {rng.choice(verbs)} the {t} to {r}." for g, t, r in facts]
    number = rng.randrange(len(facts))
    giver, thing, taker = facts[number]
    question, primed, answer = rng.choice(
        (
            (f"Who gave the {thing} to {taker}?", f"The {thing} was given to {taker} by", giver),
            (f"What did {giver} give to {taker}?", f"{giver} gave {taker} the", thing),
            (f"Who did {giver} give the {thing} to?", f"{giver} gave the {thing} to", taker),
        )
    )
    return Story(sentences, [number], question, primed, answer)
