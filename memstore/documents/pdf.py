"""PDF: pdfium reads pages, forms and annotations; headings, exponents and table columns follow from
sizes and positions of characters.
"""

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from memstore.disk.format.document import PAGE
from memstore.documents.converted import DAMAGED, TOO_LONG, Block, Limits
from memstore.documents.decoding import clean, raised
from memstore.errors import UnreadableDocument

_HYPHEN = "\ufffe"  # pdfium's mark of a word that is broken at a line's end
# A gap between columns, between words; a heading, an exponent: in sizes of the text
_COLUMN, _BLANK, _LARGE, _SMALL = 1.5, 0.15, 1.12, 0.85
_APART = 0.25  # between words of joined letters, whose boxes are narrower than they are drawn
_HEADING = re.compile(r"(?s)[\W\d]{0,12}[^\W_].*[^\W\d_]{2}.{0,200}[^.,;:]$")
_R = "\u0590-\u065f\u066a-\u06ef\u06fa-\u08ff\ufb1d-\ufdff\ufe70-\ufefc"  # right-to-left letters
_L = rf"[^\W\d_{_R}]"
_TO_THE_LEFT = re.compile(f"[{_R}](?:[^|a-zA-Z]{{0,200}}[{_R}])?")
# Pieces of a line that is read from right to left: words of other scripts, with numbers between
# or after them; numbers; else one letter with its marks
_PIECES = re.compile(
    rf"{_L}(?:[^{_R}|]{{0,200}}[^\W_{_R}])?|\d[^{_R}|]{{0,200}}{_L}"
    rf"|[-+#$€%]{{0,3}}\d(?:[^{_R}|\s]{{0,40}}\d)?[#$€%]{{0,3}}|.[\u0300-\u036f\u0591-\u05c7\u064b-\u065f]*"
)
_TURNED = dict(zip("()[]{}", ")(][}{"))
_LEADERS = re.compile(r"(?:\. ?){4}")  # of a table of contents
_BOXES = (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON)
_TEXTS = (raw.FPDF_FORMFIELD_TEXTFIELD, raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX)
_UNREAD = (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP, raw.FPDF_ANNOT_WIDGET)
_PASSWORD = 1 << 13  # a flag of a field


class _Line(NamedTuple):
    text: str
    size: float  # height of most of its characters, in points
    left: float
    base: float


class _Character(NamedTuple):
    text: str
    size: float
    left: float
    right: float
    base: float


def read_pdf(data: bytes, limits: Limits, notes: list[str]) -> Iterator[Block]:
    """The text page by page; pages count from 1. Raises UnreadableDocument."""
    try:
        document = pdfium.PdfDocument(data)
        document.init_forms()
    except pdfium.PdfiumError as error:
        if re.search("password|security", str(error), re.IGNORECASE):
            raise UnreadableDocument("is encrypted; save it without a password") from None
        raise UnreadableDocument(DAMAGED.format(error)) from None
    count, left = len(document), limits.characters
    if count > limits.pages:
        raise UnreadableDocument(f"has more than {limits.pages:,} pages; split it")
    pages = list[tuple[list[_Line], list[str]]]()
    unread: dict[str, list[int]] = {"pictures without text": [], "without text": []}
    for number in range(count):
        try:
            page = document[number]
            lines, remarks = [*_lines(page)], [*_annotations(document, page)]
        except pdfium.PdfiumError:
            page, lines, remarks = None, [], []
        for field in remarks:
            if isinstance(field, _Line):
                _fill_in(lines, field)
        pages.append((lines, [one for one in remarks if isinstance(one, str)]))
        left -= sum(len(line.text) for line in lines)
        if left < 0:
            raise UnreadableDocument(TOO_LONG.format(limits.characters))
        if not lines and (page is None or raw.FPDFPage_CountObjects(page)):
            images = page and [*page.get_objects([raw.FPDF_PAGEOBJ_IMAGE], max_depth=3)]
            unread["pictures without text" if images else "without text"].append(number + 1)
    notes += [
        f"{count:,} pages; {_named(numbers, what)}" for what, numbers in unread.items() if numbers
    ]
    if not any(lines or remarks for lines, remarks in pages):
        what = f"its {count:,} pages are pictures" if count > 1 else "its only page is a picture"
        raise UnreadableDocument(f"has no text: {what}; run text recognition (OCR) on it first")
    yield from _blocks(pages)


def _blocks(pages: list[tuple[list[_Line], list[str]]]) -> Iterator[Block]:
    """Paragraphs, and headings: lines in larger type, level 1 for the largest."""
    sizes = Counter[float]()
    for line in (line for lines, _ in pages for line in lines):
        sizes[line.size] += len(line.text)
    body = max(sizes, key=lambda size: sizes[size], default=0.0)
    large = sorted((size for size in sizes if size > _LARGE * body), reverse=True)
    levels = {size: min(level, 6) for level, size in enumerate(large, 1)}
    all_text = "\n".join(line.text for lines, _ in pages for line in lines)
    words = set(re.findall(r"\w+-\w+", all_text))
    for number, (lines, remarks) in enumerate(pages, 1):
        yield Block("", PAGE, str(number))
        for level, group in groupby(lines, lambda line: levels.get(line.size)):
            text = _joined("\n".join(line.text for line in group), words)
            heading = level and len(text) < 200 and _HEADING.match(text)
            yield Block(text, level if heading and not _LEADERS.search(text) else None)
        yield from map(Block, remarks)


def _lines(page: Any) -> Iterator[_Line]:
    """Lines of a page, in drawing order."""
    text, box = page.get_textpage(), raw.FS_RECTF()
    x, y = ctypes.c_double(), ctypes.c_double()
    line, ended = list[_Character](), False
    for index in range(raw.FPDFText_CountChars(text)):
        code = raw.FPDFText_GetUnicode(text, index)
        if code in (10, 13):
            ended = True
            continue
        raw.FPDFText_GetLooseCharBox(text, index, box)
        raw.FPDFText_GetCharOrigin(text, index, x, y)
        size = round(2 * abs(box.top - box.bottom)) / 2
        one = _Character(chr(code or 0xFFFD), size, box.left, box.right, y.value)
        if ended and line:
            last = line[-1]
            to_the_left = _TO_THE_LEFT.match(last.text)
            after = last.right <= one.left + size or to_the_left
            # what goes on at the same height is the same line, such as a row of a table
            if not after or all(abs(it.base - one.base) >= 0.1 * size for it in line[-9:]):
                yield from _line(line)
                line = []
            elif max(one.left - last.right, last.left - one.right) > size * (
                _APART if to_the_left else _BLANK
            ):
                line.append(last._replace(text=" "))
        ended = False
        line.append(one)
    yield from _line(line)


def _line(line: list[_Character]) -> Iterator[_Line]:
    solid = [one for one in line if not one.text.isspace()]
    if not solid:
        return
    (size, base), _ = Counter((one.size, round(one.base, 1)) for one in solid).most_common(1)[0]
    to_the_left = _TO_THE_LEFT.search("".join(one.text for one in solid))
    if to_the_left:
        line = solid = [*_seen(line, size)]
    text, small, end = "", "", solid[0].left
    for one in line:
        blank = one.text.isspace()
        if not blank and one.size < _SMALL * size and one.base > base + 0.12 * size:
            small, end = small + one.text, one.right
            continue
        text, small = text + _raised(text, small), ""
        if not blank and one.left - end > _COLUMN * size > 0 and text.strip():
            text = f"{text.rstrip()} | "
        text, end = text + one.text, end if blank else one.right
    text = _in_order(text + _raised(text, small)) if to_the_left else text + _raised(text, small)
    text = re.sub("  +", " ", clean(text)).strip(" |")
    if text:
        yield _Line(text, size, solid[0].left, base)


def _seen(line: list[_Character], size: float) -> Iterator[_Character]:
    """A line with right-to-left letters in visual order, from the left: pdfium's own order and
    blanks depend on how the line is drawn.
    """
    numbers = sorted(
        (number for number, one in enumerate(line) if not one.text.isspace()),
        # letters of one ligature have one place
        key=lambda n: (line[n].left, -n if _TO_THE_LEFT.match(line[n].text) else n),
    )
    for before, after in pairwise(numbers):
        yield line[before]
        blank, gap = line[(before + after) // 2], line[after].left - line[before].right
        there = blank.text.isspace() and (
            line[before].left < (blank.left + blank.right) / 2 < line[after].right
        )
        if gap > (0.1 if there else _APART) * size:
            yield line[before]._replace(text=" ")
    yield line[numbers[-1]]


def _in_order(text: str) -> str:
    """A line with right-to-left letters, from visual to reading order."""
    letters = re.findall(rf"({_L})|[{_R}]", text)
    if 2 * sum(map(bool, letters)) > len(letters):
        return _TO_THE_LEFT.sub(lambda found: _from_the_right(found[0]), text)
    return _from_the_right(text)


def _from_the_right(text: str) -> str:
    """Pieces of a text in reverse. pdfium has turned brackets round in some lines, in others not:
    a pair that closes before it opens is turned.
    """
    pieces = _PIECES.findall(text)[::-1]
    brackets = "".join(piece for piece in pieces if piece in _TURNED)
    if re.fullmatch(r"[)\]}].*[(\[{]", brackets):
        pieces = [_TURNED.get(piece, piece) for piece in pieces]
    return "".join(pieces)


def _raised(before: str, text: str) -> str:
    return raised(before[-20:], text) if re.search(r"\d", text) else text


def _joined(text: str, words: set[str]) -> str:
    """Join words broken at a line's end; a hyphen stays if the word has it elsewhere, too."""

    def join(found: re.Match[str]) -> str:
        hyphened = "-".join(found.groups())
        return hyphened if hyphened in words else "".join(found.groups())

    text = re.sub(rf"(\w+){_HYPHEN}\s*(\w+)", join, text).replace(_HYPHEN, "-")
    return re.sub(r"([^\W\d]+)[-‐]\n([^\W\d]+)", join, text)


def _annotations(document: Any, page: Any) -> Iterator[_Line | str]:
    """Form values as lines at their positions, and texts of annotations."""
    form, box = document.formenv, raw.FS_RECTF()
    for index in range(raw.FPDFPage_GetAnnotCount(page)):
        one, value = raw.FPDFPage_GetAnnot(page, index), ""
        kind = raw.FPDFAnnot_GetSubtype(one)
        if kind == raw.FPDF_ANNOT_WIDGET and form is not None:
            field = raw.FPDFAnnot_GetFormFieldType(form, one)
            if field in _BOXES:
                value = "[x]" if raw.FPDFAnnot_IsChecked(form, one) else "[ ]"
            elif field in _TEXTS and not raw.FPDFAnnot_GetFormFieldFlags(form, one) & _PASSWORD:
                value = _string(raw.FPDFAnnot_GetFormFieldValue, form, one)
            raw.FPDFAnnot_GetRect(one, box)
            if value:
                yield _Line(value, 0.0, box.left, (box.top + box.bottom) / 2)
        elif kind not in _UNREAD and (
            value := _string(raw.FPDFAnnot_GetStringValue, one, b"Contents")
        ):
            yield value if value.startswith("Note:") else f"Note: {value}"
        raw.FPDFPage_CloseAnnot(one)


def _string(function: Any, *arguments: Any) -> str:
    size = function(*arguments, None, 0)
    buffer = (raw.FPDF_WCHAR * (size // 2 + 1))()
    function(*arguments, buffer, size)
    return clean(bytes(buffer).decode("utf-16-le", "replace").rstrip("\0")).strip()


def _fill_in(lines: list[_Line], field: _Line) -> None:
    """Put a form's value after the text on its left, or between the lines above and below."""
    same = [
        at
        for at, line in enumerate(lines)
        if -line.size < field.base - line.base < 1.5 * line.size and line.left <= field.left
    ]
    if same:
        line = lines[same[-1]]
        lines[same[-1]] = line._replace(text=f"{line.text} {field.text}")
    else:
        above = [at for at, line in enumerate(lines, 1) if line.base > field.base]
        size = lines[0].size if lines else 0.0
        lines.insert(above[-1] if above else 0, field._replace(size=size))


def _named(numbers: list[int], what: str) -> str:
    """ "page 2 is a picture without text", "pages 2, 4-6 are pictures without text"."""
    if len(numbers) == 1:
        return f"page {numbers[0]} is {what.replace('pictures', 'a picture')}"
    runs = list[str]()
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        runs.append(f"{found[0]}" + (f"-{found[-1]}" if len(found) > 1 else ""))
    return f"pages {', '.join(runs)} are {what}"
