"""HTML to blocks of text: what the page shows, and values of filled-in forms. Other kinds of
documents are converted to HTML first.
"""

import re
from collections.abc import Iterator
from html import unescape
from typing import Any

from lxml import etree

from memstore.documents.converted import DAMAGED, TOO_LONG, Block, Limits
from memstore.documents.decoding import clean, decode, raised
from memstore.errors import UnreadableDocument

_HIDDEN = frozenset((
    "script", "style", "template", "head", "noscript", "nav", "iframe", "object", "svg",
    "canvas", "audio", "video", "datalist", "button", "rp", "annotation", "annotation-xml", "del",
))  # fmt: skip
_BLOCKS = frozenset((
    "address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details",
    "dialog", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1",
    "h2", "h3", "h4", "h5", "h6", "header", "hgroup", "hr", "html", "legend", "li", "main",
    "menu", "ol", "p", "pre", "section", "summary", "table", "tr", "ul",
))  # fmt: skip
_LAYOUT = "boolean(.//table|.//h1|.//h2|.//h3|.//h4|.//pre)"  # is a page arranged by the table?
_UNSEEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
# Before the parts of a formula from the second on
_FORMULA = {"msup": "^", "msub": "_", "msubsup": "_^", "munderover": "_^", "mfrac": "/"}
_BRACKETS = {"rt": ("(", ")"), "q": ("“", "”"), "msqrt": ("√(", ")")}
ITEM = "memstore-item-"  # a class: a paragraph that is an item, with its number in the text
# Breaks and blanks that stay are control characters in a line, which no text has any more.
_BREAK, _KEPT = "\x00", str.maketrans("\n \t", "\x00\x01\x02")
_SHOWN = str.maketrans("\x00\x01\x02", "\n \t")
_ROMAN = (
    ("", "m", "mm", "mmm"),
    ("", "c", "cc", "ccc", "cd", "d", "dc", "dcc", "dccc", "cm"),
    ("", "x", "xx", "xxx", "xl", "l", "lx", "lxx", "lxxx", "xc"),
    ("", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix"),
)
_FORMS = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
_DEEPEST = 2000  # lxml leaves out what is deeper than 2,048
_WIDEST = 1000  # columns and rows of a cell
_COPIES = 100_000  # of the cells of a document, where they span columns and rows
_NO_VALUE = ("hidden", "password", "submit", "button", "reset", "image", "file")


def read_html(data: bytes, limits: Limits, notes: list[str], declared: str = "") -> list[Block]:
    """Blocks of a page; its title is its heading if it has no other. Raises UnreadableDocument."""
    root = html_tree(decode(data, notes, declared, html=True))
    blocks = list(Walk(limits).blocks(root))
    title = " ".join(root.xpath("string(.//title[not(ancestor::svg)])").split())
    titled = any(one.level for one in blocks) or not title
    return blocks if titled else [Block("", 1, title), *blocks]


def html_tree(text: str) -> Any:
    """Parse HTML."""
    parser = etree.HTMLParser(huge_tree=True, remove_pis=True, remove_comments=True)
    text = text.replace("\0", "\ufffd")
    parser.feed(re.sub(r"^\s*<\?xml[^>]*>", "", text) or " ")
    root = parser.close()
    return etree.Element("html") if root is None else root


def xml_tree(data: bytes, *, html: bool = False) -> Any:
    """Parse XML and drop its namespaces. html: parse malformed XML as HTML. Raises
    UnreadableDocument for declared entities, which could name other files or fill the memory.
    """
    text = decode(data, [], html=True)
    if re.search("<!ENTITY", text, re.IGNORECASE):
        raise UnreadableDocument("declares XML entities, which are refused for safety")
    text = re.sub(r"^\s*<\?xml[^>]*>", "", text)
    named = re.sub(r"&(?!(?:amp|lt|gt|quot|apos);)\w+;", lambda found: unescape(found[0]), text)
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, huge_tree=True,
        remove_pis=True, remove_comments=True,
    )  # fmt: skip
    try:
        root = etree.fromstring(named, parser)
    except etree.XMLSyntaxError as error:
        if not html:
            raise UnreadableDocument(DAMAGED.format(error)) from None
        return html_tree(text)
    for node in root.iter(etree.Element):
        node.tag = etree.QName(node).localname
        for name in [name for name in node.attrib if name[0] == "{"]:
            node.set(etree.QName(name).localname, node.attrib.pop(name))
    return root


class Walk:
    """Collects blocks from the trees of one document, and counts its pictures."""

    def __init__(self, limits: Limits, bar: str = " | ") -> None:
        """bar: between the cells of a row."""
        self._bar = bar
        self.pictures = self._verbatim = 0
        self._left = self._most = limits.characters
        self._copies = _COPIES
        self._line: list[str] = []
        self._marks: list[int] = []  # where raised text begins in the line
        self._item, self._prefix = False, ""
        self._lists: list[int] = []  # of each open list, the number of its next item; 0: bullets
        self._tables: list[list[list[tuple[str, int, int]]] | None] = []  # open ones: rows of cells
        self._in_cell = False  # of a table that is read row by row

    def blocks(self, root: Any) -> Iterator[Block]:
        """Blocks of a tree. Raises UnreadableDocument for too much text or too deep nesting."""
        context, depth = etree.iterwalk(root, events=("start", "end")), 0
        for event, node in context:
            tag = node.tag if isinstance(node.tag, str) else "object"
            depth += 1 if event == "start" else -1
            if depth > _DEEPEST:
                raise UnreadableDocument("is nested too deep")
            if tag in ("input", "select", "option", "textarea"):
                self._line.append(" ")  # a box
            if event == "end":
                yield from self._end(tag, node)
                self._add(node.tail if node is not root else "")
            elif (
                tag in _HIDDEN
                or "hidden" in node.attrib
                or (tag == "option" and "selected" not in node.attrib)
                or (tag == "dialog" and "open" not in node.attrib)
                or _UNSEEN.search(node.get("style", ""))
            ):
                context.skip_subtree()
            else:
                yield from self._start(tag, node)
                self._add(node.text)
        yield from self._flush()

    def _count(self, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise UnreadableDocument(TOO_LONG.format(self._most))

    def _add(self, text: str | None) -> None:
        if text:
            self._count(text)
            text = clean(text)
            self._line.append(text.translate(_KEPT) if self._verbatim else text)

    def _start(self, tag: str, node: Any) -> Iterator[Block]:
        parent, kind = node.getparent(), node.get("type", "text").lower()
        if tag in _BLOCKS or tag in ("td", "th"):
            yield from self._flush()
        if parent is not None and parent.tag in _FORMULA and parent[0] is not node:
            self._line.append(_FORMULA[parent.tag][0 if parent[1] is node else -1])
        self._add_bracket(_brackets(tag, node)[0])
        if tag in ("td", "th"):
            self._in_cell = bool(self._tables) and self._tables[-1] is not None
        elif tag == "br":
            self._line.append(_BREAK)
        elif tag in ("sup", "sub"):
            self._marks.append(len(self._line))
        elif tag == "img":
            self.pictures += 1
        elif tag == "input" and kind in ("checkbox", "radio"):
            self._line.append("[x] " if "checked" in node.attrib else "[ ] ")
        elif tag == "input" and kind not in _NO_VALUE:
            self._add(node.get("value"))
        elif tag == "table":
            self._tables.append(None if node.xpath(_LAYOUT) else [[]])
            self._in_cell = False
        elif tag == "tr" and self._tables and self._tables[-1] is not None:
            self._tables[-1].append([])
        elif tag in ("ol", "ul", "menu"):
            self._lists.append(_number(node, "start", 1) if tag == "ol" else 0)
        elif tag == "pre":
            self._verbatim += 1
        elif tag == "li" and not self._in_cell:
            number = _number(node, "value", self._lists[-1]) if self._lists else 0
            form = _FORMS.get(parent.get("type", ""), "") if number else ""
            self._item, mark = True, f"{numeral(number, form)}. " if number else "- "
            self._prefix = "  " * min(len(self._lists) - 1, 8) + mark
            self._lists[-1:] = [number + 1 if number else 0] if self._lists else []
        elif tag == "p" and node.get("class", "").startswith(ITEM):
            self._item, self._prefix = True, "  " * int(node.get("class")[len(ITEM) :])

    def _add_bracket(self, bracket: str) -> None:
        if bracket:  # what stands before a raised number is told by the last pieces
            self._line.append(bracket)

    def _end(self, tag: str, node: Any) -> Iterator[Block]:
        self._add_bracket(_brackets(tag, node)[1])
        if tag in ("sup", "sub") and self._marks:
            mark = self._marks.pop()
            text, before = "".join(self._line[mark:]), "".join(self._line[:mark][-3:])[-20:]
            if tag == "sup":
                text = raised(before, text, note=node.find(".//a") is not None)
            elif before[-1:].isdigit() and text.strip().isdigit():
                text = f"_{text.strip()}"
            self._line[mark:] = [text]
        elif tag in ("td", "th") and self._in_cell and self._tables and self._tables[-1]:
            across, down = (min(_number(node, one, 1), _WIDEST) for one in ("colspan", "rowspan"))
            self._tables[-1][-1].append((self._take().replace("\n", " "), max(across, 1), down))
            self._in_cell = False
        elif tag in _BLOCKS or tag in ("td", "th"):
            yield from self._flush(int(tag[1]) if re.fullmatch("h[1-6]", tag) else None)
            if tag == "table" and self._tables and (rows := self._tables.pop()):
                yield Block(self._rows(rows))
            elif tag in ("ol", "ul", "menu") and self._lists:
                self._lists.pop()
            self._verbatim -= tag == "pre" and self._verbatim > 0

    def _take(self) -> str:
        """Take the collected line, with whitespace as a browser shows it."""
        line = re.sub(r"[ \t\r\n\f\v]+", " ", "".join(self._line))
        self._line, self._marks = [], []
        return re.sub(f" ?{_BREAK} ?", _BREAK, line).strip(f" {_BREAK}").translate(_SHOWN).rstrip()

    def _flush(self, level: int | None = None) -> Iterator[Block]:
        if self._in_cell:
            self._line.append(" ")
        elif text := self._take():
            yield Block(self._prefix + text, level, text, self._item)
            self._item, self._prefix = False, ""

    def _rows(self, rows: list[list[tuple[str, int, int]]]) -> str:
        """Table rows as lines; a cell that spans rows is repeated in each."""
        grid = [dict[int, str]() for _ in rows]  # text by column
        for number, row in enumerate(rows):
            column = 0
            for text, across, down in row:
                while column in grid[number]:
                    column += 1
                down = min(down or len(rows), len(rows) - number)
                self._copies -= across * down - 1
                if self._copies < 0:
                    across = down = 1
                for line in grid[number : number + down]:
                    line.update(dict.fromkeys(range(column + 1, column + across), ""))
                    line[column] = text
                column += across
        lines = list[str]()
        for line in grid:
            cells = (line.get(column, "") for column in range(max(line, default=-1) + 1))
            lines.append(self._bar.join(cells).rstrip(f" {self._bar}").lstrip(" "))
            self._count(lines[-1])
        return "\n".join(line for line in lines if line.strip(f" {self._bar}"))


def _brackets(tag: str, node: Any) -> tuple[str, str]:
    """Text before and after an element: of ruby, quotations, roots, and groups of a formula."""
    parent = node.getparent()
    group = tag == "mrow" and len(node) > 1 and parent is not None and parent.tag in _FORMULA
    return ("(", ")") if group and node[0].text != "(" else _BRACKETS.get(tag, ("", ""))


def _number(node: Any, name: str, otherwise: int) -> int:
    found = re.fullmatch(r"\s*([+-]?[0-9]{1,9})\s*", node.get(name, ""))
    return int(found[1]) if found else otherwise


def numeral(number: int, form: str) -> str:
    """The number of an item in one of Office's forms; decimal in others."""
    if form.endswith("Letter"):
        shown = chr(97 + (number - 1) % 26) * min((number + 25) // 26, 9)
    elif form.endswith("Roman"):
        digits = map(int, f"{number % 4000:04}")
        shown = "".join(letters[digit] for letters, digit in zip(_ROMAN, digits))
    else:
        return f"{number:0{2 if form == 'decimalZero' else 1}}"
    return shown.upper() if form.startswith("upper") else shown
