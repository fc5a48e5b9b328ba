"""Tables of Markdown."""

import html
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, or nothing where there are no rows; cells are Markdown."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Text in one line, whose bars end no cell and whose stars and brackets mean nothing."""
    escaped = {"|": "&#124;", "*": "\\*", "<": "&lt;"}
    return "".join(escaped.get(sign, sign) for sign in " ".join(text.split()))


def code(text: str) -> str:
    """Code in a cell; a bar there needs HTML, since Markdowns differ in how they escape one."""
    if "|" not in text:
        return f"`{text}`" if text else ""
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"
