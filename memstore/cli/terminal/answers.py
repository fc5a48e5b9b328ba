"""What is shown of an answer and of its sources."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memstore.cli.terminal.console import note, one_line, say, shorten, size

_ELSEWHERE = (100, 24)  # columns and lines where stdout is no terminal
_SHORTEST = 30  # characters of a passage or a heading, however narrow the terminal


def print_sources(
    sources: Sequence[Mapping[str, Any]],
    *,
    score: Callable[[Mapping[str, Any]], str] | None = None,
    stats: bool = False,
) -> None:
    """A numbered line a source, of the terminal's width: what `score` says of it, document, page
    or heading, passage; stats: also its characters and the tiers that had them.
    """
    width = shutil.get_terminal_size(_ELSEWHERE).columns
    for number, source in enumerate(sources, 1):
        place = one_line(source["document"])
        if source["place"] is not None:
            place += f", {shorten(source['place'], max(_SHORTEST, width // 3))}"
        if stats:
            first, end = source["span"]
            tiers = ", ".join(sorted({read["tier"] for read in source["reads"]}))
            place += f" [{first:,}-{end:,}] ({tiers})"
        head = f"{number:{len(str(len(sources)))}}. {'' if score is None else score(source)}{place}"
        say(f"{head}: {shorten(source['text'], max(_SHORTEST, width - len(head) - 2))}")


def weight(source: Mapping[str, Any]) -> str:
    """How strongly a source was read, or how like it is to a phrase; a column of numbers."""
    return f"{source['weight']:7.2f}  "


def share(source: Mapping[str, Any]) -> str:
    """A likeness that is a share of one."""
    return f"{source['weight']:4.0%}  "


def tier(counts: Mapping[str, Any]) -> str:
    """One tier's lookups in a few words; what a prefetch did is left out where there was none."""
    ahead = counts["prefetched"] + counts["late"]
    prefetched = f" ({ahead:,} of them read ahead)" if ahead else ""
    return (
        f"{counts['hits']:,} hits{prefetched}, {counts['misses']:,} misses, {size(counts['bytes'])}"
    )


def cost(answer: Mapping[str, Any]) -> str:
    """One line: the lookups, tiers and seconds of an answer; of a tier that computes, where it
    did.
    """
    lookups = answer["lookups"]
    tiers = "; ".join(
        f"{name} {tier(counts)}"
        for name, counts in answer["tiers"].items()
        if name != "computed" or counts["hits"]
    )
    looked_up = f"lookups {lookups['done']:,} done, {lookups['skipped']:,} skipped"
    return f"{looked_up}; {tiers}; {answer['seconds']:.2f} s"


def print_answer(answer: Mapping[str, Any], *, streamed: bool, stats: bool = False) -> None:
    """An answer (unless it was streamed), and below an empty line its sources; stats: with their
    weights, and what the answer cost.
    """
    refused = not answer.get("answered", True) and not answer["text"]
    if refused:
        needed = answer.get("needed")
        least = "" if needed is None else f" A passage needs {needed:.2f}."
        say(f"Not sure.{least} Closest:" if answer["sources"] else "Not sure.")
    elif not answer["text"]:
        say("(nothing was found)")
    elif not streamed:
        say(answer["text"])
    if answer["sources"] or stats:
        say("")
    print_sources(answer["sources"], score=weight if stats or refused else None, stats=stats)
    print_absent(answer.get("absent", ()))
    if stats:
        say(cost(answer))


def print_absent(names: Sequence[str]) -> None:
    """Documents of a published memory that were left out."""
    if names:
        note(f"note: could not be read, and was left out: {', '.join(names)}")
