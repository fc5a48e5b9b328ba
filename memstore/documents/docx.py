"""DOCX: paragraphs, headings, lists, tables and notes of a document, by events of lxml's parser.

python-docx is not used: it holds every part of the file in memory, pictures too, and leaves out
what stands in content controls and tracked insertions. Nor is mammoth: it builds the tree of a part
whole, whatever is in it, knows headings by the names of styles alone, and ends at a note without
an id.
"""

from abc import ABC, abstractmethod

from memstore.documents.archive import Archive
from memstore.documents.compose import Composer
from memstore.documents.converted import Converted, Limits
from memstore.documents.elements import Elements
from memstore.documents.markup import parse_xml, without_entities
from memstore.errors import UnreadableDocument

DOCUMENT, STYLES = "word/document.xml", "word/styles.xml"
_NOTES = ("word/footnotes.xml", "word/endnotes.xml")
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_STRICT = "{http://purl.oclc.org/ooxml/wordprocessingml/main}"
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"
# What was deleted, what a program is told, what stands there for older programs
_HIDDEN = frozenset(("del", "moveFrom", "instrText", "delText", "Fallback"))
# How it was formatted before a change that is tracked
_FORMER = frozenset((
    "rPrChange", "pPrChange", "sectPrChange", "numberingChange", "tblPrChange", "tblPrExChange",
    "tblGridChange", "trPrChange", "tcPrChange",
))  # fmt: skip


def read_docx(archive: Archive, limits: Limits) -> Converted:
    """The text of a DOCX, with its headings; notes stand at the end. Raises UnreadableDocument."""
    composer, elements = Composer(limits), Elements(limits)
    styles = _Styles(elements)
    if STYLES in archive.names:
        _parse(archive, STYLES, styles)
    levels = styles.levels()
    _parse(archive, DOCUMENT, _Body(composer, elements, levels))
    for part in _NOTES:
        if part in archive.names:
            _parse(archive, part, _Body(composer, elements, {}))
    return composer.done("docx")


def _parse(archive: Archive, part: str, target: "_Events") -> None:
    data = archive.member(part)
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        raise UnreadableDocument(f"is broken: {part} is not {encoding.upper()}") from None
    if parse_xml(without_entities(text), lambda: target) is None:
        raise UnreadableDocument(f"is broken: {part} is no XML")


class _Events(ABC):
    """Elements of WordprocessingML by their names alone."""

    def __init__(self, elements: Elements) -> None:
        self._elements = elements
        elements.begin_part()
        self._former = 0  # the depth at which what held before a change began

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._elements.begin()
        name = tag.rpartition("}")[2]
        if self._former or name in _FORMER:
            self._former = self._former or self._elements.depth
        else:
            self.begin(name, attributes)

    def end(self, tag: str) -> None:
        if not self._former:
            self.finish(tag.rpartition("}")[2])
        elif self._elements.depth == self._former:
            self._former = 0
        self._elements.depth -= 1

    @abstractmethod
    def begin(self, name: str, attributes: dict[str, str]) -> None:
        """An element begins; attributes by their names with namespaces."""

    @abstractmethod
    def finish(self, name: str) -> None:
        """An element ends."""

    @abstractmethod
    def data(self, text: str) -> None:
        """Text between elements."""

    def close(self) -> object:
        return self


def _value(attributes: dict[str, str], name: str = "val") -> str:
    return attributes.get(_W + name) or attributes.get(_STRICT + name) or ""


class _Styles(_Events):
    """Which styles are headings: by their outline level, their own or that of what they follow."""

    def __init__(self, elements: Elements) -> None:
        super().__init__(elements)
        self._own: dict[str, int] = {}
        self._based: dict[str, str] = {}
        self._style = ""

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        if name == "style":
            self._style = _value(attributes, "styleId")
        elif name == "basedOn":
            self._based[self._style] = _value(attributes)
        elif name == "outlineLvl":
            self._own[self._style] = _level(_value(attributes))
        elif name == "name":
            called = _value(attributes).lower()
            if called == "title":
                self._own.setdefault(self._style, 1)
            elif called.startswith("heading ") and called[8:].isdecimal():
                self._own.setdefault(self._style, min(int(called[8:10]), 9))

    def finish(self, name: str) -> None:
        if name == "style":
            self._style = ""

    def data(self, text: str) -> None:
        """There is none that counts."""

    def levels(self) -> dict[str, int]:
        """Style -> level of heading."""
        levels = dict(self._own)
        for style in self._based:
            chain = dict[str, None]()  # what follows itself is no heading
            while style not in levels and style in self._based and style not in chain:
                chain[style] = None
                style = self._based[style]
            levels |= dict.fromkeys(chain, levels.get(style, 0))
        return levels


def _level(outline: str) -> int:
    """Level of a heading of an outline level, "0" to "8"; "9" is text."""
    return int(outline) + 1 if outline in tuple("012345678") else 0


class _Body(_Events):
    """Paragraphs as they follow each other, rows of tables as lines."""

    def __init__(self, composer: Composer, elements: Elements, levels: dict[str, int]) -> None:
        super().__init__(elements)
        self._composer, self._levels = composer, levels
        self._heading = 0
        self._hidden = 0  # the depth at which what is not shown began
        self._text = self._verbatim = False
        self._cells: list[bool] = []  # of each open table: has the row a cell before this one?
        self._in_cell = 0
        self._begins_cell = False

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        composer = self._composer
        separator = _value(attributes, "type") in ("separator", "continuationSeparator")
        if self._hidden or name in _HIDDEN or (name in ("footnote", "endnote") and separator):
            self._hidden = self._hidden or self._elements.depth
        elif name == "p":
            if not self._in_cell:
                composer.end_paragraph()
            elif composer.open and not self._begins_cell:
                composer.break_line()
            self._begins_cell = False
            self._heading = 0
        elif name == "pStyle":
            self._heading = self._levels.get(_value(attributes), 0)
        elif name == "outlineLvl":
            self._heading = _level(_value(attributes)) or self._heading
        elif name == "numPr" and not self._in_cell and not self._heading:
            composer.item("- ")
        elif name == "t":
            self._text, self._verbatim = True, attributes.get(_SPACE) == "preserve"
        elif name in ("tab", "ptab") and composer.open:
            composer.add(" ")
        elif name in ("br", "cr"):
            composer.break_line()
        elif name == "noBreakHyphen":
            composer.add("-")
        elif name == "tbl":
            if not self._in_cell:
                composer.end_paragraph()
            self._cells.append(False)
        elif name == "tr" and self._cells:
            composer.break_line()
            self._cells[-1] = False
        elif name == "tc" and self._cells:
            if self._cells[-1]:
                composer.add(" | ")
            self._cells[-1] = self._begins_cell = True
            self._in_cell += 1

    def finish(self, name: str) -> None:
        composer = self._composer
        if self._hidden:
            self._hidden = 0 if self._elements.depth == self._hidden else self._hidden
        elif name == "t":
            self._text = False
        elif name == "p" and not self._in_cell:
            composer.end_paragraph(self._heading)
            self._heading = 0
        elif name == "tc" and self._in_cell:
            self._in_cell -= 1
        elif name == "tbl" and self._cells:
            self._cells.pop()
            if not self._in_cell:
                composer.end_paragraph()

    def data(self, text: str) -> None:
        if self._text and not self._hidden:
            self._composer.add(text, verbatim=self._verbatim)

    def close(self) -> object:
        self._composer.end_paragraph()
        return self
