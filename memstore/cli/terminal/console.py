"""What the commands show and are told: sizes, columns, progress; results go to stdout, all else to
stderr.
"""

import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(|[KMGT]I?)B?\s*", re.IGNORECASE)
_SECONDS_BETWEEN_LINES = 5.0
# What a terminal obeys instead of showing it (but line breaks and tabs), turns text around, or is
# half of a pair and cannot be written.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

Show = Callable[[int, int, int], None]
"""Takes the characters read, the characters there are, and the tokens so far."""


def parse_size(text: str) -> int:
    """Bytes of a size as people write it: 4096, 64MB, 1.5GB, 512MiB; below 2**62, as counts of
    bytes are kept. Raises ValueError.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 64MB, 1.5GB or 512MiB")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size >= 1 << 62:
        raise ValueError(f"{text!r} is larger than any file can be; write a size below 4000000TB")
    return int(size)


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """A time as people read it, in two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def visible(text: str) -> str:
    """A text whose control characters are shown as \\uXXXX, which JSON reads as well."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """A text without its line breaks and runs of spaces, all of it visible."""
    return visible(" ".join(text.split()))


def say(text: str) -> None:
    """A part of the result, on stdout."""
    print(visible(text), flush=True)


def shorten(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    line = one_line(text)
    return line if len(line) <= width else line[: width - 3].rstrip() + "..."


def note(text: str) -> None:
    """Say something that is not the result, on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def emit(value: Mapping[str, Any]) -> None:
    """The result as one JSON object on stdout; bytes (ids of writes) in hexadecimal digits."""
    say(json.dumps(value, ensure_ascii=False, default=bytes.hex))


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Rows of cells, the first row their titles, as aligned columns; numbers to the right."""
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
    """Lines of stdin, stripped; prompted for on a terminal. Bytes that are not UTF-8 become lone
    surrogates.
    """
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


@contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """A sign of life on stderr, if that is a terminal, until the block ends or what is yielded is
    called.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(visible(what))
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


@contextmanager
def stream(enabled: bool) -> Iterator[Callable[[str], None] | None]:
    """Prints an answer's text as it comes, where somebody is watching; None otherwise. Until then
    a terminal shows that the memory is being read.
    """
    with waiting("reading the memory") as arrived:
        if not (enabled and sys.stdout.isatty()):
            yield None
            return
        started = False

        def show(text: str) -> None:
            nonlocal started
            arrived()
            text = text if started else text.lstrip()
            started = started or bool(text)
            sys.stdout.write(visible(text))
            sys.stdout.flush()

        try:
            yield show
        finally:
            if started:
                print()


@contextmanager
def reading(what: str) -> Iterator[Show]:
    """Progress of reading a text, on stderr: a bar on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty():
        with _bar(what) as show:
            yield show
        return
    began = last = time.monotonic()

    def line(done: int, total: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            note(
                f"{what}: {100 * done // max(total, 1)}% read, {tokens:,} tokens, "
                f"{last - began:.0f} s"
            )

    yield line


@contextmanager
def working(what: str, parts: str = "layers") -> Iterator[Callable[[int, int], None]]:
    """Progress of a job of a few parts, on stderr: a bar on a terminal, a line a part elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(visible(what), total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
        return
    yield lambda done, total: note(f"{what}: {done} of {total} {parts}")


@contextmanager
def changing(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that is told anew: in its place on a terminal, now and then elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(visible(what)) as status:
            yield lambda line: status.update(visible(line))
        return
    last = time.monotonic()

    def told(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            note(line)

    yield told


@contextmanager
def _bar(what: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    tokens = TextColumn("{task.fields[tokens]:,} tokens")
    parts = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        tokens,
        TimeRemainingColumn(),
    )
    with Progress(*parts, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(visible(what), total=None, tokens=0)
        yield lambda done, total, tokens: progress.update(
            task, completed=done, total=total, tokens=tokens
        )
