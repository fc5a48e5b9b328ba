"""EPUB: chapters in reading order, each converted as HTML."""

import posixpath
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from memstore.documents.converted import Block, Limits
from memstore.documents.html import Walk, html_tree, xml_tree
from memstore.errors import UnreadableDocument

_FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")  # no DRM


def read_epub(members: dict[str, bytes], limits: Limits, notes: list[str]) -> Iterator[Block]:
    """Chapters in reading order; one without headings takes its title from the table of contents.
    Raises UnreadableDocument.
    """
    protected = members.get("META-INF/encryption.xml", b"<none/>")
    if set(xml_tree(protected).xpath("//EncryptionMethod/@Algorithm")) - {*_FONTS}:
        raise UnreadableDocument("is protected (DRM): only its shop's own reader can open it")
    paths = xml_tree(members["META-INF/container.xml"]).xpath("//rootfile/@full-path")
    if not paths or paths[0] not in members:
        raise UnreadableDocument("is damaged (its container names no book); get it again")
    book = xml_tree(members[paths[0]])
    items = {item.get("id"): item for item in book.iter("item")}
    chapters = [items.get(ref.get("idref")) for ref in book.iter("itemref")]
    names = [
        _inside(paths[0], item.get("href", "").partition("#")[0])
        for item in chapters
        if item is not None
    ]
    titles = _titles(members, paths[0], book)
    for name in dict.fromkeys(names):
        if name not in members:
            notes.append(f"the chapter {name} is missing")
            continue
        walk = Walk(limits)
        blocks = list(walk.blocks(xml_tree(members[name], html=True)))
        if walk.pictures and not blocks:
            notes.append(f"the chapter {name} is a picture without text")
        level, title = titles.get(name, (1, ""))
        if blocks and title and not any(block.level for block in blocks):
            yield Block("", level, title)
        yield from blocks


def _titles(members: dict[str, bytes], package: str, book: Any) -> dict[str, tuple[int, str]]:
    """Levels and titles of files in the table of contents, of EPUB 3 or else EPUB 2."""
    found = dict[str, tuple[int, str]]()
    tables = "//item[contains(@properties, 'nav')]|//item[contains(@media-type, 'ncx')]"
    for item in book.xpath(tables):
        name = _inside(package, item.get("href", ""))
        tree = xml_tree(members[name], html=True) if name in members else html_tree("")
        for entry in tree.xpath("//navPoint|(//nav)[1]//a"):
            href = entry.xpath("string(content/@src|@href)").partition("#")[0]
            title = " ".join(entry.xpath("string(navLabel|self::a)").split())
            level = len(entry.xpath("ancestor::ol|ancestor-or-self::navPoint"))
            if title:
                found.setdefault(_inside(name, href), (max(level, 1), title))
        if found:
            break
    return found


def _inside(base: str, href: str) -> str:
    """Path in the archive of a link in another member; never outside the archive."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(base), unquote(href)))
