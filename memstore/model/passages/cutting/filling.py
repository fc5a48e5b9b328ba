"""Which units of a text stand together in a passage: as many as fit, with ends that follow from the
text beside them, so that an edit moves only its neighbours.

Greedy filling carries a shift on and on. Here every end has a price that the words on both sides
draw (a hash), and the cheapest way through the text is taken: two ways meet again at the next end
that is cheap for both. Ends that are the cheapest far and wide are kept by every way (anchors), so
that nothing depends on more text than lies between two of them.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from xxhash import xxh3_64_intdigest

from memstore.model.texts.sentences import Level, Unit

# What an end costs at most where it is drawn, in passages, by what begins there. It is drawn as the
# square of an even number: the many cheap ones are near each other, the few dear ones are avoided.
_PRICE = {Level.HEADING: 0.0, Level.PARAGRAPH: 25.0, Level.LINE: 50.0}
_SENTENCE = 100.0
_INSIDE = {Level.CLAUSE: 100.0, Level.WORD: 200.0, Level.CHARACTER: 400.0}  # more, in a sentence
_AFTER_HEADING = 1000.0  # more, between a heading and what it stands over
_WHOLE = 150.0  # more, in a paragraph that a passage holds
_LOOSE = 0.2  # of a passage that is empty
_NEAR = 64  # characters on each side that draw a price


def prices(text: str, units: Sequence[Unit], tokens: Sequence[int], size: int) -> list[float]:
    """What it costs to begin a passage with each unit, in passages. tokens: of each unit."""
    found = [0.0]
    inside = _in_whole_paragraphs(units, tokens, size)
    for before, unit in pairwise(units):
        beside = text[max(before.start, before.end - _NEAR) : before.end] + "\n"
        beside += text[unit.start : min(unit.end, unit.start + _NEAR)]
        drawn = xxh3_64_intdigest(beside.encode("utf-8", "surrogatepass")) / 2**64
        price = _PRICE.get(unit.level, _SENTENCE) * drawn * drawn + _INSIDE.get(unit.level, 0.0)
        found.append(price + _AFTER_HEADING * before.heading + _WHOLE * inside[len(found)])
    return found


def _in_whole_paragraphs(units: Sequence[Unit], tokens: Sequence[int], size: int) -> list[bool]:
    """Of each unit, does it stand behind the first of a paragraph of at most `size` tokens?"""
    begins = [at for at, unit in enumerate(units) if not at or unit.level >= Level.PARAGRAPH]
    inside = [False] * len(units)
    for first, end in pairwise([*begins, len(units)]):
        if sum(tokens[first:end]) <= size:
            inside[first + 1 : end] = [True] * (end - first - 1)
    return inside


def anchors(units: Sequence[Unit], price: Sequence[float], reach: int) -> list[int]:
    """Where passages begin whatever stands around, as numbers of units: at headings, and at prices
    that are the least of `reach` characters on both sides.
    """
    count, found = len(units), []
    # nearest cheaper end on each side, by a stack; the first of equals wins
    left, right, stack = [-1] * count, [count] * count, list[int]()
    for number in range(1, count):
        while stack and price[stack[-1]] > price[number]:
            right[stack.pop()] = number
        left[number] = stack[-1] if stack else -1
        stack.append(number)
    for number in range(1, count):
        unit, before, after = units[number], left[number], right[number]
        if unit.level is Level.HEADING:
            far = not units[number - 1].heading
        else:
            far = (before < 0 or unit.start - units[before].start > reach) and (
                after == count or units[after].start - unit.start > reach
            )
        if far:
            found.append(number)
    return found


def fill(
    units: Sequence[Unit], tokens: Sequence[int], price: Sequence[float], size: int, most: int
) -> Iterator[tuple[int, int]]:
    """Units [first, end) of each passage, of at most `size` tokens; one unit, or a heading and what
    follows it, of at most `most`.
    """
    count = len(units)
    best, begins = [0.0] * (count + 1), [0] * (count + 1)
    for end in range(1, count + 1):
        total, least, chosen = 0, float("inf"), end - 1
        for first in range(end - 1, -1, -1):
            total += tokens[first]
            if total > size and first < end - 1:
                above = all(unit.heading for unit in units[first : end - 1])
                if total > most or not above:
                    break
            empty = max(0.0, 1 - total / size)
            cost = best[first] + 1 + price[first] * (first > 0) + _LOOSE * empty * empty
            if cost < least:
                least, chosen = cost, first
        best[end], begins[end] = least, chosen
    ends = [count]
    while ends[-1]:
        ends.append(begins[ends[-1]])
    ends.reverse()
    yield from pairwise(ends)
