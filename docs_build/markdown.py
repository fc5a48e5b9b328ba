"""Tables of Markdown."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, or nothing where there are no rows; cells are Markdown."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Text in one line, whose bars end no cell."""
    return " ".join(text.split()).replace("|", "\\|")
