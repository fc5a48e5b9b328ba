"""Words that facts for selectors are made of: synonym pairs, names, colours, attributes. They stand
in word_pools.txt.

A word occurs in one pair only, so that a pair is wholly of one split (questions.split).
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

Words = tuple[str, ...]
Pairs = tuple[tuple[str, str], ...]


class WordPools(NamedTuple):
    """The pools by name. Pairs: a word and its synonym."""

    things: Pairs
    places: Pairs
    beings: Pairs
    qualities: Pairs
    others: Pairs
    first_names: Words
    last_names: Words
    towns: Words
    colours: Words
    materials: Words
    goods: Words
    number_attributes: Words
    word_attributes: Words
    keys: Words
    languages: Words
    music: Words
    roles: Words
    months: Words

    @property
    def pairs(self) -> Pairs:
        """All of them."""
        return (*self.things, *self.places, *self.beings, *self.qualities, *self.others)


@cache
def word_pools() -> WordPools:
    """The pools, read from the file when somebody asks for them first."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    pools: dict[str, Words] = {}
    for pool in text.split("[")[1:]:
        name, _, words = pool.partition("]")
        pools[name] = tuple(" ".join(word.split()) for word in words.split(","))
    return WordPools(
        things=_pairs(pools["THINGS"]),
        places=_pairs(pools["PLACES"]),
        beings=_pairs(pools["BEINGS"]),
        qualities=_pairs(pools["QUALITIES"]),
        others=_pairs(pools["OTHERS"]),
        first_names=pools["FIRST_NAMES"],
        last_names=pools["LAST_NAMES"],
        towns=pools["TOWNS"],
        colours=pools["COLOURS"],
        materials=pools["MATERIALS"],
        goods=pools["GOODS"],
        number_attributes=pools["NUMBER_ATTRIBUTES"],
        word_attributes=pools["WORD_ATTRIBUTES"],
        keys=pools["KEYS"],
        languages=pools["LANGUAGES"],
        music=pools["MUSIC"],
        roles=pools["ROLES"],
        months=pools["MONTHS"],
    )


def _pairs(words: Words) -> Pairs:
    return tuple((one, other) for one, _, other in (word.partition("/") for word in words))
