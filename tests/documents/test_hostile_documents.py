"""A document may be anything: what cannot be read is refused by name in one line, within bounds of
memory and time, and nothing is read but what it holds itself.
"""

import io
import os
import random
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from memstore.disk.format.citations import Place, pack_places
from memstore.documents import Converted, read
from memstore.documents.conversion import convert
from memstore.documents.converted import LIMITS, Limits
from memstore.documents.detect import form_of
from memstore.errors import InvalidInput, UnreadableDocument
from memstore.store.memory_store import MemoryStore
from support import made_documents as made
from support.made_documents import Section
from support.processes import TELLS_CHILDREN, children_of, processor_seconds, runs
from support.synthetic_documents import SIGNATURE, ingest

pytest.importorskip("lxml")
pytest.importorskip("pypdf")

SECTIONS = [Section(1, "The Mill", ["The mill stands at the river."])]
SMALL = replace(LIMITS, member_bytes=1 << 20, all_bytes=2 << 20, characters=1 << 20)
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504)
GOOD = {
    "a.pdf": made.pdf([["The mill stands at the river."], ["And the ferry crosses it."]]),
    "a.docx": made.docx(SECTIONS),
    "a.epub": made.epub(SECTIONS),
    "a.html": made.html(SECTIONS),
    "a.md": made.markdown(SECTIONS),
}
BOMB = (
    "<!DOCTYPE x [<!ENTITY a 'aaaaaaaaaa'>"
    + "".join(f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefgh", "bcdefghi"))
    + "]>"
)
OUTSIDE = "<!DOCTYPE x [<!ENTITY i SYSTEM 'file:///etc/passwd'>]>"


def here(data: bytes, name: str, limits: Limits = LIMITS) -> Converted:
    """A document as it is read, in this process."""
    return convert(data, form_of(data, name), limits)


def refused(data: bytes, name: str, *words: str, limits: Limits = LIMITS) -> None:
    """It is, in one line that says these words."""
    with pytest.raises(UnreadableDocument) as said:
        here(data, name, limits)
    assert "\n" not in str(said.value) and all(word in str(said.value) for word in words), said


def encryption(algorithm: str) -> dict[str, str | bytes]:
    body = f'<EncryptedData><EncryptionMethod Algorithm="{algorithm}"/></EncryptedData>'
    return {"META-INF/encryption.xml": f"<encryption>{body}</encryption>"}


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [
        ("a.doc", OLE, "old Office"),
        ("a.docx", OLE + "EncryptedPackage".encode("utf-16-le"), "encrypted Office"),
        ("a.png", b"\x89PNG\r\n\x1a\n", "picture (PNG)"),
        ("a.txt", b"\xff\xd8\xff\xe0", "picture (JPEG)"),
        ("a", b"RIFF1234WEBP", "picture (WebP)"),
        ("a", b"\0\0\0\x18ftypheic", "picture (heic)"),
        ("a", b"\0\0\0\x18ftypmp42", "film"),
        ("a.rtf", b"{\\rtf1 x}", "RTF"),
        ("a.gz", b"\x1f\x8b\x08", "unpack"),
        ("a.mobi", bytes(60) + b"BOOKMOBI", "Kindle"),
        ("a.txt", "Mühle".encode("utf-16"), "UTF-16"),
        ("a.pdf", b"no such thing", "no PDF"),
        ("a.docx", b"no such thing", "no DOCX"),
        ("a.xlsx", made.zipped({"xl/workbook.xml": "x"}), "spreadsheet"),
        ("a.pptx", made.zipped({"ppt/presentation.xml": "x"}), "presentation"),
        ("a.odt", made.zipped({"content.xml": "x"}), "OpenDocument"),
        ("a.zip", made.zipped({"a.txt": "x"}), "unpack"),
        ("a.zip", made.zipped({}), "empty zip"),
        ("a.docx", GOOD["a.docx"][:-30], "broken"),
        ("a.docx", made.docx_of(""), "no text"),
        ("a.docx", made.docx_of("<w:p>"), "no XML"),
        ("a.epub", made.epub_of(["<html><body><img src='x'/></body></html>"]), "pictures"),
        ("a.epub", made.zipped({"META-INF/container.xml": "<container/>"}), "names no book"),
        ("a.epub", made.zipped({"META-INF/container.xml": made.CONTAINER}), "no OEBPS/book.opf"),
        ("a.epub", made.epub(SECTIONS, **encryption("http://ns.adobe.com/adept")), "DRM"),
        ("a.html", b"<html><body><script>x</script></body></html>", "no text"),
        ("a.html", "<html><p>Mühle".encode("latin-1"), "not utf-8"),
        ("a.html", "<html><meta charset=euc-jp><p>Mühle".encode("latin-1"), "not euc-jp"),
        ("a.html", b"<html><meta charset=utf-7><p>+AD4-", "encoding utf-7"),
        ("a.html", b"<html><meta charset=zlib><p>x", "encoding zlib"),
        ("a.md", "# Mühle".encode("latin-1"), "UTF-8"),
        ("a.md", b"# a\0b", "binary"),
        ("a.md", b" \n", "empty"),
        ("a.pdf", made.pdf([[], []]), "its 2 pages are pictures"),
        ("a.pdf", made.pdf([]), "no pages"),
        ("a.pdf", b"%PDF-1.7\n" + bytes(100), "broken"),
        ("a.pdf", made.encrypted(GOOD["a.pdf"], "secret"), "encrypted"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(name: str, data: bytes, word: str) -> None:
    refused(data, name, word)


def test_an_error_names_the_file_however_it_is_called() -> None:
    with pytest.raises(UnreadableDocument, match=r"^e\x1b\[31m\.png is a picture"):
        read(b"\x89PNG\r\n\x1a\n", "e\x1b[31m.png")


def test_what_asks_for_no_password_is_read() -> None:
    assert here(made.encrypted(GOOD["a.pdf"], ""), "a.pdf").text == here(GOOD["a.pdf"], "a").text


# What grows when it is read


@pytest.mark.parametrize("limits", [SMALL, replace(SMALL, all_bytes=1 << 16)])
def test_a_small_archive_of_much_is_not_unpacked(limits: Limits) -> None:
    much = b" " * (3 << 20)
    for data, name in (
        (made.docx_of("", **{"word/document.xml": much}), "a.docx"),
        (made.docx_of("", **{"word/styles.xml": much}), "a.docx"),
        (made.epub_of([much]), "a.epub"),
        (made.epub(SECTIONS, **{"OEBPS/book.opf": much}), "a.epub"),
    ):
        assert len(data) < 20_000
        refused(data, name, "not compressed any more", limits=limits)


def test_what_an_archive_says_of_sizes_is_not_believed() -> None:
    data = bytearray(made.docx_of("", **{"word/document.xml": b" " * (3 << 20)}))
    for magic, at in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        start = -1
        while (start := data.find(magic, start + 1)) >= 0:
            data[start + at : start + at + 4] = struct.pack("<I", 100)
    refused(bytes(data), "a.docx", "broken", limits=SMALL)


def test_members_that_are_one_and_the_same_are_counted_each_time() -> None:
    chapter = b"<html><body><p>x</p><!--" + b"x " * 200_000 + b"--></body></html>"
    refused(made.epub_of([chapter] * 8), "a.epub", "2 MB in all", limits=SMALL)


def test_archives_of_too_many_members_are_refused() -> None:
    data = made.docx_of("", **{f"m{n}": "" for n in range(50)})
    refused(data, "a.docx", "more than 50 members", limits=replace(LIMITS, members=50))


@pytest.mark.parametrize("declared", [BOMB, OUTSIDE])
def test_xml_that_declares_entities_is_refused(declared: str) -> None:
    document = f'{declared}<w:document xmlns:w="{made.W}"><w:t>&i;</w:t></w:document>'
    for encoding in ("utf-8", "utf-16"):
        data = made.docx_of("", **{"word/document.xml": document.encode(encoding)})
        refused(data, "a.docx", "entities")
    for name in ("OEBPS/text/c 0.xhtml", "OEBPS/book.opf", "META-INF/container.xml"):
        broken = made.epub(SECTIONS, **{name: f"{declared}<html><p a='&i;'>&i;</p></html>"})
        refused(broken, "a.epub", "entities")


def test_nothing_outside_of_a_document_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("never to be seen")
    url = secret.as_uri()
    page = (
        f'<!DOCTYPE html [<!ENTITY i SYSTEM "{url}">]><html><body>&i;<p>words</p>'
        f'<iframe src="{url}"></iframe><object data="{url}"></object><link href="{url}"></html>'
    )
    assert "never" not in here(page.encode(), "a.html").text
    chapter = f'<!DOCTYPE html SYSTEM "{url}"><html><body><p>words</p></body></html>'
    include = f'<xi:include xmlns:xi="http://www.w3.org/2001/XInclude" href="{url}" parse="text"/>'
    chapters = [chapter, chapter.replace("words", include), f"<html><p>{include}</p></html>"]
    assert "never" not in here(made.epub_of(chapters), "a.epub").text
    spine = {
        "OEBPS/book.opf": f'<package><manifest><item id="a" href="{url}" '
        'media-type="application/xhtml+xml"/><item id="b" href="../../../../../../etc/passwd" '
        'media-type="text/html"/></manifest><spine><itemref idref="a"/><itemref idref="b"/>'
        "</spine></package>"
    }
    refused(made.epub(SECTIONS, **spine), "a.epub", "missing")


@pytest.mark.parametrize("depth", [9_000, 200_000])
def test_nesting_costs_nothing_up_to_its_bound(depth: int) -> None:
    data = b"<html>" + b"<div>" * depth + b"words"
    if depth < LIMITS.depth:
        assert here(data, "a.html").text == "words\n"
    else:
        refused(data, "a.html", "nested deeper")
    lists = b"<html>" + b"<ul><li>" * (depth // 2) + b"words"
    if depth < LIMITS.depth:
        assert here(lists, "a.html").text.strip().endswith("- words")
    nested = f"{'<w:tbl><w:tr><w:tc>' * (depth // 3)}"
    refused(made.docx_of(nested), "a.docx")


def test_texts_that_are_too_long_are_refused() -> None:
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


WORDS = b"BT /F1 12 Tf (The mill stands at the river.) Tj ET "


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.epub", made.epub_of(["<p>x</p>"], order=[0] * 10_001), "10,000 chapters"),
        ("a.docx", made.docx_of("<w:p/>" * 300_000), "elements, too many for a file of its size"),
        ("a.docx", made.docx_of("", **{"x" * 1001: ""}), "names longer than 1,000"),
        ("a.pdf", made.pdf_of_one_page(15_000, WORDS), "pages, too many for a file of its size"),
    ],
    ids=["chapters", "elements", "names", "pages"],
)
def test_little_that_makes_much_work_is_refused(name: str, data: bytes, words: str) -> None:
    refused(data, name, words)


def test_what_draws_pages_is_counted_each_time_that_it_is_drawn() -> None:
    few = replace(LIMITS, drawn_bytes=1 << 16)
    laughs = [b"/X%d Do " % (n + 1) * 10 for n in range(6)]
    for data in (
        made.pdf_of_one_page(100, WORDS * 20),
        made.pdf_of_one_page(1, b"/X0 Do ", [*laughs, WORDS]),
        made.pdf_of_one_page(1, WORDS, fonts=1000),
    ):
        refused(data, "a.pdf", "draws more than", limits=few)
    assert here(made.pdf_of_one_page(9, b"/X0 Do ", [WORDS]), "a.pdf", few).text.count("mill") == 9


def test_a_chapter_that_is_named_again_is_read_once() -> None:
    data = made.epub_of(["<p>one</p>", "<p>two</p>"], order=[1, 0, 1, 1, 0])
    assert here(data, "a.epub").text == "two\n\none\n"


def test_what_files_are_packed_by_that_are_no_documents_is_refused() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("word/document.xml", "x" * 1000)
    refused(out.getvalue(), "a.docx", "compressed in a way")


@pytest.mark.parametrize(
    ("name", "data", "places"),
    [
        ("a.docx", made.docx_of_a_chain(50_000), 1),
        ("a.epub", made.epub_of(["<p>x</p>" + "<!DOCTYPE " * 60_000]), 0),
        ("a.md", b"# The Mill\n\n# " + b"![[](" * 200_000, 2),
    ],
    ids=["styles", "doctypes", "brackets"],
)
def test_what_is_looked_for_is_not_looked_for_again_from_every_place(
    name: str, data: bytes, places: int
) -> None:
    read_ = read(data, name, replace(LIMITS, seconds=5))  # of the processor; it was a minute
    assert len(read_.places) == places


def test_large_books_of_pages_and_chapters_are_read() -> None:
    pages = made.pdf([["The mill stands at the river.", "It turns."]] * 2000)
    assert len(here(pages, "a.pdf").places) == 2000
    chapters = [Section(1, f"Chapter {n}", ["The mill stands at the river."]) for n in range(500)]
    assert len(here(made.epub(chapters), "a.epub").places) == 500


def test_what_a_file_is_is_seen_at_once() -> None:
    comments = b"<!---->" * 580  # of which any number may be taken for one
    assert form_of(comments + b"<p>", "a") == "text"
    assert form_of(comments + b"<html>", "a") == "html"


# What does not end, or takes all memory: a child is ended


def test_a_document_that_takes_too_long_is_refused() -> None:
    drawing = b"BT /F1 12 Tf " + b"(word) Tj T* " * 400_000 + b"ET"
    data = made.pdf([], [drawing])
    with pytest.raises(UnreadableDocument, match=r"^slow\.pdf needs too much memory or time"):
        read(data, "slow.pdf", replace(LIMITS, seconds=1))


def test_a_document_that_takes_too_much_memory_is_refused() -> None:
    bomb = zlib.compress(b"(word) Tj " * 5_000_000, 1)
    stream = b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(bomb), bomb)
    data = made.pdf_of(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>",
            stream,
        ]
    )
    with pytest.raises(UnreadableDocument, match=r"^large\.pdf "):
        read(data, "large.pdf", replace(LIMITS, memory=200 << 20, seconds=5))


def test_pages_that_are_their_own_parents_end() -> None:
    for kids in (b"2 0 R", b"3 0 R 3 0 R 2 0 R", b"99 0 R"):
        data = made.pdf_of(
            [
                b"<< /Type /Catalog /Pages 2 0 R >>",
                b"<< /Type /Pages /Kids [%s] /Count 3 >>" % kids,
                b"<< /Type /Pages /Kids [2 0 R] /Count 1 /Parent 2 0 R >>",
            ]
        )
        refused(data, "a.pdf")


def test_a_child_runs_nothing_of_the_working_directory(tmp_path: Path) -> None:
    for module in ("lxml", "pypdf", "markdown_it", "msgspec", "json", "cryptography", "brotli"):
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


def test_a_child_that_cannot_start_is_not_called_a_broken_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memstore.errors import MemstoreError

    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(MemstoreError, match="did not start") as said:
        read(GOOD["a.html"], "a.html")
    assert not isinstance(said.value, UnreadableDocument)


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    if not TELLS_CHILDREN:
        pytest.skip("the system does not tell the children of a process")
    slow = tmp_path / "slow.pdf"  # minutes of the processor
    slow.write_bytes(made.pdf_of_one_page(18, b"BT /F1 12 Tf " + b"(word) Tj T* " * 400_000))
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


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """A file of which bytes are lost, changed or twice there."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, many = rng.randrange(len(out)), rng.randint(1, 40)
        out[at : at + many] = rng.choice(
            (b"", bytes(rng.randbytes(many)), out[at : at + many] * 2, b"<" * many, b"\xff" * many)
        )
        out = out or bytearray(b" ")
    return bytes(out[: rng.choice((len(out), rng.randrange(len(out)) + 1))])


@pytest.mark.parametrize("name", GOOD)
def test_a_spoiled_document_is_a_text_or_refused(name: str) -> None:
    rng = random.Random(f"{name} {os.environ.get('MEMSTORE_SEED', '')}")
    read_, times = 0, int(os.environ.get("MEMSTORE_HOSTILE", "2000")) // 40
    for _ in range(times):
        data = spoiled(GOOD[name], rng)
        try:
            document = here(data, name, replace(SMALL, pages=50))
        except UnreadableDocument as error:
            assert "\n" not in str(error)
            continue
        read_ += 1
        document.text.encode()
        starts = [place.start for place in document.places]
        assert starts == sorted(starts) and all(0 <= at < len(document.text) for at in starts)
        pack_places(document.places)
    assert read_ > 0 or name in ("a.docx", "a.epub")  # whose members are under checksums


@pytest.mark.parametrize("name", ["a.docx", "a.epub"])
def test_spoiled_members_are_text_or_refused(name: str) -> None:
    rng = random.Random(name)
    with zipfile.ZipFile(io.BytesIO(GOOD[name])) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    for _ in range(int(os.environ.get("MEMSTORE_HOSTILE", "2000")) // 40):
        member = rng.choice(sorted(members))
        data = made.zipped({**members, member: spoiled(members[member], rng)})
        try:
            here(data, name, SMALL).text.encode()
        except UnreadableDocument as error:
            assert "\n" not in str(error)


# What a row says of places


@pytest.mark.parametrize(
    "places",
    [1, ["0 1 x"], "0 1 x", "x 1 a\n", "0 11 a\n", "-1 1 a\n", "0 1 a\x00\n", "9" * 16 + " 1 a\n",
     "0 1 " + "x" * 121 + "\n"],
)  # fmt: skip
def test_places_of_another_form_are_none_and_break_nothing(tmp_path: Path, places: object) -> None:
    with MemoryStore.create(tmp_path / "m", SIGNATURE, host_budget=1 << 20) as store:
        ingest(store, "a", text=1, tokens=40)
        store.describe("a", {"places": places, "later": {"b": [1]}})
        store.export_document("a", tmp_path / "a.memstore")
        assert store.import_document(tmp_path / "a.memstore", "b").metadata["places"] == places
        with pytest.raises(InvalidInput, match="metadata"):
            store.describe("a", {"places": b"bytes"})
    with MemoryStore.open(tmp_path / "m", host_budget=1 << 20) as store:
        assert [document.places.at(0, 5) for document in store.ready()] == [None, None]
        assert store.describe("a", pack_places([Place(0, 0, "1")])).places.at(0, 5) == "page 1"
