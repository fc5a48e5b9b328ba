"""EPUB: the chapters of a book in the order in which they are read, with their headings."""

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote

from memstore.disk.format.citations import LEVELS
from memstore.documents.archive import Archive
from memstore.documents.compose import Composer
from memstore.documents.converted import Converted, Limits
from memstore.documents.elements import Elements
from memstore.documents.hypertext import decode_html
from memstore.documents.markup import parse_xml, walk_xhtml, without_entities
from memstore.errors import UnreadableDocument

CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
# Fonts are hidden by these; their books are not
_OF_FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
_XHTML = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")
_NCX = "application/x-dtbncx+xml"


def read_epub(archive: Archive, limits: Limits) -> Converted:
    """The text of an EPUB. Chapters without a heading have their title of the table of contents as
    their place, to the next file that is named there and does not stand below it. Raises
    UnreadableDocument.
    """
    elements = Elements(limits)
    if _ENCRYPTION in archive.names:
        for algorithm in _parse(archive, _ENCRYPTION, elements).algorithms:
            if algorithm not in _OF_FONTS:
                raise UnreadableDocument(
                    "is protected (DRM), which only its shop's own reader can open"
                )
    package = _parse(archive, CONTAINER, elements).package
    if not package:
        raise UnreadableDocument(f"is broken: {CONTAINER} names no book")
    book = _parse(archive, package, elements)
    titles = _titles(archive, package, book, elements)
    composer = Composer(limits)
    held: list[int] = []  # levels of the titles of the contents under which the text stands
    for name in _chapters(archive, package, book, limits):
        text = decode_html(archive.member(name))
        level, title = titles.get(name, (LEVELS, ""))
        highest = _highest_heading(text)
        if highest < LEVELS:
            title = ""
        if title or any(other >= level for other in held):
            composer.place(level, title)
        walk_xhtml(text, composer, elements)
        composer.end_paragraph()
        if composer.drop_places():
            continue  # a file of pictures
        held = [other for other in held if other < min(level, highest)]
        if title:
            held.append(level)
    if not composer.begun:
        raise UnreadableDocument("has no text: its pages are pictures, or are missing")
    return composer.done("epub")


def _chapters(archive: Archive, package: str, book: "_Package", limits: Limits) -> Iterator[str]:
    """The members in the order of reading, each once, however often it is named there. Raises
    UnreadableDocument for too many names.
    """
    if len(book.spine) > limits.members:
        raise UnreadableDocument(
            f"has an order of reading of more than {limits.members:,} chapters"
        )
    seen = set[str]()
    for item in dict.fromkeys(book.spine):
        href, kind = book.items.get(item, ("", ""))
        name = _inside(package, href)
        if kind in _XHTML and name in archive.names and name not in seen:
            seen.add(name)
            yield name


def _highest_heading(text: str) -> int:
    """The level; LEVELS where there is none."""
    folded = text.lower()
    return next((level for level in range(1, 7) if f"<h{level}" in folded), LEVELS)


def _titles(
    archive: Archive, package: str, book: "_Package", elements: Elements
) -> dict[str, tuple[int, str]]:
    """Levels and titles of whole files by the table of contents, as version 3 has it, or else
    version 2.
    """
    for item in (book.nav, book.ncx):
        name = _inside(package, book.items.get(item, ("", ""))[0])
        if item and name in archive.names:
            entries = _parse(archive, name, elements).entries
            titles: dict[str, tuple[int, str]] = {}
            for href, title, level in entries:
                file = _inside(name, href.partition("#")[0])
                titles.setdefault(file, (max(1, min(level, LEVELS - 1)), title))
            return titles
    return {}


def _inside(base: str, href: str) -> str:
    """The member that a link from another member leads to; it leads nowhere else."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(base), unquote(href)))


def _parse(archive: Archive, name: str, elements: Elements) -> "_Package":
    text = without_entities(decode_html(archive.member(name)))
    elements.begin_part()
    found = _Package(elements)
    if parse_xml(text, lambda: found) is None:
        raise UnreadableDocument(f"is broken: {name} is no XML")
    return found


@dataclass
class _Package:
    """What the files that describe a book say, of whichever kind they are."""

    elements: Elements
    package: str = ""  # where the book is described
    algorithms: list[str] = field(default_factory=list)  # that something is encrypted by
    items: dict[str, tuple[str, str]] = field(default_factory=dict)  # id -> file, type
    spine: list[str] = field(default_factory=list)  # ids in the order of reading
    nav: str = ""  # id of the table of contents
    ncx: str = ""
    # of that: file, title, level
    entries: list[tuple[str, str, int]] = field(default_factory=list)
    _title: list[str] | None = None
    _href: str = ""
    _encrypted: bool = False
    _toc: int = 0  # the depth at which the table of contents begins
    _level: int = 0  # of what is told of there, from 1

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.elements.begin()
        name = tag.rpartition("}")[2]
        if name == "rootfile" and not self.package:
            self.package = attributes.get("full-path", "")
        elif name == "EncryptedData":
            self._encrypted = True
        elif name == "EncryptionMethod" and self._encrypted:
            self.algorithms.append(attributes.get("Algorithm", ""))
            self._encrypted = False
        elif name == "item":
            self._item(attributes)
        elif name == "itemref":
            self.spine.append(attributes.get("idref", ""))
        elif name == "nav":
            kinds = [value for key, value in attributes.items() if key.endswith("type")]
            if not kinds or "toc" in kinds[0].split():
                self._toc = self._toc or self.elements.depth
        elif name == "navPoint" or (name == "ol" and self._toc):
            self._level += 1
        elif name == "a" and self._toc:
            self._href, self._title = attributes.get("href", ""), []
        elif name == "navLabel":
            self._title = []
        elif name == "content" and self._title is not None:
            self._entry(attributes.get("src", ""))

    def end(self, tag: str) -> None:
        name = tag.rpartition("}")[2]
        if name == "EncryptedData" and self._encrypted:
            self.algorithms.append("")  # nobody says by what
            self._encrypted = False
        elif name == "a" and self._title is not None and self._href:
            self._entry(self._href)
        elif name == "navPoint" or (name == "ol" and self._toc):
            self._level -= 1
        elif name == "nav" and self._toc == self.elements.depth:
            self._toc = 0
        self.elements.depth -= 1

    def data(self, text: str) -> None:
        if self._title is not None:
            self._title.append(text)

    def close(self) -> object:
        return self

    def _entry(self, href: str) -> None:
        title = " ".join("".join(self._title or ()).split())
        if href and title:
            self.entries.append((href, title, self._level))
        self._title, self._href = None, ""

    def _item(self, attributes: dict[str, str]) -> None:
        number, kind = attributes.get("id", ""), attributes.get("media-type", "")
        self.items[number] = attributes.get("href", ""), kind
        if "nav" in attributes.get("properties", "").split():
            self.nav = number
        elif kind == _NCX:
            self.ncx = number
