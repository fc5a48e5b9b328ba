"""Markdown: the text as it is written, with the places of its headings."""

import re
from itertools import accumulate, pairwise
from typing import Any

from memstore.disk.format.citations import LEVELS, Place, plain_name
from memstore.documents.converted import Converted, Limits
from memstore.documents.plain import decode_text

_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n|$)")
_FRONT = re.compile(
    # above an empty line it is a rule, unless what follows looks like YAML
    r"\ufeff?---[ \t]*(?:\r\n?|\n)(?![ \t]*[\r\n](?!\s*(?:[\w-]+:(?:\s|$)|---[ \t]*[\r\n])))"
    r"(?:.*?(?:\r\n?|\n))??(?:---|\.\.\.)[ \t]*(?=[\r\n]|$)",
    re.DOTALL,
)
_MOST_FRONT = 1 << 16
_MOST_TITLE = 1024  # characters in which a heading's name is looked for


def read_markdown(data: bytes, limits: Limits) -> Converted:
    """The text of Markdown, unchanged. Raises UnreadableDocument."""
    text = decode_text(data, limits)
    return Converted(text, tuple(headings(text)), "markdown")


def headings(text: str) -> list[Place]:
    """Its headings, in order; what stands in code, or above the text (YAML), is none."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark")
    starts = [0, *accumulate(map(len, _LINE.findall(text)))]
    places = []
    blocks = MarkdownIt("commonmark").disable(["inline"], ignoreInvalid=True)
    for opened, content in _pairs(blocks.parse(_without_front_matter(text))):
        title = "".join(map(_words, parser.parseInline(content.content[:_MOST_TITLE])))
        level = min(int(opened.tag[1:]), LEVELS - 1)
        places.append(Place(starts[opened.map[0]], level, plain_name(title)))
    return places


def _pairs(tokens: list[Any]) -> list[tuple[Any, Any]]:
    return [
        (token, content)
        for token, content in pairwise(tokens)
        if token.type == "heading_open" and token.map is not None
    ]


def _words(token: Any) -> str:
    """What is read of a piece of a heading."""
    if token.children:
        return "".join(map(_words, token.children))
    if token.type in ("softbreak", "hardbreak"):
        return " "
    return token.content if token.type in ("text", "code_inline", "text_special") else ""


def _without_front_matter(text: str) -> str:
    """Lines that describe a text above it as empty ones, so that none is taken for a heading."""
    front = _FRONT.match(text, 0, _MOST_FRONT)
    if front is None:
        return text
    return re.sub(r"[^\r\n]", "", front[0]) + text[front.end() :]
