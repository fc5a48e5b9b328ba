"""Words that facts for selectors are made of: synonym pairs, names, colours, attributes. They stand
in word_pools.txt.

A word occurs in one pair only, so that a pair is wholly of one split (questions.split).
"""

from pathlib import Path


def _pools() -> dict[str, tuple[str, ...]]:
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    pools = {}
    for pool in text.split("[")[1:]:
        name, _, words = pool.partition("]")
        pools[name] = tuple(" ".join(word.split()) for word in words.split(","))
    return pools


def _pairs(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((one, other) for one, _, other in (word.partition("/") for word in words))


_POOLS = _pools()
THINGS = _pairs(_POOLS["THINGS"])
PLACES = _pairs(_POOLS["PLACES"])
BEINGS = _pairs(_POOLS["BEINGS"])
QUALITIES = _pairs(_POOLS["QUALITIES"])
OTHERS = _pairs(_POOLS["OTHERS"])
PAIRS = (*THINGS, *PLACES, *BEINGS, *QUALITIES, *OTHERS)
FIRST_NAMES = _POOLS["FIRST_NAMES"]
LAST_NAMES = _POOLS["LAST_NAMES"]
TOWNS = _POOLS["TOWNS"]
COLOURS = _POOLS["COLOURS"]
MATERIALS = _POOLS["MATERIALS"]
GOODS = _POOLS["GOODS"]
NUMBER_ATTRIBUTES = _POOLS["NUMBER_ATTRIBUTES"]
WORD_ATTRIBUTES = _POOLS["WORD_ATTRIBUTES"]
KEYS = _POOLS["KEYS"]
LANGUAGES = _POOLS["LANGUAGES"]
MUSIC = _POOLS["MUSIC"]
ROLES = _POOLS["ROLES"]
MONTHS = _POOLS["MONTHS"]
