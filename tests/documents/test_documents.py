"""Documents of all kinds become the text that a reader sees."""

from datetime import timedelta

import pytest

from memstore.disk.format.document import PAGE, Place, Places
from memstore.documents import Converted, read
from memstore.documents.decoding import clean
from support import made_documents as made
from support.made_documents import converted

pytest.importorskip("lxml")
pytest.importorskip("pypdfium2")


def text_of(data: bytes, name: str) -> str:
    return converted(data, name).text.strip()


# Every kind


def test_the_pages_of_a_pdf_are_counted_and_empty_ones_too() -> None:
    pages = [["On the first page (of four)."], [], ["On the third.", "With two lines."], ["Last."]]
    document = read(made.pdf(pages), "a.pdf")
    assert [place.name for place in document.places] == ["1", "3", "4"]
    places = Places(document.places)
    third, last = (document.text.index(word) for word in ("third", "Last"))
    assert (places.at(third, third + 5), places.at(last, last + 4)) == ("page 3", "page 4")
    assert places.at(third, last + 1) == "pages 3-4"


def test_the_kind_of_a_file_is_detected_from_its_content() -> None:
    for data, name, kind in (
        (made.pdf([["Hello."]]), "notes.txt", "pdf"),
        (made.docx(made.BOOK), "notes", "docx"),
        (made.epub(made.BOOK), "book.zip", "epub"),
        (made.html(made.BOOK), "page.txt", "html"),
        (b"\xef\xbb\xbf\n <!-- a page --><!DOCTYPE HTML><p>x", "page", "html"),
        (b"# Not a heading here", "notes.txt", "text"),
        (b"a < b and <b>bold</b>", "notes.txt", "text"),
        (b"MIME-Version: 1.0\n\nHello.", "letter", "mail"),
        ("<html><p>x".encode("utf-16-le"), "page", "html"),
    ):
        assert converted(data, name).kind == kind


def test_plain_text_is_left_as_it_is() -> None:
    assert read("naïve\r\n  café".encode(), "a.txt") == Converted("naïve\r\n  café", (), "text")


# HTML


def test_html_is_converted_as_a_browser_shows_it() -> None:
    page = """<!doctype html><html><head><title>Head</title><style>p {}</style></head><body>
    <h1>One <b>two</b><br>three</h1><script>no()</script><p>Para  one<br>line&nbsp;two</p>
    <ul><li>a<li><p>b</p><ol start=3><li>c<li>d</ol></ul><template>no</template>
    <table><tr><th><p>1</p><th>2<tr><td>3<td><p>4<p>5</table><pre>  code
      more</pre><p hidden>no</p>After &bogus; &eacute; &#x1F600;<svg><text>no</text></svg>"""
    assert text_of(page.encode(), "a.html") == (
        "One two\nthree\n\nPara one\nline two\n\n- a\n- b\n  3. c\n  4. d\n\n"
        "1 | 2\n3 | 4 5\n\n  code\n      more\n\nAfter &bogus; é 😀"
    )
    assert [place.name for place in converted(page.encode(), "a.html").places] == ["One two three"]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1251", "Мы пришли домой поздно вечером. На улице шёл дождь."),
        ("cp932", "私たちは夜遅くに家に帰りました。外は雨が強く降っていました。"),
        ("gb18030", "我们很晚才回到家。外面下着大雨。"),
        ("cp949", "우리는 밤늦게 집에 돌아왔다. 밖에는 비가 많이 내리고 있었다."),
        ("cp1252", "Wir kamen spät nach Hause. Über Nacht regnete es draußen."),
    ],
)
def test_the_code_page_of_a_short_text_is_guessed(encoding: str, text: str) -> None:
    assert text_of(text.encode(encoding), "a.txt") == text


# DOCX


def test_docx_lists_tables_notes_controls_and_insertions_are_read() -> None:
    run = "<w:r><w:t>{}</w:t></w:r>".format
    cell = "<w:tc><w:p>{}</w:p></w:tc>".format
    body = (
        f"<w:p><w:pPr><w:outlineLvl w:val='0'/></w:pPr>{run('Own level')}</w:p>"
        f"<w:sdt><w:sdtContent><w:p>{run('In a control')}</w:p></w:sdtContent></w:sdt>"
        f"<w:p><w:ins>{run('Inserted')}</w:ins><w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"
        "<w:r><w:tab/><w:t>tab</w:t><w:br/><w:t>line</w:t><w:noBreakHyphen/><w:t>x</w:t></w:r></w:p>"
        f"<w:p><w:pPr><w:numPr/></w:pPr>{run('item')}</w:p>"
        f"<w:tbl><w:tr>{cell(run('a'))}{cell(run('b'))}</w:tr>"
        f"<w:tr>{cell('')}{cell(run('d'))}</w:tr></w:tbl>"
        f"<w:p>{run('code')}<w:r><w:instrText>PAGE</w:instrText></w:r>"
        "<w:r><w:footnoteReference w:id='2'/></w:r></w:p>"
    )
    notes = (
        f'<w:footnotes xmlns:w="{made.W}"><w:footnote w:type="separator"><w:p>{run("-")}</w:p>'
        f"</w:footnote><w:footnote w:id='2'><w:p>{run('A note.')}</w:p></w:footnote></w:footnotes>"
    )
    data = made.docx_of(body, **{"word/footnotes.xml": notes})
    assert text_of(data, "a.docx") == (
        "Own level\n\nIn a control\n\nInserted tab\nline‑x\n\n- item\n\na | b\n| d\n\n"
        "code[1]\n\n1. A note."
    )
    assert converted(data, "a.docx").places == (Place(0, 1, "Own level"),)


# EPUB


def test_chapters_without_headings_take_their_titles_from_the_table_of_contents() -> None:
    chapter = '<html xmlns="http://www.w3.org/1999/xhtml"><body><p>{}</p></body></html>'.format
    words = ["It began at the mill.", "It went on at the inn.", "It ended."]
    document = converted(made.epub_of(list(map(chapter, words)), ["The Mill", "The Inn"]), "a.epub")
    assert document.text.strip() == "\n\n".join(words)
    assert [(document.text[start:][:7], name) for start, _, name in document.places] == [
        ("It bega", "The Mill"),
        ("It went", "The Inn"),
    ]


# Markdown


def test_code_and_front_matter_are_not_headings() -> None:
    text = (
        "---\ntitle: Notes\n---\n# One *two* `x` [link](y) &amp;\r\n\r\n```\n# no\n```\n\n"
        "    # no\n\nSet\ntwo\n===\nmore\n> ## Quoted\n\n#no\n"
    )
    document = converted(text.encode(), "a.md")
    assert document.text == text
    assert [(level, name) for _, level, name in document.places] == [
        (1, "One two x link &"),
        (1, "Set two"),
        (2, "Quoted"),
    ]
    for place, line in zip(document.places, ("# One", "Set", "> ##")):
        assert text[place.start :].startswith(line)
        assert place.start == 0 or text[place.start - 1] == "\n"


# What a reader sees


SEEN: dict[str, tuple[bytes, *tuple[str, ...]]] = {
    "ordinals.html": (made.FRANC.encode(), "Le 1er mai, 3 m^2 et x^(-n), selon eux[2]."),
    "citations.html": (
        "<p>cells<sup>1,3–5</sup>, 10<sup>1,5</sup>".encode(),
        "cells[1,3–5], 10^1,5",
    ),
    "deep.html": (b"<p><span><b>10</b></span><sup>6</sup>", "10^6"),
    "ruby.html": ("<p><ruby>言葉<rt>ことば</rt></ruby>".encode(), "言葉(ことば)"),
    "letters.html": ("<p>o\ufb03ce ＡＢ\u00adC m² 2½".encode(), "office ABC m^2 2½"),
    "arabic.html": ("<p>\ufedf\ufe8e".encode(), "\u0644\u0627"),
    "spans.html": (
        b"<table><tr><td colspan=2>a<td>b<tr><td rowspan=2>c<td>d<td>e<tr><td>f<td>g</table>",
        "a |  | b\nc | d | e\nc | f | g",
    ),
    "form.html": (
        b"<p>Name<input value=Ada><input type=checkbox checked>yes<select><option>a"
        b"<option selected>b</select><input type=password value=no>",
        "Name Ada [x] yes b",
    ),
    "formula.html": (
        b"<math><mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac><msqrt>"
        b"<msubsup><mi>y</mi><mn>0</mn><mn>2</mn></msubsup></msqrt></math>",
        "(a+b)/2√(y_0^2)",
    ),
    "shown.html": (
        b"<svg><title>no</title></svg><dialog>no</dialog><p>He said <q>go</q>: <del>no</del>"
        b"<ins>4</ins><select multiple><option selected>a<option selected>b</select>"
        b"<ol type=a start=2><li>two</ol>&#x2066;\xef\x82\xb7&#x2069;",
        "He said “go”: 4 a b\n\nb. two\n\n•",
    ),
    "hidden.html": (b"<nav>Home</nav><p style='display: none'>no</p><p>yes", "yes"),
    "one_bad.html": (
        b"<meta charset=utf-8><p>bad \xff byte",
        "bad \ufffd byte",
        "bytes that are no utf-8 text are marked with \ufffd (1)",
    ),
    "stray.html": (
        b"<meta charset=latin1><p>\x93yes\x94 \x9d",
        "“yes” \ufffd",
        "bytes that are no cp1252 text are marked with \ufffd (1)",
    ),
    "charset.html": ('<meta charset="windows-1251"><p>мельница'.encode("cp1251"), "мельница"),
    "equiv.html": (
        '<meta http-equiv=Content-Type content="text/html; charset=Shift_JIS"><p>水車小屋'.encode(
            "shift_jis"
        ),
        "水車小屋",
    ),
    "prolog.html": (
        '<?xml version="1.0" encoding="iso-8859-1"?><html><p>Mühle'.encode("latin-1"),
        "Mühle",
    ),
    "signed.html": ("<html><p>Mühle 水車".encode("utf-8-sig"), "Mühle 水車"),
    "marked.html": ("<html><p>Mühle 水車".encode("utf-16"), "Mühle 水車"),
    "wide.html": (b"<meta charset=shift_jis><p>\x87\x40", "①"),
    "unmarked.html": ("<html><p>Tide gate".encode("utf-16-be"), "Tide gate"),
    "mühle.txt": (
        "Die Mühle".encode("latin-1"),
        "Die Mühle",
        "it says no encoding and was read as cp1252",
    ),
    "marked.txt": ("Die Mühle".encode("utf-16"), "Die Mühle"),
    "wide.txt": ("Die Mühle".encode("utf-32"), "Die Mühle"),
    "wide_be.txt": (b"\0\0\xfe\xff" + "Die Mühle".encode("utf-32-be"), "Die Mühle"),
    "mark.md": ("\ufeff# Terms".encode(), "# Terms"),
    "form.pdf": (made.FORM, "Name of the keeper: Ada Brook [x]"),
    "noted.pdf": (made.NOTED, "Name of the keeper:\n\nNote: Ask the mason."),
    "sizes.pdf": (
        made.pdf([], made.SIZES),
        "The Weir\n\nIt holds 10^6 litres in the harbour.\nFee | 4 crowns",
    ),
    "no_password.pdf": (
        made.encrypted(made.pdf([["At the river."]]), "", "AES-256-R5"),
        "At the river.",
    ),
    "part.pdf": (
        made.pdf([], [b"0 0 9 9 re f", b"BT /F1 9 Tf 9 9 Td (Two.) Tj ET", b"0 0 9 9 re f"]),
        "Two.",
        "3 pages; pages 1, 3 are without text",
    ),
    "clauses.docx": (
        made.CLAUSES,
        "I. Terms\n  I.1 Rent\n    (a) late rent\n  I.2 Repairs\n        1.01 Fees",
    ),
    "formula.docx": (made.docx_of(f"<w:p>{made.FORMULA}</w:p>"), "∑_(i=1)^n (a+b)/2√(y_0^2)"),
    "kept.docx": (made.KEPT, "Terms\n\nSigned\n3 May at 言葉(ことば)Devon\n\nIn the box"),
    "symbols.docx": (made.SYMBOLS, "20±1 or 10^4"),
    "renamed.docx": (made.RENAMED, "At the river."),
    "a.odt": (
        made.zipped({"content.xml": made.ODT}),
        "The Weir\n\nTwo gates.\n\nNorth | Delby\nNorth | Lukton",
    ),
    "noted.odt": (
        made.zipped({"content.xml": made.NOTED_ODT}),
        "Two[1] gates hold.\n\n1. One is shut.\n\nComment: Ask.",
    ),
    "gaps.ods": (
        made.zipped({"content.xml": made.GAPS}),
        "Fees\n\nCity | Fee | Year | Note\nFee: 5 | Note: late\nCity: a | b | Year: 1 | Note: x\n"
        "City: 7 | Fee: 7\nCity: Delby | Note: paid",
    ),
    "fees.csv": (b"City;Fee\nDelby;4\nLukton;", "City | Fee\nCity: Delby | Fee: 4\nCity: Lukton"),
    "tables.csv": (
        b"Name,Age\nAda,3\n,,\nBo,4\n,,\nFees,\nCity,2019,2020\nDelby,4,5\n",
        "Name | Age\nName: Ada | Age: 3\nName: Bo | Age: 4\n"
        "Fees\nCity | 2019 | 2020\nCity: Delby | 2019: 4 | 2020: 5",
    ),
    "plain.csv": (b'1,2\r3,"4\r5"\r', "1 | 2\n3 | 4 5"),
    "a.eml": (
        b"Cc: b@[1.2\n" + made.MAIL.encode(),  # an address that Python's parser fails on
        "The mühle\n\nFrom: Ada <ada@example.org>\nCc: b@[1.2\n\nThe key hangs there.",
        "the attachment map.png is not read",
    ),
    "parts.eml": (
        made.PARTS,
        "In parts\n\nOne.\n\nTwo.\n\nThree.",
        "the attachment text/calendar is not read",
    ),
    "a.mht": (made.SAVED.encode(), "① The price of the mare is 310."),
    "a.ipynb": (
        made.NOTEBOOK.encode(),
        "# The Weir\nFlow.\n\n```\nprint(6)\n```\n\n6\n\n\n<Figure>",
        "a picture of cell 2 is not read",
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_document_is_read_as_a_reader_sees_it(name: str) -> None:
    data, *expected = SEEN[name]  # text, then notes
    document = converted(data, name)
    assert [document.text.strip(), *document.notes] == expected


def test_large_lines_of_a_pdf_are_headings() -> None:
    assert converted(made.pdf([], made.SIZES), "a.pdf").places == (
        Place(0, PAGE, "1"),
        Place(0, 1, "The Weir"),
    )


MILL, STANDS = "הטחנה", "עומדת"
LEFT, RIGHT = MILL[::-1], STANDS[::-1]  # as they are seen from the left


@pytest.mark.parametrize(
    ("drawn", "text"),
    [
        ([(100, f".{RIGHT} {LEFT}")], f"{MILL} {STANDS}."),
        ([(300, LEFT), (257, RIGHT)], f"{MILL} {STANDS}"),  # word by word
        ([(300 - 7 * n, one) for n, one in enumerate(MILL)], MILL),  # letter by letter
        ([(300 - 10 * n, one) for n, one in enumerate(MILL)], MILL),  # with small gaps
        ([(100, f"90-{RIGHT} {LEFT}")], f"{MILL} {STANDS}-90"),
        ([(300 - 7 * n, one) for n, one in enumerate(f"){MILL}( {STANDS}")], f"({MILL}) {STANDS}"),
        ([(100, f"({RIGHT}) {LEFT}")], f"{MILL} ({STANDS})"),
        ([(400, LEFT), (250, "12"), (100, "DELBY")], f"{MILL} | 12 | DELBY"),
        ([(100, f"15% {RIGHT} GPU 32 {LEFT} 1,234.5")], f"1,234.5 {MILL} GPU 32 {STANDS} 15%"),
        ([(100, f"SEE {RIGHT} {LEFT} IN PART TWO")], f"SEE {MILL} {STANDS} IN PART TWO"),
    ],
)
def test_right_to_left_lines_of_a_pdf_are_in_the_order_of_reading(
    drawn: list[tuple[int, str]], text: str
) -> None:
    document = converted(made.hebrew_pdf(drawn, [(100, f"{RIGHT} {LEFT}")]), "a.pdf")
    assert document.text == f"{text}\n{MILL} {STANDS}\n"


def test_rows_of_a_workbook_have_the_names_of_their_columns() -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Fees"
    for row in (["Region", "City", "Share"], ["North", "Delby", 0.15], [None, "Lukton", 0.5]):
        sheet.append(row)
    sheet.merge_cells("A2:A3")
    sheet["C2"].number_format = sheet["C3"].number_format = "0%"
    sheet["B6"], sheet["C6"], sheet["B7"], sheet["C7"] = "Town", "Toll", "Sedge", 4  # a table below
    sheet["D9"] = "=C2"
    document = converted(made.saved(book), "a.xlsx")
    assert document.text == (
        "Fees\n\nRegion | City | Share\nRegion: North | City: Delby | Share: 15%\n"
        "Region: North | City: Lukton | Share: 50%\nTown | Toll\nTown: Sedge | Toll: 4\n"
    )
    assert document.places == (Place(0, 1, "Fees"),)
    assert document.notes == ("formulas without a stored value are not read (1)",)


def test_values_of_a_workbook_are_shown_in_their_number_formats() -> None:
    openpyxl = pytest.importorskip("openpyxl")
    shown = [
        (100, "[$€-407] #,##0.00", "€ 100.00"),
        (1234.5, '#,##0.00 "kr"', "1,234.50 kr"),
        (100, '_-* #,##0.00\\ "€"_-;-* @', "100.00 €"),
        (-3.5, "[$$-409]0.00;[Red]0", "-$3.50"),
        (1234567, '0.0,,"M"', "1.2M"),
        (5, "00000", "00005"),
        (7, '0"%"', "7%"),
        (1.5, "0.##", "1.5"),
        (1.5, "@", "1.5"),
        (0.5, "# ?/?", "0.5"),
        (5, '[>999]0,"k";0', "5"),
        (1234567, "0.00E+00", "1.23E+06"),
        (timedelta(hours=27, minutes=3), "[h]:mm:ss", "27:03:00"),
    ]
    book = openpyxl.Workbook()
    for row, (value, form, _) in enumerate(shown, 1):
        cell = book.active.cell(row, 1, value)
        cell.number_format = form
    assert converted(made.saved(book), "a.xlsx").text.split("\n")[2:-1] == [
        one for *_, one in shown
    ]


def test_slides_are_pages_with_tables_and_notes() -> None:
    presentation = pytest.importorskip("pptx").Presentation()
    for title in ("Plan", "Fees"):
        slide = presentation.slides.add_slide(presentation.slide_layouts[5])
        slide.shapes.title.text = title
    table = slide.shapes.add_table(2, 2, 0, 0, 99, 99).table
    table.cell(0, 0).merge(table.cell(1, 0))
    table.cell(0, 0).text, table.cell(0, 1).text, table.cell(1, 1).text = "North", "Delby", "Lukton"
    slide.notes_slide.notes_text_frame.text = "Ask for the map."
    document = converted(made.saved(presentation), "a.pptx")
    assert document.text.strip() == (
        "Plan\n\nFees\n\nNorth | Delby\nNorth | Lukton\n\nAsk for the map."
    )
    places = Places(document.places)
    assert [places.at(at, at + 1) for at in (0, 7)] == ["page 1, Plan", "page 2, Fees"]


def test_a_heading_whose_end_is_hidden_is_a_heading() -> None:
    assert converted(made.KEPT, "a.docx").places == (Place(0, 2, "Terms"),)


def test_raised_text_and_formulas_of_slides_are_read() -> None:
    pptx = pytest.importorskip("pptx")
    presentation = pptx.Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text, body = "Flow", slide.placeholders[1]
    for text, baseline in (("It holds 10", 0), ("6", 30_000), (" litres.", 0)):
        run = body.text_frame.paragraphs[0].add_run()
        run.text, _ = text, run.font._element.set("baseline", str(baseline))
    body.text_frame.add_paragraph()._p.append(pptx.oxml.parse_xml(made.FORMULA))
    with_fallback = "<mc:Choice Requires='a14'/><mc:Fallback/></mc:AlternateContent>"
    either = pptx.oxml.parse_xml(f"<mc:AlternateContent xmlns:mc='{made.MC}'>{with_fallback}")
    body._element.getparent().replace(body._element, either)
    either[0].append(body._element)
    slide.notes_slide.notes_text_frame.text = "One.\nTwo."
    document = converted(made.saved(presentation), "a.pptx")
    assert document.text == (
        "Flow\n\nIt holds 10^6 litres.\n\n∑_(i=1)^n (a+b)/2√(y_0^2)\n\nOne.\n\nTwo.\n"
    )


def test_every_exponent_of_a_long_text_is_read() -> None:
    text = clean("10⁶ m² " * 1_000)
    assert text == "10^6 m^2 " * 1_000
