"""Terminal output: results go to stdout, progress and errors to stderr."""

import io
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memstore.disk.format.document import Document
    from memstore.errors import MemstoreError

_SECONDS_BETWEEN_LINES = 5.0
_NO_TERMINAL = (100, 24)  # columns and lines if stdout is no terminal
_SHORTEST = 30  # least characters of a passage or heading on a narrow terminal
# Control characters (except line breaks and tabs), which a terminal obeys; direction marks; and
# lone surrogates, which cannot be written.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def size(count: float) -> str:
    """Bytes in a readable unit."""
    from rich.filesize import decimal

    return decimal(int(count))


def count(number: int, noun: str) -> str:
    """A number of things whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time in hours, minutes and seconds: 0:02:05."""
    return str(timedelta(seconds=round(seconds)))


def visible(text: str) -> str:
    """A text with its control characters as \\uXXXX, as in JSON."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """A visible text in one line, with single spaces."""
    return visible(" ".join(text.split()))


def say(text: str) -> None:
    """A part of the result, on stdout."""
    print(visible(text), flush=True)


def shorten(text: str, width: int, around: str = "") -> str:
    """One line of at most `width` characters; shows `around` if the text has it."""
    line = one_line(text)
    at = line.lower().find(around.lower())
    if len(line) > width and at + min(len(around), width // 2) > width - 3:
        line = "..." + line[min(at - width // 3, len(line) + 3 - width) :].lstrip()
    return line if len(line) <= width else line[: width - 3].rstrip() + "..."


def note(text: str) -> None:
    """Write a message that is not the result, on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def report(error: "MemstoreError") -> dict[str, Any]:
    """Write an error as one line on stderr; return it as plain values: {"name", "message"}."""
    message = one_line(str(error))
    note(f"error: {message}")
    return {"name": type(error).__name__, "message": message}


def emit(value: Mapping[str, Any]) -> None:
    """Write the result as one JSON object on stdout; bytes (write ids) in hexadecimal digits."""
    say(json.dumps(value, ensure_ascii=False, default=bytes.hex))


def result(value: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Write the result of a command, as JSON or as text."""
    if as_json:
        emit(value)
    else:
        say(text)


def stored(bytes: int, tokens: int) -> str:
    """The size of the keys and values of tokens; documents may have none (ingest --keep text)."""
    return size(bytes) if bytes or not tokens else "as text"


def described(document: "Document", what: str) -> str:
    """What was done to a document, and its size."""
    figures = f"{count(document.tokens, 'token')}, {stored(document.bytes, document.tokens)}"
    return f"{one_line(document.name)}: {what}, {figures}"


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells, the first with titles, as aligned columns; numbers are right-aligned."""
    cells = [
        [f"{cell:,}" if isinstance(cell, int) else one_line(str(cell)) for cell in row]
        for row in rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    right = [all(isinstance(row[i], int) for row in rows[1:]) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if to_right else cell.ljust(w)
            for cell, w, to_right in zip(row, widths, right)
        ).rstrip()
        for row in cells
    )


def read_lines(prompt: str = "") -> Iterator[str]:
    """Stripped lines of stdin, prompted for on a terminal; bad UTF-8 becomes lone surrogates."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (with it, input() edits lines)

        while True:
            try:
                yield input(prompt).strip()
            except EOFError:
                print()
                return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for line in sys.stdin:
        yield line.strip()


# Answers


def print_sources(
    sources: Sequence[Mapping[str, Any]], *, scored: bool, stats: bool = False, answer: str = ""
) -> None:
    """Print two lines for each source, as wide as the terminal: number, document, page or heading;
    then its sentence, or the part with the answer. scored: also its score; stats: also its
    attention (unless it has a score), its characters and its tiers.
    """
    width = max(_SHORTEST, shutil.get_terminal_size(_NO_TERMINAL).columns)
    digits = len(str(len(sources)))
    indent = " " * (digits + 2)
    for number, source in enumerate(sources, 1):
        place = one_line(source["document"])
        if source["place"] is not None:
            place += f", {one_line(source['place'])}"
        score = f"{source['weight']:.2f}  " if scored else ""
        head = f"{number:{digits}}. {score}"
        say(head + shorten(place, max(_SHORTEST, width - len(head))))
        say(indent + shorten(source["sentence"], width - len(indent), answer.strip(" .")))
        if stats:
            first, end = source["span"]
            attention = "" if scored else f"attention {source['weight']:.2f}, "
            tiers = f", from {', '.join(sorted(source['tiers']))}" if source["tiers"] else ""
            say(f"{indent}{attention}characters {first:,}-{end:,}{tiers}")


def _costs(answer: Mapping[str, Any]) -> Iterator[str]:
    """Lines with an answer's seconds, doubt, lookups, and reads from each tier."""
    lookups, doubt = answer["lookups"], answer.get("doubt")
    yield f"{answer['seconds']:.2f} s, first token after {answer['first_token_seconds']:.2f} s"
    if doubt is not None:
        yield f"doubt {doubt:.2f}: the probability that the passages hold no answer"
    yield f"{count(lookups['done'], 'lookup')} made, {lookups['skipped']:,} skipped by the gate"
    for name, counts in answer["tiers"].items():
        looked_up = counts["hits"] + counts["misses"]
        if looked_up:
            ahead = counts["prefetched"] + counts["late"]
            prefetched = f", {ahead:,} of them prefetched" if ahead else ""
            yield (
                f"{name}: {counts['hits']:,} of {count(looked_up, 'block')} found{prefetched}, "
                f"{size(counts['bytes'])} read"
            )


def print_answer(answer: Mapping[str, Any], *, streamed: bool, stats: bool = False) -> None:
    """Print an answer (unless it was streamed) or a refusal, an empty line, and the sources, each
    sentence once; stats: all sources, and the costs.
    """
    refused = not answer.get("answered", True) and not answer["text"]
    if refused:
        say(refusal(answer))
    elif not answer["text"]:
        say("The model gave no answer.")
    elif not streamed:
        say(answer["text"])
    if answer["sources"] or stats:
        say("")
    different: dict[object, Mapping[str, Any]] = {}
    for number, source in enumerate(answer["sources"]):  # blocks may share a sentence
        different.setdefault(number if stats else (source["document"], source["sentence"]), source)
    print_sources(list(different.values()), scored=refused, stats=stats, answer=answer["text"])
    if stats:
        say("\n".join(_costs(answer)))


def refusal(answer: Mapping[str, Any]) -> str:
    """The line of a refusal, before the closest passages."""
    from memstore.model.answer import not_sure

    scores = [source["weight"] for source in answer["sources"]]
    return not_sure(scores, answer.get("needed"), answer.get("doubt"))


# Progress: one changing line on a terminal, elsewhere a line every few seconds


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show that work is running until the block ends; yields a function that replaces the text,
    and ends the display for "".
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text(visible(what))) as status:
            yield lambda line: status.update(Text(visible(line))) if line else status.stop()
        return
    last = time.monotonic()

    def note_or_drop(line: str) -> None:
        nonlocal last
        if line and time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            note(line)

    yield note_or_drop


@contextmanager
def working(what: str, parts: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a job. Yields a function of (parts done, parts in all).

    what: the job's name. parts: a noun for its parts, such as "chapters".
    """
    with waiting(what) as show:
        yield lambda done, total: show(f"{what}: {done:,} of {total:,} {parts}")


@contextmanager
def stream(enabled: bool) -> Iterator[Callable[[str], None] | None]:
    """Yields a function that prints pieces of an answer to a terminal; None elsewhere."""
    with waiting("reading the memory") as arrived:
        if not (enabled and sys.stdout.isatty()):
            yield None
            return
        started = False

        def show(text: str) -> None:
            nonlocal started
            arrived("")
            text = text if started else text.lstrip()
            started = started or bool(text)
            sys.stdout.write(visible(text))
            sys.stdout.flush()

        try:
            yield show
        finally:
            if started:
                print()
