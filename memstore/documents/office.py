"""Presentations, spreadsheets and OpenDocument files."""

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator
from copy import deepcopy
from datetime import datetime, time, timedelta
from html import escape
from itertools import pairwise
from typing import Any

from lxml import etree

from memstore.disk.format.document import PAGE
from memstore.documents.converted import Block, Limits
from memstore.documents.decoding import clean, decode
from memstore.documents.detect import zipped
from memstore.documents.docx import MC, M, formula
from memstore.documents.html import Walk, html_tree, xml_tree
from memstore.errors import UnreadableDocument

_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
# OpenDocument's elements as HTML's
_ODF = {
    "list-item": "li", "table-row": "tr", "table-cell": "td", "line-break": "br", "image": "img",
    "annotation": "aside", "note-body": "aside", "note-citation": "sup", "page": "section",
    "notes": "aside", "tracked-changes": "template", "covered-table-cell": "template",
}  # fmt: skip
# Of a number format: digits; words and names of currencies; what is not shown
_FORM = re.compile(
    r'([#0?][#0?,.]*(?:E[+-]0+)?)|"([^"]*)"|\\(.)|\[\$([^\]-]*)[^\]]*\]|\[[^\]]*\]|[_*].'
)
_NUMBER = re.compile(r"[-+]?[€$£¥]? ?[\d.,]+ ?(?:[%€$£¥]| [^\W\d]{1,3})?")
_COPIES = 10_000  # of cells and rows that an OpenDocument sheet repeats


def read_pptx(members: dict[str, bytes], limits: Limits, notes: list[str]) -> Iterator[Block]:
    """Slides as pages, with their titles, tables and notes."""
    from pptx import Presentation

    walk, unread = Walk(limits), 0
    for number, slide in enumerate(Presentation(zipped(members)).slides, 1):
        for choice in [*slide.shapes._spTree.iter(MC + "Choice")]:
            if any(etree.QName(one).localname == "sp" for one in choice):  # with a formula
                choice.getparent().getparent().replace(choice.getparent(), choice[0])
        title = slide.shapes.title
        parts, shapes = [], sorted(slide.shapes, key=lambda shape: shape != title)
        while shapes:
            shape = shapes.pop(0)
            if hasattr(shape, "shapes"):
                shapes[:0] = shape.shapes
            elif shape.has_text_frame:
                tag = "h2" if shape == title else "p"
                parts += [f"<{tag}>{line}</{tag}>" for line in _lines(shape.text_frame)]
            elif getattr(shape, "has_table", False):
                rows = ["".join(map(_cell, row.cells)) for row in shape.table.rows]
                parts.append(f"<table><tr>{'<tr>'.join(rows)}</table>")
            else:
                unread += "PICTURE" in str(shape.shape_type) or getattr(shape, "has_chart", False)
        if slide.has_notes_slide and (frame := slide.notes_slide.notes_text_frame):
            parts += [f"<p>{line}</p>" for line in _lines(frame)]
        yield Block("", PAGE, str(number))
        yield Block("", 1)  # a slide without a title is not under another's
        yield from walk.blocks(html_tree("".join(parts)))
    if unread:
        notes.append(f"pictures and charts are not read ({unread:,})")


def _cell(cell: Any) -> str:
    if cell.is_spanned:
        return ""
    text = "<br>".join(_lines(cell.text_frame))
    return f"<td rowspan={cell.span_height} colspan={cell.span_width}>{text}"


def _lines(frame: Any) -> Iterator[str]:
    """The paragraphs of a slide's text as HTML, with raised and lowered text and formulas."""
    for paragraph in frame.paragraphs:
        parts = list[str]()
        for node in paragraph._p:
            text = " " if node.tag == f"{_A}br" else escape(node.findtext(f"{_A}t", ""))
            baseline = "0" if (form := node.find(f"{_A}rPr")) is None else form.get("baseline", "0")
            tag = "sub" if baseline[0] == "-" else "sup"
            parts.append(text if baseline[0] == "0" else f"<{tag}>{text}</{tag}>")
            parts += [escape(formula(one)) for one in node.iter(f"{M}oMath")]
        yield "".join(parts)


def read_xlsx(members: dict[str, bytes], limits: Limits, notes: list[str]) -> Iterator[Block]:
    """Sheets: the name as a heading, then the rows."""
    sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]  # openpyxl needs none
    from openpyxl import load_workbook

    book = load_workbook(zipped(members), data_only=True)
    for sheet in book.worksheets:
        rows = dict[int, dict[int, str]]()
        # not iter_rows: it makes every cell up to the farthest one
        for (row, column), cell in sorted(sheet._cells.items()):
            if text := _shown(cell.value, cell.number_format):
                note = f" ({cell.comment.text})" if cell.comment else ""
                rows.setdefault(row, {})[column] = clean(text + note)
        for span in sheet.merged_cells.ranges:
            text = rows.get(span.min_row, {}).get(span.min_col, "")
            for row in rows.keys() & range(span.min_row + 1, span.max_row + 1):
                rows[row][span.min_col] = text
        if rows:
            yield Block(clean(sheet.title), 1)
        first = min(map(min, rows.values()), default=1)
        numbers = sorted({*rows, *(number - 1 for number in rows)})  # and empty rows before them
        yield from records(
            [row.get(column, "") for column in range(first, max(row, default=0) + 1)]
            for row in (rows.get(number, {}) for number in numbers)
        )
    sheets = b"".join(part for name, part in members.items() if name.startswith("xl/worksheets/"))
    empty = len(re.findall(rb"</f>(?:<v\s*/>|<v></v>)?</c>", sheets))
    if empty:
        notes.append(f"formulas without a stored value are not read ({empty:,})")


def _shown(value: Any, form: str) -> str:
    """A cell's value in its number format, for the commonest formats."""
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    if isinstance(value, timedelta) and value >= timedelta():
        minutes, seconds = divmod(round(value.total_seconds()), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    form = form.split(";")[0]  # of positive numbers
    bare = _FORM.sub(lambda found: "0" if found[1] else "", form)
    if bare.count("0") != 1 or "/" in bare or re.search(r"\[[<>=]", form):
        return f"{value:.15g}"
    digits = next(found[1] for found in _FORM.finditer(form) if found[1])
    thousands = len(digits) - len(digits.rstrip(","))
    amount = abs(value) * (100 if "%" in bare else 1) / 1000**thousands
    whole, _, places = digits.rstrip(",").partition("E")[0].partition(".")
    if "E" in digits:
        shown = f"{amount:.{len(places)}E}"
    else:
        width = whole.count("0") + len(places) + bool(places)
        shown = f"{amount:0{width}{',' if ',' in whole else ''}.{len(places)}f}"
        while places.endswith(("#", "?")) and shown.endswith("0"):
            places, shown = places[:-1], shown[:-1]

    def written(found: re.Match[str]) -> str:
        return shown.rstrip(".") if found[1] else found[2] or found[3] or found[4] or ""

    return "-" * (value < 0) + _FORM.sub(written, form).strip()


def read_csv(data: bytes, limits: Limits, notes: list[str]) -> Iterator[Block]:
    """Rows of a file separated by commas, semicolons, tabs or bars."""
    text = decode(data, notes)
    try:
        dialect: Any = csv.Sniffer().sniff(text[:65536], ",;\t|")
    except csv.Error:
        dialect = csv.excel
    csv.field_size_limit(limits.characters)
    lines = io.StringIO(text, newline=None)  # a line may end with \r
    return records([clean(cell) for cell in row] for row in csv.reader(lines, dialect))


def records(rows: Iterable[list[str]]) -> Iterator[Block]:
    """Rows as lines; if the first full row of a table is a header, each cell follows its column's
    name. After an empty row another table may begin: names stand where numbers were.
    """
    names: list[str] | None = None
    counted, apart = set[int](), False  # columns with numbers; is this the first row after a gap?
    for row in rows:
        row = [" ".join(cell.split()) for cell in row]
        filled = {column: cell for column, cell in enumerate(row) if cell}
        if not filled:
            apart = True
            continue
        if apart and counted & filled.keys() and _is_header(row):
            names, counted = None, set()
        title = apart and len(filled) == 1
        counted |= {column for column, cell in filled.items() if _NUMBER.fullmatch(cell)}
        if names is None and len(filled) > 1:
            names = row if _is_header(row) else []
        elif names and not title:
            padded = [*names, *[""] * (len(row) - len(names))]
            row = [f"{name}: {cell}" if name else cell for name, cell in zip(padded, row) if cell]
        apart = title
        yield Block(" | ".join(row).rstrip(" |").lstrip(" |" if row is names else " "), item=True)


def _is_header(row: list[str]) -> bool:
    """Has it several names, all different, and no numbers but years in a run?"""
    filled = [cell for cell in row if cell]
    numbers = [cell for cell in filled if _NUMBER.fullmatch(cell)]
    years = all(re.fullmatch("(?:19|20)[0-9]{2}", one) for one in numbers)
    steps = {int(after) - int(before) for before, after in pairwise(numbers) if years}
    run = steps in ({1}, {-1}) and len(numbers) < len(row)
    return 1 < len(filled) == len(set(filled)) and (run or not numbers)


def read_odf(members: dict[str, bytes], limits: Limits, notes: list[str]) -> Iterator[Block]:
    """Text, sheets or slides: OpenDocument's XML renamed to HTML."""
    root, walk, copies = xml_tree(members["content.xml"]), Walk(limits), 0
    cells = Walk(limits, bar="\0")  # which no cell has
    trees = [root, xml_tree(members.get("styles.xml", b"<none/>"))]
    raised = {
        style.get("name"): style.xpath("string(text-properties/@text-position)")
        for tree in trees
        for style in tree.iter("style")
    }
    numbered = {
        (style.get("name"), level.get("level"))
        for tree in trees
        for style in tree.iter("list-style")
        for level in style.iter("list-level-style-number")
    }
    hidden = {
        style.get("name")
        for tree in trees
        for style in tree.xpath("//style[text-properties/@display='none']")
    }
    for node in root.xpath("//annotation/creator|//annotation/date"):
        node.getparent().remove(node)
    for body in root.xpath("body/text"):
        _notes_last(body)
    for node in reversed([*root.iter()]):  # what is in an element before the element
        position = raised.get(node.get("style-name"), "") if node.tag == "span" else ""
        if node.tag == "h":
            node.tag = f"h{min(int(node.get('outline-level', 1)), 6)}"
        elif node.tag == "list":
            around = [node, *node.iterancestors("list")]
            style = next((one.get("style-name") for one in around if one.get("style-name")), None)
            node.tag = "ol" if (style, str(len(around))) in numbered else "ul"
        elif node.tag in ("s", "tab"):
            node.text = " " * min(int(node.get("c", 1)), 100)
        elif position[:1] not in ("", "0"):
            node.tag = "sub" if position.startswith(("sub", "-")) else "sup"
        if node.get("style-name") in hidden or node.get("display") == "none":
            node.tag = "template"
        node.tag = _ODF.get(node.tag, node.tag)
        for kind in ("columns", "rows"):
            repeated = int(node.get(f"number-{kind}-repeated", 1))
            empty = node.tag not in ("td", "tr") or not "".join(node.itertext()).strip()
            wide = str(repeated if empty and node.getnext() is not None else 1)
            node.set(f"{kind[:3]}span", node.get(f"number-{kind}-spanned", wide))
            copies += 0 if empty else repeated - 1
            if copies > _COPIES:
                raise UnreadableDocument("repeats too many cells; save it again")
            for _ in range(0 if empty else repeated - 1):
                node.addnext(deepcopy(node))
    for number, slide in enumerate(root.xpath("body/presentation/section"), 1):
        yield Block("", PAGE, str(number))
        yield from walk.blocks(slide)
    for sheet in root.xpath("body/spreadsheet/table"):
        if text := "\n".join(block.text for block in cells.blocks(sheet)):
            yield Block(sheet.get("name", ""), 1)
            yield from records(row.split("\0") for row in text.split("\n"))
    for body in root.xpath("body/text"):
        yield from walk.blocks(body)
    if pictures := walk.pictures + cells.pictures:
        notes.append(f"pictures are not read ({pictures:,})")


def _notes_last(body: Any) -> None:
    """Move notes and comments to the end of an OpenDocument text, out of its sentences."""
    for note in body.xpath("(.//note|.//annotation)[not(ancestor::tracked-changes)]"):
        mark, inner = note.find("note-citation"), note.find("note-body")
        inner = note if inner is None else inner
        label = "Comment: " if mark is None else f"{''.join(mark.itertext())}. "
        last = etree.SubElement(body, "aside")
        last.extend([*inner])
        inner.tag = "span"
        for first in last.findall("p")[:1]:
            first.text = label + (first.text or "")
