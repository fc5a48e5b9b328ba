"""How many tokens parts of a text have, and parts that have no more than a block takes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memstore.model.adapter import TextTokenizer
from memstore.model.texts.sentences import Level, Unit, divide

_LONG = 64  # characters for each token that may be there: such a part is not counted


class Group(NamedTuple):
    """Units that stand together, and the tokens that they may have."""

    units: Sequence[Unit]
    limit: int


class Measure:
    """Counts with a tokenizer; most: tokens that no passage exceeds."""

    def __init__(self, tokenizer: TextTokenizer, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._gaps = {"": 0, " ": 0}  # tokens of what stands between two units

    def count(self, text: str, units: Sequence[Unit]) -> list[int]:
        """About the tokens of each unit and of what stands before it; more than `most`, told as
        they are, for what is far too long.
        """
        parts, gaps, end = list[str](), list[str](), 0
        for unit in units:
            gap = text[end : unit.start] if end else ""
            long = unit.end - unit.start > _LONG * self._most
            parts.append("" if long else text[unit.start - (gap == " ") : unit.end])
            gaps.append(gap[:_LONG])
            end = unit.end
        missing = list({gap for gap in gaps if gap not in self._gaps})
        found = self._tokenizer.encode_batch(missing + parts)
        new = dict(zip(missing, map(len, found)))
        if len(self._gaps) < 1000:
            self._gaps |= new
        return [
            len(ids) + (new.get(gap) or self._gaps.get(gap, 0)) if part else unit.end - unit.start
            for unit, part, gap, ids in zip(units, parts, gaps, found[len(missing) :])
        ]

    def shortened(
        self, text: str, units: Sequence[Unit], counts: Sequence[int]
    ) -> tuple[Sequence[Unit], Sequence[int]]:
        """The units with those divided that have more than `most` tokens, and their counts: in
        clauses, where that is not enough in words, and at last in halves.
        """
        level = Level.CLAUSE
        while max(counts, default=0) > self._most:
            parts = [
                list(divide(text, unit, level)) if count > self._most else [unit]
                for unit, count in zip(units, counts)
            ]
            changed = [part for some in parts if len(some) > 1 for part in some]
            if not changed and level is Level.CHARACTER:
                break
            new = iter(self.count(text, changed))
            counts = [
                length
                for some, count in zip(parts, counts)
                for length in ([next(new) for _ in some] if len(some) > 1 else [count])
            ]
            units = [part for some in parts for part in some]
            level = Level.WORD if level is Level.CLAUSE else Level.CHARACTER
        return units, counts

    def encoded(self, text: str, groups: Iterable[Group]) -> list[tuple[Sequence[Unit], list[int]]]:
        """The groups' units and ids, those taken apart that have more tokens than they may: counts
        of parts need not add up.
        """
        made, rest = list[tuple[Sequence[Unit], list[int]]](), list(groups)
        owns = [text[units[0].start : units[-1].end] for units, _ in rest]
        for (units, limit), ids in zip(rest, self._tokenizer.encode_batch(owns)):
            if len(ids) <= limit or (limit < self._most and len(units) == 1):
                made.append((units, ids))
            elif parts := _halves(text, units):
                limit = limit if len(units) > 1 else self._most
                made += self.encoded(text, [Group(part, self._most) for part in parts])
            else:
                made.append((units, ids[: self._most]))
        return made

    def led(
        self,
        owns: Sequence[str],
        ids: Sequence[list[int]],
        contexts: Sequence[Sequence[str]],
        most: int,
    ) -> list[tuple[list[int], int]]:
        """The ids of passages with the first of their contexts that fits, and its tokens; most:
        tokens of each context.
        """
        wanted = list(dict.fromkeys(one for some in contexts for one in some))
        known = dict(zip(wanted, self._tokenizer.encode_batch(wanted))) if wanted else {}
        chosen = [
            next(
                (
                    one
                    for one in some
                    if len(known[one]) <= most and len(known[one]) + len(own) <= self._most
                ),
                "",
            )
            for some, own in zip(contexts, ids)
        ]
        numbers = [number for number, one in enumerate(chosen) if one]
        found = [(own, 0) for own in ids]
        joined = [chosen[number] + owns[number] for number in numbers]
        for number, both in zip(numbers, self._tokenizer.encode_batch(joined) if joined else []):
            front = known[chosen[number]]
            lead = len(front)
            if chosen[number].endswith(" ") and both[:lead] != front:
                lead = len(self._tokenizer.encode(chosen[number].rstrip()))
            behind = self._tokenizer.decode(both[lead:]).strip()
            if len(both) <= self._most and lead < len(both) and behind == owns[number]:
                found[number] = both, lead
        return found


def _halves(text: str, units: Sequence[Unit]) -> list[Sequence[Unit]]:
    """Two groups, cut at the best end, the nearest to the middle; [] for a single character."""
    if len(units) == 1:
        for level in (Level.CLAUSE, Level.WORD, Level.CHARACTER):
            units = list(divide(text, units[0], level))
            if len(units) > 1:
                break
        else:
            return []
    middle = len(units) / 2
    at = max(range(1, len(units)), key=lambda n: (units[n].level, -abs(n - middle)))
    return [units[:at], units[at:]]
