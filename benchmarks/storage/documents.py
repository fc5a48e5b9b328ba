"""What does it cost to turn a document into text, before a model reads it?

The same paragraphs (the topics of Python's own help) as HTML, Markdown, DOCX, EPUB and PDF, once
all of them and once a single line, which is what starting a process costs. Processor time of the
process that reads, so that others on the machine do not count; median of the repeats.

    python -m benchmarks.storage.documents
"""

import argparse
import io
import resource
import statistics
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from html import escape
from pydoc_data.topics import topics
from typing import Any

from benchmarks.common.options import add, plain_parser
from benchmarks.common.results import write_part
from benchmarks.common.tables import table
from memstore.documents import read

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
LINES = 50  # of a page
Paragraphs = Sequence[str]


def main() -> None:
    options = plain_parser(__doc__)
    add(options, "--repeats", 3)
    add(options, "--copies", 4, "how often the topics follow each other")
    chosen = options.parse_args()
    rows = [measure(name, make, chosen) for name, make in MAKERS.items()]
    columns = {
        "kind": lambda row: row["kind"],
        "file, MB": lambda row: f"{row['bytes'] / 1e6:.1f}",
        "text, MB": lambda row: f"{row['characters'] / 1e6:.1f}",
        "places": lambda row: f"{row['places']:,}",
        "one line, s": lambda row: f"{row['least']:.2f}",
        "all of it, s": lambda row: f"{row['seconds']:.2f}",
    }
    print(table(list(columns), [[show(row) for show in columns.values()] for row in rows]))
    write_part(chosen, "documents", rows)


def measure(kind: str, make: Callable[[Paragraphs], bytes], options: Any) -> dict[str, Any]:
    """One row."""
    whole = [
        paragraph
        for text in list(topics.values()) * options.copies
        for paragraph in text.split("\n\n")
        if paragraph.isascii() and paragraph.strip()
    ]
    data, line = make(whole), make(["One line."])
    converted = read(data, f"a.{kind}")
    return {
        "kind": kind,
        "bytes": len(data),
        "characters": len(converted.text),
        "places": len(converted.places),
        "least": seconds(line, kind, options),
        "seconds": seconds(data, kind, options),
    }


def seconds(data: bytes, kind: str, options: argparse.Namespace) -> float:
    """Processor time of reading a document, the process that does it included."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        read(data, f"a.{kind}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    return statistics.median(once() for _ in range(options.repeats))


def html(paragraphs: Paragraphs) -> bytes:
    return f"<html><body><h1>Topics</h1>{_body(paragraphs)}</body></html>".encode()


def _body(paragraphs: Paragraphs) -> str:
    return "".join(f"<p>{escape(paragraph)}</p>\n" for paragraph in paragraphs)


def markdown(paragraphs: Paragraphs) -> bytes:
    return "\n\n".join(["# Topics", *paragraphs]).encode()


def docx(paragraphs: Paragraphs) -> bytes:
    runs = (f"<w:p><w:r><w:t>{escape(text)}</w:t></w:r></w:p>" for text in paragraphs)
    body = f'<w:document xmlns:w="{W}"><w:body>{"".join(runs)}</w:body></w:document>'
    return _zipped({"word/document.xml": body})


def epub(paragraphs: Paragraphs) -> bytes:
    chapters = [paragraphs[at : at + 200] for at in range(0, len(paragraphs), 200)]
    items, spine = (
        "".join(form.format(n) for n in range(len(chapters)))
        for form in (
            '<item id="c{0}" href="c{0}.xhtml" media-type="application/xhtml+xml"/>',
            '<itemref idref="c{0}"/>',
        )
    )
    return _zipped(
        {
            "META-INF/container.xml": '<container><rootfile full-path="a.opf"/></container>',
            "a.opf": f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>",
            **{
                f"c{n}.xhtml": f"<html><body><h1>Chapter {n}</h1>{_body(chapter)}</body></html>"
                for n, chapter in enumerate(chapters)
            },
        }
    )


def pdf(paragraphs: Paragraphs) -> bytes:
    lines = [line for text in paragraphs for line in (*textwrap.wrap(text, 90), "")]
    pages = [lines[at : at + LINES] for at in range(0, len(lines), LINES)]
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, page in enumerate(pages):
        shown = "".join(f"({_quoted(line)}) Tj T* " for line in page)
        stream = f"BT /F1 10 Tf 12 TL 50 720 Td {shown}ET"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    out, places = "%PDF-1.4\n", []
    parts = [out]
    at = len(out)
    for number, body in enumerate(objects, 1):
        part = f"{number} 0 obj\n{body}\nendobj\n"
        places.append(at)
        at += len(part)
        parts.append(part)
    entries = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    parts.append(
        f"xref\n0 {size}\n0000000000 65535 f \n{entries}trailer\n<< /Size {size} /Root 1 0 R >>\n"
        f"startxref\n{at}\n%%EOF\n"
    )
    return "".join(parts).encode("latin-1")


def _quoted(line: str) -> str:
    return line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")


def _zipped(members: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


MAKERS = {"html": html, "md": markdown, "docx": docx, "epub": epub, "pdf": pdf}

if __name__ == "__main__":
    main()
