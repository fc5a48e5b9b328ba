"""Hostile documents: a file that cannot be read is refused by name in one line, within limits of
memory and time, and nothing outside it is read.
"""

import io
import os
import subprocess
import sys
import time
import zipfile
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.disk.format.document import pack_places
from memstore.documents import read
from memstore.documents.converted import LIMITS, Limits
from memstore.errors import UnreadableDocument
from support import made_documents as made
from support.crafted import damaged
from support.made_documents import Section, converted
from support.processes import TELLS_CHILDREN, children_of, processor_seconds, runs

pytest.importorskip("lxml")
pytest.importorskip("pypdfium2")
pytest.importorskip("pypdf")  # which encrypts

SECTIONS = [Section(1, "The Mill", ["The mill stands at the river."])]
SMALL = replace(LIMITS, member_bytes=1 << 20, all_bytes=2 << 20, characters=1 << 20)
GOOD = {
    "a.pdf": made.pdf([["The mill stands at the river."], ["And the ferry crosses it."]]),
    "a.docx": made.docx(SECTIONS),
    "a.epub": made.epub(SECTIONS),
    "a.html": made.html(SECTIONS),
    "a.md": made.markdown(SECTIONS),
    "a.odt": made.zipped({"content.xml": "<o><body><text><p>words</p></text></body></o>"}),
    "a.eml": b"MIME-Version: 1.0\nSubject: The mill\nContent-Type: text/html\n\n<p>At the river.",
    "a.csv": b"City,Fee\nDelby,4\n",
}
BOMB = (
    "<!DOCTYPE x [<!ENTITY a 'aaaaaaaaaa'>"
    + "".join(f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefgh", "bcdefghi"))
    + "]>"
)
OUTSIDE = "<!DOCTYPE x [<!ENTITY i SYSTEM 'file:///etc/passwd'>]>"


def refused(data: bytes, name: str, *words: str, limits: Limits = LIMITS) -> None:
    """Reading it is refused, in one line that holds these words."""
    with pytest.raises(UnreadableDocument) as said:
        converted(data, name, limits)
    assert "\n" not in str(said.value) and all(word in str(said.value) for word in words), said


# What grows when it is read


@pytest.mark.parametrize("limits", [SMALL, replace(SMALL, all_bytes=1 << 16)])
def test_archive_bomb_is_not_unpacked(limits: Limits) -> None:
    much = b" " * (3 << 20)
    for data, name in (
        (made.docx_of("", **{"word/document.xml": much}), "a.docx"),
        (made.docx_of("", **{"word/styles.xml": much}), "a.docx"),
        (made.epub_of([much]), "a.epub"),
        (made.epub(SECTIONS, **{"OEBPS/book.opf": much}), "a.epub"),
    ):
        assert len(data) < 20_000
        refused(data, name, "too large unpacked", limits=limits)


@pytest.mark.parametrize("declared", [BOMB, OUTSIDE])
def test_xml_entities_are_refused(declared: str) -> None:
    document = f'{declared}<w:document xmlns:w="{made.W}"><w:t>&i;</w:t></w:document>'
    for encoding in ("utf-8", "utf-16"):
        data = made.docx_of("", **{"word/document.xml": document.encode(encoding)})
        refused(data, "a.docx", "entities")
    for name, member in (("a.xlsx", "xl/workbook.xml"), ("a.odt", "content.xml")):
        refused(made.zipped({member: f"{declared}<a>&i;</a>"}), name, "entities")
    for name in ("OEBPS/text/c 0.xhtml", "OEBPS/book.opf", "META-INF/container.xml"):
        broken = made.epub(SECTIONS, **{name: f"{declared}<html><p a='&i;'>&i;</p></html>"})
        refused(broken, "a.epub", "entities")


def test_external_references_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("never to be seen")
    url = secret.as_uri()
    page = (
        f'<!DOCTYPE html [<!ENTITY i SYSTEM "{url}">]><html><body>&i;<p>words</p>'
        f'<iframe src="{url}"></iframe><object data="{url}"></object><link href="{url}"></html>'
    )
    assert "never" not in converted(page.encode(), "a.html").text
    chapter = f'<!DOCTYPE html SYSTEM "{url}"><html><body><p>words</p></body></html>'
    include = f'<xi:include xmlns:xi="http://www.w3.org/2001/XInclude" href="{url}" parse="text"/>'
    chapters = [chapter, chapter.replace("words", include), f"<html><p>{include}</p></html>"]
    assert "never" not in converted(made.epub_of(chapters), "a.epub").text
    spine = {
        "OEBPS/book.opf": f'<package><manifest><item id="a" href="{url}" '
        'media-type="application/xhtml+xml"/><item id="b" href="../../../../../../etc/passwd" '
        'media-type="text/html"/></manifest><spine><itemref idref="a"/><itemref idref="b"/>'
        "</spine></package>"
    }
    refused(made.epub(SECTIONS, **spine), "a.epub", "missing")
    linked = (
        "<w:p><w:hyperlink r:id='r1' xmlns:r='x'><w:r><w:t>words</w:t></w:r></w:hyperlink></w:p>"
    )
    target = f"<R><Relationship Id='r1' TargetMode='External' Target='{url}'/></R>"
    data = made.docx_of(linked, **{"word/_rels/document.xml.rels": target, "../outside.xml": "no"})
    assert converted(data, "a.docx").text == "words\n"


def test_too_long_texts_are_refused() -> None:
    limits = replace(LIMITS, characters=1000)
    long = [Section(1, "The Mill", ["x " * 600])]
    for name, data in (
        ("a.html", made.html(long)),
        ("a.docx", made.docx(long)),
        ("a.epub", made.epub(long)),
        ("a.md", made.markdown(long)),
        ("a.pdf", made.pdf([["x" * 600], ["y" * 600]])),
    ):
        refused(data, name, "1,000 characters", limits=limits)
    refused(made.pdf([["x"]] * 5), "a.pdf", "4 pages", limits=replace(LIMITS, pages=4))
    with pytest.raises(UnreadableDocument, match="larger than 1 MB"):
        read(b"<html>" + b"x" * (1 << 20), "a.html", replace(LIMITS, file_bytes=1 << 20))


def test_deep_and_wide_documents_are_read_or_refused() -> None:
    table = "<table>" + "<tr><td rowspan=65000 colspan=65000>a" * 2000
    for page in ("<div>" * 100_000 + "x", "<sup>" * 9000 + "1", table, "<li>" * 9000):
        with suppress(UnreadableDocument):
            assert len(converted(page.encode(), "a.html").text) < 10_000_000
    for body in ("<w:p>" * 3000 + "</w:p>" * 3000, "<w:tbl><w:tr><w:tc>" * 900):
        with suppress(UnreadableDocument):
            converted(made.docx_of(body), "a.docx")
    cell = "<table-cell number-columns-repeated='99'><p>a</p></table-cell>"
    rows = f"<table-row number-rows-repeated='99'>{cell}</table-row>" * 99
    sheets = f"<o><body><spreadsheet><table name='a'>{rows}</table></spreadsheet></body></o>"
    with suppress(UnreadableDocument):
        read(made.zipped({"content.xml": sheets}), "a.ods")


@pytest.mark.parametrize("rows", [1, 20, 2000])
def test_a_cell_with_a_huge_span_is_read_once(rows: int) -> None:
    row = "<tr>" + "<td rowspan=65000 colspan=65000>a" * (2000 // rows)
    text = converted(f"<table>{row * rows}</table>".encode(), "a.html").text
    assert text.count("a") >= 2000 and len(text) < 500_000


def test_a_far_cell_costs_no_more_than_a_near_one() -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active["XFD1048576"] = "far"
    assert converted(made.saved(book), "a.xlsx").text.strip().endswith("far")


# What does not end, or takes all memory: a child is ended


# minutes of the processor
SLOW = made.pdf([], [b"BT /F1 1 Tf 1 TL " + b"(word) Tj T* " * 400_000 + b"ET"], times=18)


def test_slow_document_is_refused() -> None:
    with pytest.raises(UnreadableDocument, match=r"^slow\.pdf needs too much memory or time"):
        read(SLOW, "slow.pdf", replace(LIMITS, seconds=1))


def test_document_beyond_the_memory_limit_is_refused() -> None:
    bomb = zlib.compress(b"(word) Tj " * 5_000_000, 1)
    data = made.pdf_of(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>",
            made.stream_of(bomb, b"/Filter /FlateDecode"),
        ]
    )
    with pytest.raises(UnreadableDocument, match=r"^large\.pdf "):
        read(data, "large.pdf", replace(LIMITS, memory=200 << 20, seconds=5))


def test_child_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    for module in ("lxml", "pypdfium2", "markdown_it", "msgspec", "json", "cryptography", "brotli"):
        trap = f"open({str(tmp_path / 'ran')!r}, 'a').write({module!r})\n"
        (tmp_path / f"{module}.py").write_text(trap + "raise SystemExit(1)\n")
    code = (
        "import os, sys; sys.path[:0] = os.environ['FOUND'].split(os.pathsep)\n"
        "from memstore.documents import read\n"
        "os.chdir(sys.argv[1]); sys.path.append(sys.argv[1])\n"
        "print(read(open('a.pdf', 'rb').read(), 'a.pdf').text)"
    )
    (tmp_path / "a.pdf").write_bytes(GOOD["a.pdf"])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"FOUND": os.pathsep.join(map(str, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "ferry" in done.stdout, done.stderr
    assert not (tmp_path / "ran").exists()


def test_child_ends_with_its_killed_parent(tmp_path: Path) -> None:
    if not TELLS_CHILDREN:
        pytest.skip("the system does not tell the children of a process")
    slow = tmp_path / "slow.pdf"
    slow.write_bytes(SLOW)
    code = (
        "from memstore.documents import read; import sys; read(open(sys.argv[1], 'rb').read(), 'a')"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(slow)]) as parent:
        while not (children := children_of(parent.pid)):
            assert parent.poll() is None
            time.sleep(0.02)
        (child,) = children
        while not processor_seconds(child) > 1:  # it reads
            assert parent.poll() is None
            time.sleep(0.02)
        parent.kill()
    until = time.monotonic() + 30
    while runs(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not runs(child)


# Anything


UNREADABLE = {
    "a.png": (b"\x89PNG\r\n\x1a\n", "is a picture; run text recognition"),
    "a.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504), "old Office"),
    "scan.pdf": (made.pdf([[], []]), "its 2 pages are pictures"),
    "page.pdf": (made.pdf([[]]), "its only page is a picture"),
    "locked.pdf": (made.encrypted(GOOD["a.pdf"], "secret"), "encrypted"),
    "noise.txt": (bytes(range(1, 32)) * 9, "binary"),
    "a.xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504), "save it as DOCX or XLSX"),
    "a.pptx": (b"no presentation", "is not a PPTX file"),
    "a.ipynb": (b"{}", "not a notebook"),
    "a.zip": (made.zipped({"a.txt": "x"}), "unpack"),
    "a.docx": (made.zipped({"word/documentation.txt": "x"}), "no main document"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_document_is_refused_with_its_reason(name: str) -> None:
    data, reason = UNREADABLE[name]
    refused(data, name, reason)


@pytest.mark.parametrize("name", GOOD)
@settings(max_examples=int(os.environ.get("MEMSTORE_HOSTILE", "1000")) // 40)
@given(draw=st.data())
def test_a_damaged_document_is_converted_or_refused(name: str, draw: st.DataObject) -> None:
    data = GOOD[name]
    if zipfile.is_zipfile(io.BytesIO(data)) and draw.draw(st.booleans()):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {member: archive.read(member) for member in archive.namelist()}
        member = draw.draw(st.sampled_from(sorted(members)))  # under a right checksum
        data = made.zipped({**members, member: draw.draw(damaged(members[member]))})
    else:
        data = draw.draw(damaged(data))
    try:
        document = converted(data, name, replace(SMALL, pages=50))
    except UnreadableDocument as error:
        assert "\n" not in str(error)
        return
    document.text.encode()
    starts = [place.start for place in document.places]
    assert starts == sorted(starts) and all(0 <= at < len(document.text) for at in starts)
    pack_places(document.places)
