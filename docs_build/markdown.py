"""Tables of Markdown."""

import html
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, or nothing if there are no rows; cells are Markdown."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Text in one line with bars, stars and brackets escaped."""
    escaped = {"|": "&#124;", "*": "\\*", "<": "&lt;"}
    return "".join(escaped.get(sign, sign) for sign in " ".join(text.split()))


def code(text: str) -> str:
    """Code in a cell; a bar needs HTML, since Markdown dialects escape it differently."""
    if "|" not in text:
        return f"`{text}`" if text else ""
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"
