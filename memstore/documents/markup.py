"""HTML and XHTML as paragraphs, headings, lists and rows, by events of lxml's parsers: no tree of
the document is ever held, so that nesting costs nothing.
"""

import re
from collections.abc import Callable
from html.entities import html5

from memstore.documents.compose import Composer
from memstore.documents.elements import Elements
from memstore.errors import UnreadableDocument

_STEP = 1 << 16  # characters that a parser is fed at once
_HIDDEN = frozenset((
    "script", "style", "template", "head", "noscript", "iframe", "object", "svg", "canvas", "audio",
    "video", "select", "datalist", "button", "textarea", "rp",
))  # fmt: skip
_BLOCKS = frozenset((
    "address", "article", "aside", "blockquote", "body", "center", "dd", "details", "dialog", "div",
    "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hgroup", "hr",
    "html", "legend", "li", "main", "menu", "nav", "ol", "option", "p", "pre", "section", "summary",
    "ul", "caption",
))  # fmt: skip
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_VOID = frozenset((
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track",
    "wbr",
))  # fmt: skip
# What waits between two texts; the greater covers the smaller
_NOTHING, _PARAGRAPH, _CELL, _ROW = range(4)
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,9}\s*")
_NAMED = re.compile(r"&([A-Za-z][A-Za-z0-9]{1,31});")
_OF_XML = {"amp", "lt", "gt", "quot", "apos"}


class Walk:
    """What lxml tells of elements and text, written into a Composer."""

    def __init__(self, composer: Composer, elements: Elements) -> None:
        self._composer, self._elements = composer, elements
        elements.begin_part()
        self._hidden = 0  # the depth at which what is not shown began; 0: it is shown
        self._verbatim = self._heading = 0
        self._waiting = _NOTHING
        # of each open list, the number of its next item; None: no numbers
        self._lists: list[int | None] = []
        self._texts = 0  # so many there were
        self._rows: list[int] = []  # of each open table, the texts before its row
        self._cells = 0  # of the row, that ended since its last text
        self._broken = False  # it has a heading, a list or verbatim text, and is no line any more
        self._title: list[str] | None = None
        self.title = ""

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """An element begins."""
        self._elements.begin()
        tag = _local(tag)
        if tag == "title" and not self.title:
            self._title = []
        if self._hidden or tag in _HIDDEN or "hidden" in attributes:
            self._hidden = self._hidden or self._elements.depth
            return
        if tag in _HEADINGS:
            self._end_paragraph()
            self._heading = _HEADINGS[tag]
        elif tag == "br":
            if self._waiting < _CELL:  # in an empty cell it breaks nothing
                self._composer.break_line()
        elif tag in ("table", "tr"):
            self._wait(_PARAGRAPH, over=tag == "table")
            self._cells, self._broken = 0, False
            if tag == "table":
                self._rows.append(self._texts)
            elif self._rows:
                self._rows[-1] = self._texts
        elif tag in _BLOCKS:
            self._wait(_PARAGRAPH)
            if tag == "pre":
                self._break_row()
                self._verbatim += 1
            elif tag in ("ol", "ul", "menu"):
                self._lists.append(_number(attributes.get("start"), 1) if tag == "ol" else None)
            elif tag == "li":
                self._item(attributes.get("value"))

    def end(self, tag: str) -> None:
        """It ends."""
        tag, depth = _local(tag), self._elements.depth
        self._elements.depth -= 1
        if tag == "title" and self._title is not None:
            self.title, self._title = "".join(self._title), None
        if self._hidden:
            self._hidden = 0 if depth <= self._hidden else self._hidden
            return
        if tag in _HEADINGS:
            self._end_paragraph()
        elif tag in ("td", "th"):
            self._cells += not (self._heading or self._broken)
            if not self._rows or self._rows[-1] < self._texts:  # or it waits for the row to begin
                self._wait(_CELL)
        elif tag == "tr":
            self._wait(_ROW)
            self._cells = 0
        elif tag == "table" or tag in _BLOCKS:
            self._wait(_PARAGRAPH, over=tag == "table")
            if tag == "table":
                self._cells = 0
                del self._rows[-1:]
            elif tag == "pre":
                self._verbatim = max(0, self._verbatim - 1)
            elif tag in ("ol", "ul", "menu") and self._lists:
                self._lists.pop()

    def data(self, text: str) -> None:
        """Text."""
        if self._title is not None:
            self._title.append(text[:1000])
        if self._hidden:
            return
        if not text.isspace():
            waiting, self._waiting = self._waiting, _NOTHING
            if waiting == _PARAGRAPH:
                self._composer.end_paragraph()
            elif waiting == _ROW:
                self._composer.break_line()
            if self._cells:  # empty ones too, or what follows would stand in another column
                self._composer.add(" | " * self._cells)
            elif waiting == _CELL and self._composer.open:
                self._composer.add(" | ")
            self._cells = 0
            self._texts += 1
        elif self._waiting or not self._composer.open:
            return
        self._composer.add(text, verbatim=self._verbatim > 0)

    def comment(self, text: str) -> None:
        """Comments are not read."""

    def pi(self, target: str, data: str | None = None) -> None:
        """Nor are instructions to programs."""

    def close(self) -> None:
        """The document ends."""
        self._end_paragraph()

    def _break_row(self) -> None:
        self._cells, self._broken = 0, True

    def _end_paragraph(self) -> None:
        self._break_row()
        self._waiting = _NOTHING
        self._composer.end_paragraph(self._heading)
        self._heading = 0

    def _wait(self, what: int, *, over: bool = False) -> None:
        if not self._heading:  # a heading is one line, whatever is in it
            self._waiting = what if over else max(self._waiting, what)

    def _item(self, value: str | None) -> None:
        self._end_paragraph()
        number = self._lists[-1] if self._lists else None
        if number is not None:
            number = _number(value, number)
            self._lists[-1] = number + 1
        indent = "  " * min(len(self._lists) - 1, 8)
        self._composer.item(f"{indent}- " if number is None else f"{indent}{number}. ")


def _number(said: str | None, otherwise: int) -> int:
    """What an attribute says, if that is a number."""
    return int(said) if said is not None and _INTEGER.fullmatch(said) else otherwise


def walk_html(text: str, composer: Composer, elements: Elements) -> str:
    """Read HTML into a composer; its title. Raises UnreadableDocument."""
    from lxml import etree

    walk = Walk(composer, elements)
    _feed(etree.HTMLParser(target=walk, huge_tree=True), text)
    return walk.title


def walk_xhtml(text: str, composer: Composer, elements: Elements) -> str:
    """Read XHTML into a composer; its title. What is no well-formed XML is read as HTML. Raises
    UnreadableDocument.
    """
    from lxml import etree

    text = without_entities(text)
    if parse_xml(text, lambda: _Nothing(elements)) is None:  # so that nothing is written twice
        return walk_html(_SELF_CLOSED.sub(_open_and_close, text), composer, elements)
    walk = Walk(composer, elements)
    _feed(etree.XMLParser(target=walk, **_xml_options()), text)
    return walk.title


def parse_xml(text: str, target: Callable[[], object]) -> object | None:
    """What a target makes of XML (its `close` says it); None for what is not well-formed."""
    from lxml import etree

    try:
        return _feed(etree.XMLParser(target=target(), **_xml_options()), text)
    except etree.XMLSyntaxError:
        return None


def without_entities(text: str) -> str:
    """XML without the names that HTML has for characters. Raises UnreadableDocument for XML that
    declares names of its own, as files do that want to fill a memory or to be given other files.
    """
    if re.search(r"<!ENTITY", text, re.IGNORECASE):
        raise UnreadableDocument("declares entities, which is not read for safety")
    text = _DECLARATION.sub("", text, count=1)  # its encoding is that of bytes
    begins = _BEGINS_DOCTYPE.search(text)
    if begins is not None:  # at the first one alone: each that has no end is sought to the last
        doctype = _DOCTYPE.match(text, begins.start())
        if doctype is not None:
            text = text[: doctype.start()] + text[doctype.end() :]
    return _NAMED.sub(_character, text)


_DECLARATION = re.compile(r"^\ufeff?\s*<\?xml[^>]*\?>")
_BEGINS_DOCTYPE = re.compile("<!DOCTYPE", re.IGNORECASE)
_DOCTYPE = re.compile(r"<!DOCTYPE[^>\[]*+(\[[^\]]*+\]\s*+)?>", re.IGNORECASE)
_SELF_CLOSED = re.compile(r"<([A-Za-z][A-Za-z0-9]*)((?:\s[^<>]*)?)/>")


def _xml_options() -> dict[str, bool]:
    return {"resolve_entities": False, "no_network": True, "load_dtd": False, "huge_tree": True}


def _open_and_close(found: re.Match[str]) -> str:
    tag = found[1]
    return found[0] if tag.lower() in _VOID else f"<{tag}{found[2]}></{tag}>"


def _character(found: re.Match[str]) -> str:
    name = found[1]
    return found[0] if name in _OF_XML else html5.get(f"{name};", found[0])


def _local(tag: object) -> str:
    return tag.rpartition("}")[2].lower() if isinstance(tag, str) else ""


def _feed(parser: object, text: str) -> object:
    for at in range(0, len(text), _STEP):
        parser.feed(text[at : at + _STEP])  # type: ignore[attr-defined]
    return parser.close()  # type: ignore[attr-defined]


class _Nothing:
    """Sees whether XML is well-formed, and not too deep."""

    def __init__(self, elements: Elements) -> None:
        self._elements = elements
        elements.begin_part()

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._elements.begin()

    def end(self, tag: str) -> None:
        self._elements.depth -= 1

    def data(self, text: str) -> None:
        pass

    def close(self) -> bool:
        return True
