"""DOCX: what mammoth would drop (numbers of lists and clauses, outline levels, formulas) is written
into the document as text; mammoth then makes HTML of it.
"""

import re
from collections.abc import Iterator
from typing import Any

from lxml import etree

from memstore.documents.converted import DAMAGED, Block, Limits
from memstore.documents.detect import zipped
from memstore.documents.html import ITEM, Walk, html_tree, numeral
from memstore.errors import UnreadableDocument

M = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
MC = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
# Elements that mammoth leaves out, as others that it reads
_AS = dict.fromkeys(("fldSimple", "bdo", "dir", "ruby", "rubyBase"), "smartTag")
_AS |= {"ptab": "tab", "cr": "br"}
_STYLES = "\n".join(f"p.Memstore{depth} => p.{ITEM}{depth}:fresh" for depth in range(9))
_JOINED = {"m": "; ", "eqArr": "; ", "mr": ", ", "func": " "}  # parts of a formula, by its name


def read_docx(members: dict[str, bytes], limits: Limits, notes: list[str]) -> Iterator[Block]:
    """The text with its headings; notes and comments follow. Raises UnreadableDocument."""
    import mammoth

    parts = {name: part for name, part in members.items() if name.endswith((".xml", ".rels"))}
    numbering = parts.pop("word/numbering.xml", b"<none/>")
    main = next((name for name in parts if re.fullmatch(r"word/document\d*\.xml", name)), None)
    if main is None:
        raise UnreadableDocument(DAMAGED.format("it has no main document"))
    parts[main] = _Document(parts[main], parts, numbering).written_out()
    no_picture = mammoth.images.img_element(lambda image: {"src": ""})
    style_map = f"comment-reference => sup\n{_STYLES}"
    html = mammoth.convert_to_html(
        zipped(parts), style_map=style_map, convert_image=no_picture
    ).value.replace("↑</a>", "</a>")
    walk = Walk(limits)
    yield from walk.blocks(html_tree(html))
    if walk.pictures:
        notes.append(f"pictures are not read ({walk.pictures:,})")


class _Document:
    """A document with its styles and numbering. w: its XML namespace, transitional or strict."""

    def __init__(self, main: bytes, parts: dict[str, bytes], numbering: bytes) -> None:
        parser = etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=True)
        self._root = etree.fromstring(main, parser)
        self._w = w = self._root.tag.rpartition("}")[0] + "}"
        styles = etree.fromstring(parts.get("word/styles.xml", b"<none/>"), parser)
        self._styles = {style.get(f"{w}styleId"): style for style in styles}
        numbers = etree.fromstring(numbering, parser)
        abstract = {one.get(f"{w}abstractNumId"): one for one in numbers}
        self._lists = {
            one.get(f"{w}numId"): (one, abstract[self._value(one, "abstractNumId")])
            for one in numbers.iter(f"{w}num")
            if self._value(one, "abstractNumId") in abstract
        }
        self._titled = 0
        self._counts: dict[Any, dict[int, int]] = {}  # of the levels of a list

    def written_out(self) -> bytes:
        """Write numbers, headings and formulas as text, and remove hidden text."""
        self._rewrite()
        for tag, text_of in (
            ("oMath", formula),
            ("oMathPara", lambda one: "".join(one.itertext())),
        ):
            for node in [*self._root.iter(M + tag)]:
                node.getparent().replace(node, self._run(text_of(node)))
        for paragraph in self._root.iter(f"{self._w}p"):
            if (form := paragraph.find(f"{self._w}pPr")) is not None:
                self._number(paragraph, form)
        return etree.tostring(self._root)

    def _rewrite(self) -> None:
        """Remove hidden text, and write what mammoth leaves out as what it reads."""
        w, box = self._w, f".//{self._w}txbxContent"
        for choice in [*self._root.iter(f"{MC}Choice")]:
            fallback = choice.getnext()
            if fallback is None or (choice.find(box) is not None and fallback.find(box) is None):
                choice.getparent().getparent().replace(choice.getparent(), choice)
                choice.tag = f"{w}smartTag"
            else:
                choice.getparent().remove(choice)
        for drawing in self._root.iter(f"{w}drawing"):
            if boxes := drawing.findall(box):
                drawing.tag = f"{w}pict"  # of whose text boxes mammoth reads the text
                drawing.extend(boxes)
        for node in [*self._root.iter(f"{w}moveFrom", f"{w}vanish")]:
            if node.tag == f"{w}vanish":
                hides = node.get(f"{w}val") not in ("0", "false", "off")
                node = node.getparent().getparent()
                if not hides or node.tag != f"{w}r":  # of a paragraph it hides the end only
                    continue
            node.getparent().remove(node)
        for ruby in self._root.iter(f"{w}ruby"):
            reading = "".join(text for one in ruby.iterfind(f"{w}rt") for text in one.itertext())
            ruby.append(self._run(f"({reading})"))
        for choices in self._root.iter(f"{w}ddList"):  # of a form
            entries = choices.findall(f"{w}listEntry")
            number = self._value(choices, "result") or self._value(choices, "default") or "0"
            for entry in entries[int(number) :][:1]:
                field = next(choices.iterancestors(f"{w}r"))
                field.addnext(self._run(entry.get(f"{w}val", "")))
        for old, new in _AS.items():
            for node in self._root.iter(w + old):
                node.tag = w + new

    def _number(self, paragraph: Any, form: Any) -> None:
        """Write the number of a paragraph before it, and give it the style of a heading or item."""
        style = self._value(form, "pStyle")
        own = self._value(form, "outlineLvl")
        outline = own or self._of_style(style, "pPr/outlineLvl")
        named = re.fullmatch(
            "heading ([1-9])|title", self._of_style(style, "name", "heading|title")
        )
        level = int(named[1] or 0) + self._titled if named else 0
        if outline in tuple("012345678"):
            level = int(outline) + 1 + self._titled
        elif named and not named[1]:
            level = self._titled = 1  # what follows is below the title
        number, depth_ = (
            self._value(form, f"numPr/{one}") or self._of_style(style, f"pPr/numPr/{one}")
            for one in ("numId", "ilvl")
        )
        depth = min(int(depth_ or 0), 8)
        listed = form.find(f"{self._w}numPr") is not None or number
        label = self._label(number, depth) if listed and number != "0" else ""
        if label:
            paragraph.insert(paragraph.index(form) + 1, self._run(f"{label} "))
        if label or level:
            for old in form.findall(f"{self._w}pStyle"):
                form.remove(old)
            style = f"Heading{min(level, 6)}" if level else f"Memstore{depth}"
            form.insert(0, etree.Element(f"{self._w}pStyle", {f"{self._w}val": style}))

    def _label(self, number: str, depth: int) -> str:
        """The next number of a list at a depth: "3.", "2.1", "(a)", or "-" for a bullet."""
        if number not in self._lists:
            return "-"
        instance, abstract = self._lists[number]
        levels = {
            int(level.get(f"{self._w}ilvl")): level
            for one in (abstract, instance)
            for level in one.iter(f"{self._w}lvl")
        }
        counts = self._counts.setdefault(abstract, {})
        if number not in self._counts:  # a list of its own may begin again
            self._counts[number] = {}
            for one in instance.iter(f"{self._w}lvlOverride"):
                if start := self._value(one, "startOverride"):
                    counts[int(one.get(f"{self._w}ilvl"))] = int(start) - 1
        for level in range(depth + 1):
            if level not in counts:
                start = self._value(levels.get(level), "start") or "1"
                counts[level] = int(start) - (level == depth)
        counts[depth] += 1
        for level in [level for level in counts if level > depth]:
            del counts[level]
        text, form = (self._value(levels.get(depth), one) for one in ("lvlText", "numFmt"))
        if form == "bullet":
            return "-"
        legal = levels[depth].find(f"{self._w}isLgl") is not None if depth in levels else False

        def shown(found: re.Match[str]) -> str:
            level = int(found[1]) - 1
            form = self._value(levels.get(level), "numFmt")
            return numeral(counts.get(level, 1), "" if legal and form != "decimalZero" else form)

        return re.sub(r"%([1-9])", shown, text)

    def _of_style(self, style: str, path: str, pattern: str = "") -> str:
        """A property of a style or of the nearest style it is based on, in lower case."""
        for _ in range(20):
            value = self._value(self._styles.get(style), path).lower()
            if value and re.match(pattern, value):
                return value
            style = self._value(self._styles.get(style), "basedOn")
        return ""

    def _value(self, node: Any, path: str) -> str:
        path = "/".join(self._w + name for name in path.split("/"))
        found = None if node is None else node.find(path)
        return "" if found is None else found.get(f"{self._w}val", "")

    def _run(self, text: str) -> Any:
        run = etree.Element(f"{self._w}r")
        etree.SubElement(run, f"{self._w}t").text = text
        return run


def formula(node: Any) -> str:
    """Office's XML of a formula as text, such as "(a+b)/2" and "∑_(i=1)^n x_i"."""
    name = etree.QName(node).localname
    if name == "t":
        return node.text or ""
    given = {etree.QName(one).localname: one.get(f"{M}val", "") for one in node.iterfind("./*/*")}
    parts = [(etree.QName(one).localname, formula(one)) for one in node]
    marks = {"sub": "_", "sup": "^", "den": "/", "lim": "^" if name == "limUpp" else "_"}
    if name == "nary":
        marks["e"] = " "
    texts = [text for _, text in parts if text]
    text = "".join(marks.get(part, "") + text for part, text in parts if text)
    match name:
        case "sub" | "sup" | "num" | "den" | "lim" | "deg":
            return text if len(text) < 2 or text.isdecimal() else f"({text})"
        case "d":
            bar = given.get("sepChr", "|").join(texts)
            return given.get("begChr", "(") + bar + given.get("endChr", ")")
        case "rad":
            return f"{dict(parts).get('deg', '')}√({dict(parts).get('e', '')})"
        case "nary":
            return given.get("chr", "∫") + text
        case "acc":
            return text + given.get("chr", "\u0302")
        case _:
            return _JOINED[name].join(texts) if name in _JOINED else text
