"""Small documents of every kind, made by hand."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from memstore.documents import Converted
from memstore.documents.child import convert
from memstore.documents.converted import LIMITS, Limits
from memstore.documents.detect import form_of

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_STYLES = f'<w:styles xmlns:w="{W}">' + "".join(
    f'<w:style w:type="paragraph" w:styleId="H{level}"><w:name w:val="heading {level}"/></w:style>'
    f'<w:style w:type="paragraph" w:styleId="Own{level}"><w:basedOn w:val="H{level}"/></w:style>'
    for level in range(1, 7)
)
CONTAINER = (
    '<?xml version="1.0"?><container version="1.0" '
    'xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/>'
    "</rootfiles></container>"
)


class Section(NamedTuple):
    """A heading and the text below it."""

    level: int
    title: str
    paragraphs: Sequence[str]


BOOK = [
    Section(1, "The Mill", ["The mill stands at the river.", "Nobody has worked there for years."]),
    Section(2, "The Ferry", ["The ferry crosses at nine, and once more at noon."]),
    Section(1, "The Inn", ["At the inn they said that the bridge was gone."]),
]


def converted(data: bytes, name: str, limits: Limits = LIMITS) -> Converted:
    """A document as this process reads it."""
    return convert(data, form_of(data, name), limits)


def zipped(members: Mapping[str, str | bytes]) -> bytes:
    """A zip of these members."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def saved(document: Any) -> bytes:
    """The file of a workbook or a presentation."""
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def html(sections: Sequence[Section]) -> bytes:
    """A page of the web."""
    return f"<!DOCTYPE html><html><body>{_body(sections)}</body></html>".encode()


def markdown(sections: Sequence[Section]) -> bytes:
    """Markdown."""
    parts = [
        "\n\n".join((f"{'#' * level} {title}", *paragraphs))
        for level, title, paragraphs in sections
    ]
    return "\n\n".join(parts).encode()


def docx(sections: Sequence[Section]) -> bytes:
    """A document as word processors save it."""
    body = "".join(
        _paragraph(title, f"Own{level}") + "".join(map(_paragraph, paragraphs))
        for level, title, paragraphs in sections
    )
    return docx_of(body)


def docx_of(body: str, **members: str | bytes) -> bytes:
    """A DOCX file with this body (WordprocessingML)."""
    document = f'<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>'
    return zipped(
        {
            "[Content_Types].xml": "<Types/>",
            "word/document.xml": document,
            "word/styles.xml": f"{_STYLES}</w:styles>",
            **members,
        }
    )


def _paragraph(text: str, style: str = "") -> str:
    style = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    words = escape(text, quote=False)
    return f'<w:p>{style}<w:r><w:t xml:space="preserve">{words}</w:t></w:r></w:p>'


def epub(sections: Sequence[Section], **members: str | bytes) -> bytes:
    """A book with a file for each section."""
    chapters = [_chapter(_body([section])) for section in sections]
    return epub_of(chapters, **members)


def epub_of(
    chapters: Sequence[str | bytes], titles: Sequence[str] = (), **members: str | bytes
) -> bytes:
    """A book of these files; titles: of its table of contents."""
    items = "".join(
        f'<item id="c{n}" href="text/c%20{n}.xhtml" media-type="application/xhtml+xml"/>'
        for n in range(len(chapters))
    )
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    links = "".join(
        f'<li><a href="text/c%20{n}.xhtml">{escape(title)}</a></li>'
        for n, title in enumerate(titles)
    )
    return zipped(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": CONTAINER,
            "OEBPS/book.opf": '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
            '<item id="nav" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>'
            f"{items}</manifest><spine>{spine}</spine></package>",
            "OEBPS/nav.xhtml": '<html xmlns="http://www.w3.org/1999/xhtml" '
            'xmlns:epub="http://www.idpf.org/2007/ops"><body>'
            f'<nav epub:type="toc"><ol>{links}</ol></nav></body></html>',
            **{f"OEBPS/text/c {n}.xhtml": chapter for n, chapter in enumerate(chapters)},
            **members,
        }
    )


def _chapter(body: str) -> str:
    return (
        '<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html>'
        f'<html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body>{body}</body></html>'
    )


def _body(sections: Sequence[Section]) -> str:
    return "".join(
        f"<h{level}>{escape(title)}</h{level}>"
        + "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
        for level, title, paragraphs in sections
    )


def pdf(
    pages: Sequence[Sequence[str]],
    streams: Sequence[bytes] | None = None,
    objects: Sequence[bytes] = (),
    *,
    times: int = 1,
    page: bytes = b"",
    catalogue: bytes = b"",
    font: bytes = b"/BaseFont /Helvetica",
) -> bytes:
    """A PDF of pages of lines (Latin-1). streams: draw the pages in place of lines. times: how
    often the pages are listed. It can have more objects, which of one page are numbered from 6, and
    more entries of its pages and catalogue.
    """
    if streams is None:
        streams = [drawn(lines) for lines in pages]
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in [*range(len(streams))] * times)
    made = [
        b"<< /Type /Catalog /Pages 2 0 R %s >>" % catalogue,
        f"<< /Type /Pages /Kids [{kids}] /Count {len(streams) * times} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 %s /Encoding /WinAnsiEncoding >>" % font,
    ]
    for number, stream in enumerate(streams):
        made += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> %s >>" % (5 + 2 * number, page),
            stream_of(stream),
        ]
    return pdf_of([*made, *objects])


def stream_of(data: bytes, entries: bytes = b"") -> bytes:
    """An object of a PDF that holds data."""
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), entries, data)


def pdf_of(objects: Sequence[bytes]) -> bytes:
    """A PDF of these objects, numbered from 1; the first is the catalogue."""
    out = bytearray(b"%PDF-1.4\n")
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\n" % (len(objects) + 1)
    return bytes(out + b"startxref\n%d\n%%%%EOF\n" % table)


def drawn(lines: Sequence[str]) -> bytes:
    """What draws lines on a page."""
    shown = "".join(
        "({}) Tj T* ".format(line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)"))
        for line in lines
    )
    return f"BT /F1 12 Tf 14 TL 72 720 Td {shown}ET".encode("latin-1")


def encrypted(document: bytes, password: str, algorithm: str = "RC4-128") -> bytes:
    """A PDF with a password for its reader ("" for one that asks for none)."""
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(document)))
    writer.encrypt(password, "the owner's", algorithm=algorithm)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


# What was read wrongly once


FIELD = b"<< /Type /Annot /Subtype /Widget /Rect [%d 715 %d 735] /T (%s) /FT %s >>"
FORM = pdf(
    [["Name of the keeper:"]],
    objects=[
        FIELD % (200, 400, b"keeper", b"/Tx /V (Ada Brook)"),
        FIELD % (410, 430, b"lamp", b"/Btn /V /On /AS /On /AP << /N << /On 5 0 R >> >>"),
        FIELD % (440, 480, b"word", b"/Tx /Ff 8192 /V (secret)"),
    ],
    page=b"/Annots [6 0 R 7 0 R 8 0 R]",
    catalogue=b"/AcroForm << /Fields [6 0 R 7 0 R 8 0 R] >>",
)
NOTED = pdf(
    [["Name of the keeper:"]],
    objects=[b"<< /Type /Annot /Subtype /Text /Rect [9 9 20 20] /Contents (Ask the mason.) >>"],
    page=b"/Annots [6 0 R]",
)
SIZES = [
    b"BT /F1 20 Tf 72 720 Td (The Weir) Tj /F1 11 Tf 0 -30 Td (It holds 10) Tj /F1 7 Tf 5 Ts (6) "
    b"Tj 0 Ts /F1 11 Tf ( litres in the har-) Tj 0 -14 Td (bour.) Tj 0 -14 Td (Fee) Tj "
    b"150 0 Td (4 crowns) Tj ET"
]


def hebrew_pdf(*lines: Sequence[tuple[int, str]]) -> bytes:
    """A PDF of lines of texts at x, each as it is seen from the left, and drawn in this order. Its
    font has Hebrew letters for the codes of a to z and {.
    """
    drawn = b"".join(
        b"BT /F1 12 Tf 1 0 0 1 %d %d Tm <%s> Tj ET\n" % (x, 700 - 14 * number, _codes(text))
        for number, line in enumerate(lines)
        for x, text in line
    )
    letters = (
        b"/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /A def "
        b"1 begincodespacerange <00> <FF> endcodespacerange "
        b"1 beginbfrange <61> <7B> <05D0> endbfrange endcmap end end"
    )
    courier = b"/BaseFont /Courier /ToUnicode 6 0 R"
    return pdf([], [drawn], [stream_of(letters)], font=courier)


def _codes(text: str) -> bytes:
    codes = (ord(one) - (0x05D0 - ord("a") if one >= "\u05d0" else 0) for one in text)
    return bytes(codes).hex().encode()


def numbered_paragraph(text: str, depth: int = 0) -> str:
    where = f"<w:numPr><w:ilvl w:val='{depth}'/><w:numId w:val='1'/></w:numPr>"
    return f"<w:p><w:pPr>{where}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def level(depth: int, form: str, text: str, more: str = "") -> str:
    form = f"<w:numFmt w:val='{form}'/>{more}<w:lvlText w:val='{text}'/>"
    return f"<w:lvl w:ilvl='{depth}'><w:start w:val='1'/>{form}</w:lvl>"


CLAUSES = docx_of(
    "".join(
        numbered_paragraph(text, depth)
        for depth, text in enumerate(["Terms", "Rent", "late rent", "Repairs", "Fees"])
    ).replace("<w:ilvl w:val='3'/>", "<w:ilvl w:val='1'/>"),
    **{
        "word/numbering.xml": f'<w:numbering xmlns:w="{W}"><w:abstractNum w:abstractNumId="0">'
        + level(0, "upperRoman", "%1.")
        + level(1, "decimal", "%1.%2")
        + level(2, "lowerLetter", "(%3)")
        + level(4, "decimalZero", "%1.%5", "<w:isLgl/>")
        + '</w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num></w:numbering>'
    },
)
SYMBOLS = docx_of(
    "<w:p><w:r><w:t>20</w:t></w:r><w:r><w:sym w:font='Symbol' w:char='F0B1'/></w:r>"
    "<w:r><w:t>1 or 10</w:t></w:r><w:r><w:rPr><w:vertAlign w:val='superscript'/></w:rPr>"
    "<w:t>4</w:t></w:r><w:r><w:rPr><w:vanish/></w:rPr><w:t>hidden</w:t></w:r></w:p>"
)
MC = "http://schemas.openxmlformats.org/markup-compatibility/2006"
_RUN = "<w:r><w:t xml:space='preserve'>{}</w:t></w:r>".format
KEPT = docx_of(
    "<w:p><w:pPr><w:pStyle w:val='H2'/><w:rPr><w:vanish/></w:rPr></w:pPr>"
    + _RUN("Terms")
    + "</w:p>"
    f"<w:p><w:r><w:rPr><w:vanish w:val='0'/></w:rPr><w:t>Signed</w:t></w:r><w:r><w:cr/></w:r>"
    f"<w:fldSimple w:instr='DATE'>{_RUN('3 May')}</w:fldSimple>"
    f"<w:bdo w:val='rtl'>{_RUN(' at')}</w:bdo><w:r><w:ptab/></w:r>"
    f"<w:r><w:ruby><w:rt>{_RUN('ことば')}</w:rt><w:rubyBase>{_RUN('言葉')}</w:rubyBase></w:ruby></w:r>"
    "<w:r><w:fldChar w:fldCharType='begin'><w:ffData><w:ddList><w:result w:val='1'/><w:listEntry "
    "w:val='Kent'/><w:listEntry w:val='Devon'/></w:ddList></w:ffData></w:fldChar></w:r></w:p>"
    f"<w:p><w:r><mc:AlternateContent xmlns:mc='{MC}'><mc:Choice><w:drawing><x><w:txbxContent><w:p>"
    f"{_RUN('In the box')}</w:p></w:txbxContent></x></w:drawing></mc:Choice><mc:Fallback/>"
    "</mc:AlternateContent></w:r></w:p>"
)
FORMULA = (
    "<m:oMath xmlns:m='http://schemas.openxmlformats.org/officeDocument/2006/math'><m:nary><m:naryPr>"
    "<m:chr m:val='∑'/></m:naryPr><m:sub><m:t>i=1</m:t></m:sub><m:sup><m:t>n</m:t></m:sup><m:e>"
    "<m:f><m:num><m:t>a+b</m:t></m:num><m:den><m:t>2</m:t></m:den></m:f></m:e></m:nary>"
    "<m:rad><m:deg/><m:e><m:sSubSup><m:e><m:t>y</m:t></m:e><m:sub><m:t>0</m:t></m:sub><m:sup><m:t>2</m:t></m:sup>"
    "</m:sSubSup></m:e></m:rad></m:oMath>"
)
_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
RENAMED = zipped(
    {
        "[Content_Types].xml": "<Types/>",
        "_rels/.rels": f"<Relationships xmlns='{_PACKAGE}'><Relationship Id='a' Type='{_OFFICE}' "
        "Target='word/document2.xml'/></Relationships>",
        "word/document2.xml": f'<w:document xmlns:w="{W}"><w:body>{_paragraph("At the river.")}'
        "</w:body></w:document>",
    }
)
ODF = (
    '<o xmlns:text="t" xmlns:table="b" xmlns:office="f" xmlns:style="s"><office:body>{}'
    "</office:body></o>"
)
ODT = ODF.format(
    "<office:text><text:h text:outline-level='2'>The Weir</text:h><text:p>Two<text:s text:c='1'/>"
    "gates.</text:p><table:table><table:table-row><table:table-cell table:number-rows-spanned='2'>"
    "<text:p>North</text:p></table:table-cell><table:table-cell><text:p>Delby</text:p>"
    "</table:table-cell></table:table-row><table:table-row><table:covered-table-cell/>"
    "<table:table-cell><text:p>Lukton</text:p></table:table-cell></table:table-row></table:table>"
    "</office:text>"
)
NOTED_ODT = ODF.replace("<office:body>", "{}<office:body>").format(
    "<style:style style:name='H'><style:text-properties text:display='none'/></style:style>",
    "<office:text><text:p>Two<text:note><text:note-citation>1</text:note-citation><text:note-body>"
    "<text:p>One is shut.</text:p></text:note-body></text:note> gates"
    "<text:span text:style-name='H'>hidden</text:span><office:annotation><creator>Ada</creator>"
    "<text:p>Ask.</text:p></office:annotation> hold.</text:p></office:text>",
)
_ROW = "<table:table-row>{}</table:table-row>"
_CELL = "<table:table-cell><text:p>{}</text:p></table:table-cell>"
GAPS = ODF.format(
    "<office:spreadsheet><table:table table:name='Fees'>"
    + "".join(
        _ROW.format("".join(map(_CELL.format, row)))
        for row in (("City", "Fee", "Year", "Note"), ("", "5", "", "late"), ("a | b", "", "1", "x"))
    )
    + _ROW.format(
        "<table:table-cell table:number-columns-repeated='2'><text:p>7</text:p></table:table-cell>"
    )
    + _ROW.format(
        _CELL.format("Delby")
        + "<table:table-cell table:number-columns-repeated='2'/>"
        + _CELL.format("paid")
        + "<table:table-cell table:number-columns-repeated='9999'/>"
    )
    + "</table:table></office:spreadsheet>"
)
MAIL = (
    "From: Ada <ada@example.org>\nSubject: =?utf-8?q?The_m=C3=BChle?=\nMIME-Version: 1.0\n"
    'Content-Type: multipart/mixed; boundary="b"\n\n--b\nContent-Type: text/plain; charset=utf-8\n'
    "Content-Transfer-Encoding: base64\n\nVGhlIGtleSBoYW5ncyB0aGVyZS4=\n--b\n"
    'Content-Type: image/png; name="map.png"\nContent-Disposition: attachment\n\nx\n--b--\n'
)
PARTS = (
    b"Subject: In parts\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=b\n\n"
    b"--b\n\nOne.\n--b\nContent-Type: text/html\n\n<p>Two.\n--b\n\nThree.\n"
    b"--b\nContent-Type: text/calendar\n\nVEVENT\n--b--\n"
)
SAVED = (
    'From: <Saved>\nMIME-Version: 1.0\nContent-Type: multipart/related; boundary="b"\n\n--b\n'
    "Content-Type: text/html; charset=shift_jis\nContent-Transfer-Encoding: quoted-printable\n\n"
    "<html><p>=87=40 The price=20of the mare =\nis 310.</html>\n--b--\n"
)
NOTEBOOK = (
    '{"nbformat": 4, "cells": [{"cell_type": "markdown", "source": ["# The Weir\\n", "Flow."]}, '
    '{"cell_type": "code", "source": "print(6)", "outputs": ['
    '{"text": ["\\u001b[32m6\\u001b[0m\\n"]}, '
    '{"data": {"image/png": "", "text/plain": "<Figure>"}}]}]}'
)
FRANC = (
    "<p lang=fr>Le 1<sup>er</sup> mai, 3 m<sup>2</sup> et x<sup>-n</sup>, selon eux<sup>2</sup>."
)
