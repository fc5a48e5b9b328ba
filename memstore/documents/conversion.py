"""A file turned into text: what it is, who reads it, and what is said where nobody can.

What needs a library is read by a child process with bounds on memory and processor time, so that
no file can take more of this one than its bytes and its text.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from memstore.child import run_tied
from memstore.decode import unpack
from memstore.disk.format.citations import Place
from memstore.documents.archive import Archive
from memstore.documents.converted import LIMITS, Converted, Kind, Limits
from memstore.documents.detect import Form, form_of
from memstore.documents.plain import read_text
from memstore.errors import MemstoreError, UnreadableDocument, install_extra

LIBRARIES = ("lxml", "pypdf", "markdown_it")
TOO_MUCH = 77  # how a child ends that has no memory left


class Told(msgspec.Struct):
    """What a child says: a document, or why there is none."""

    text: str = ""
    kind: Kind = "text"
    places: list[Place] = []
    refused: str = ""


def read(data: bytes | Path, name: str, limits: Limits = LIMITS) -> Converted:
    """The text of a file and its places; name: what it is called, which decides only between kinds
    of text. From any thread.

    Raises UnreadableDocument: one line with the name and why. MemstoreError where no child can be
    started.
    """
    try:
        content = data if isinstance(data, bytes) else _content(data, limits)
        if len(content) > limits.file_bytes:
            raise UnreadableDocument(f"is larger than {limits.file_bytes >> 20} MB; split it")
        form = form_of(content, name)
        if form == "text":
            return read_text(content, limits)
        return _read_apart(content, form, limits)
    except UnreadableDocument as error:
        raise UnreadableDocument(f"{name} {error}") from None


def _content(path: Path, limits: Limits) -> bytes:
    """A file's bytes, as many as may be."""
    try:
        if path.exists() and not path.is_file():
            raise UnreadableDocument("is no regular file")
        with path.open("rb") as file:
            return file.read(limits.file_bytes + 1)
    except OSError as error:
        raise UnreadableDocument(f"cannot be read: {error.strerror}") from None


def convert(content: bytes, form: Form, limits: Limits = LIMITS) -> Converted:
    """The same, of a file that needs a library, in this process. Raises UnreadableDocument without
    a name.
    """
    try:
        return _reader(form)(content, limits.of_size(len(content)))
    except UnreadableDocument:
        raise
    except ImportError as error:
        raise UnreadableDocument(f"needs {error.name}: {install_extra('documents')}") from None
    except MemoryError:
        raise UnreadableDocument(_TOO_MUCH) from None
    except RecursionError:
        raise UnreadableDocument("is nested too deep") from None
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        raise UnreadableDocument(f"is broken: {type(error).__name__} {why}".rstrip()) from None


_TOO_MUCH = "needs too much memory or time to be read; split it, or save it anew"


def _reader(form: Form) -> Callable[[bytes, Limits], Converted]:
    if form == "pdf":
        from memstore.documents.pdf import read_pdf

        return read_pdf
    if form == "html":
        from memstore.documents.hypertext import read_html

        return read_html
    if form == "markdown":
        from memstore.documents.markdown import read_markdown

        return read_markdown
    if form == "zip":
        return _read_zip
    return read_text


def _read_zip(content: bytes, limits: Limits) -> Converted:
    """An archive is what is in it."""
    from memstore.documents.docx import DOCUMENT, read_docx
    from memstore.documents.epub import CONTAINER, read_epub

    archive = Archive(content, limits)
    if archive.has_any([CONTAINER]):
        return read_epub(archive, limits)
    if archive.has_any([DOCUMENT]):
        return read_docx(archive, limits)
    for member, what in (
        ("xl/workbook.xml", "is a spreadsheet, which is not read; save it as text"),
        ("ppt/presentation.xml", "is a presentation, which is not read; save it as PDF"),
        ("content.xml", "is an OpenDocument file, which is not read; save it as DOCX"),
        ("word/document2.xml", "is a DOCX of a form that is not read; save it anew"),
    ):
        if member in archive.names:
            raise UnreadableDocument(what)
    raise UnreadableDocument("is a zip and no DOCX or EPUB; unpack it, and ingest what is in it")


def _read_apart(content: bytes, form: Form, limits: Limits) -> Converted:
    limits = limits.of_size(len(content))
    told_limits = msgspec.json.encode(limits).decode()
    try:
        done = run_tied(
            "memstore.documents.child", form, told_limits, *_directories(), given=content
        )
    except OSError as error:
        raise MemstoreError(f"no process to read documents in did start: {error}") from error
    if done.returncode < 0 or done.returncode == TOO_MUCH:
        raise UnreadableDocument(_TOO_MUCH)
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise MemstoreError(f"the process to read documents in did not start: {last}")
    try:
        told = unpack(done.stdout, Told)
    except ValueError as error:
        raise UnreadableDocument(f"is broken: {error}") from None
    if told.refused:
        raise UnreadableDocument(told.refused)
    return Converted(told.text, tuple(told.places), told.kind)


def _directories() -> list[str]:
    """Where this process has the libraries: the child, which looks only where Python's own are,
    takes them from there, too; but nothing from the working directory.
    """
    found, here = list[str](), str(Path.cwd())
    for name in LIBRARIES:
        spec = find_spec(name)
        if spec is not None and spec.origin:
            directory = str(Path(spec.origin).resolve().parents[1])
            if directory not in (*found, here):
                found.append(directory)
    return found
