"""Markdown: the unchanged text, with the places of its headings."""

import re
from itertools import accumulate, pairwise

from memstore.disk.format.document import LEVELS, Place, plain_name
from memstore.documents.converted import Converted, Limits
from memstore.documents.decoding import decode

_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n|$)")
_FRONT = re.compile(
    # above an empty line it is a rule, unless what follows looks like YAML
    r"---[ \t]*(?:\r\n?|\n)(?![ \t]*[\r\n](?!\s*(?:[\w-]+:(?:\s|$)|---[ \t]*[\r\n])))"
    r"(?:.*?(?:\r\n?|\n))??(?:---|\.\.\.)[ \t]*(?=[\r\n]|$)",
    re.DOTALL,
)


def read_markdown(data: bytes, limits: Limits, notes: list[str]) -> Converted:
    """Markdown, unchanged. Raises UnreadableDocument."""
    text = decode(data, notes)
    return Converted(text, tuple(headings(text)), "markdown", tuple(notes))


def read_text(data: bytes, limits: Limits, notes: list[str]) -> Converted:
    """Plain text, unchanged. Raises UnreadableDocument."""
    return Converted(decode(data, notes), (), "text", tuple(notes))


def headings(text: str) -> list[Place]:
    """The headings of a Markdown text, in order; none from code or from YAML before the text."""
    from markdown_it import MarkdownIt

    if front := _FRONT.match(text, 0, 1 << 16):
        text = re.sub(r"[^\r\n]", " ", front[0]) + text[front.end() :]
    starts = [0, *accumulate(map(len, _LINE.findall(text)))]
    inline, places = MarkdownIt("commonmark"), list[Place]()
    tokens = MarkdownIt("commonmark").disable(["inline"], ignoreInvalid=True).parse(text)
    for opened, content in pairwise(tokens):
        if opened.type == "heading_open" and opened.map is not None:
            words = [
                " " if one.type.endswith("break") else one.content
                for token in inline.parseInline(content.content[:1024])
                for one in token.children or ()
                if one.type in ("text", "code_inline", "text_special", "softbreak", "hardbreak")
            ]
            level = min(int(opened.tag[1:]), LEVELS - 1)
            places.append(Place(starts[opened.map[0]], level, plain_name("".join(words))))
    return places
