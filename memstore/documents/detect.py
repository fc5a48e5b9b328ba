"""Detection of a file's kind by its first bytes; the name decides only between kinds of text. Zip
archives are checked and unpacked before a library sees them.
"""

import io
import re
import zipfile
import zlib
from pathlib import PurePath
from typing import Literal

from memstore.documents.converted import DAMAGED, Kind, Limits
from memstore.errors import UnreadableDocument

Form = Literal["text", "markdown", "html", "pdf", "zip", "csv", "mail", "notebook"]
_NAMED: dict[str, Form] = {
    **dict.fromkeys((".md", ".markdown", ".mdown", ".mkd"), "markdown"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".eml", ".mht", ".mhtml"), "mail"),
    ".ipynb": "notebook",
}
_PROMISED = (".pdf", ".docx", ".pptx", ".xlsx", ".odt", ".ods", ".odp", ".epub")  # none is text
_PICTURE = "is a picture; run text recognition (OCR) on it first"
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"7z\xbc\xaf", b"Rar!", b"(\xb5/\xfd")
_OLD = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_MAGIC: dict[bytes | tuple[bytes, ...], str] = {
    (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*", b"8BPS"): _PICTURE,
    _PACKED: "is a packed file; unpack it first",
    (
        b"RIFF",
        b"ID3",
        b"OggS",
        b"fLaC",
        b"\x1aE\xdf\xa3",
    ): "is audio or video, which cannot be read",
    b"AT&TFORM": "is a DjVu book; save it as PDF",
    b"{\\rtf": "is an RTF document; save it as DOCX",
    b"PK\x05\x06": "is an empty zip",
    _OLD: "is an old Office file (such as .doc); save it as DOCX or XLSX",
}
_PRINTED = bytes((0, *range(9, 14), 27, *range(32, 127), *range(128, 256)))  # and NUL of UTF-16
# Atomic, so that it takes time in proportion to the beginning: a comment ends where it first may.
_HTML = re.compile(
    r"\s*+(?:<\?xml[^>]*+>\s*+)?+(?:(?><!--.*?-->)\s*+)*+(?:<!doctype\s+html|<html[\s>])",
    re.IGNORECASE | re.DOTALL,
)
_MAIL = re.compile(r"(?:[A-Za-z-]+:.*+\r?\n(?:[ \t].*+\r?\n)*+)*?MIME-Version:", re.IGNORECASE)
# How the name of a member begins that only this kind has
_KINDS: dict[str, Kind] = {
    "META-INF/container.xml": "epub",
    "word/document": "docx",
    "ppt/presentation": "pptx",
    "xl/workbook": "xlsx",
    "content.xml": "odf",
}


def form_of(data: bytes, name: str) -> Form:
    """Kind of a file. data: its first 4,096 bytes or more. Raises UnreadableDocument for kinds that
    cannot be read.
    """
    head, suffix = data[:4096], PurePath(name).suffix.lower()
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head.startswith(_OLD) and "EncryptedPackage".encode("utf-16-le") in data:
        raise UnreadableDocument("is an encrypted Office file; save it without a password")
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            raise UnreadableDocument(what)
    if head[4:8] == b"ftyp":
        picture = head[8:11] in (b"hei", b"mif", b"avi")
        raise UnreadableDocument(_PICTURE if picture else "is audio or video, which cannot be read")
    if head[60:68] == b"BOOKMOBI":
        raise UnreadableDocument("is a Kindle book; save it as EPUB")
    if suffix in _PROMISED and head.strip():
        raise UnreadableDocument(f"is not a {suffix[1:].upper()} file, or its beginning is missing")
    text = head.replace(b"\0", b"").decode("utf-8-sig", "replace").lstrip("\ufffd")  # or UTF-16
    if _HTML.match(text):
        return "html"
    if 20 * len(head.translate(None, _PRINTED)) > len(head) + 20:
        raise UnreadableDocument("is binary, of unknown kind; save it as PDF or text")
    return "mail" if _MAIL.match(text) else _NAMED.get(suffix, "text")


def unzipped(data: bytes, limits: Limits) -> tuple[Kind, dict[str, bytes]]:
    """Unpack a zipped document: its kind, and its members by name. Sizes in the zip's directory are
    summed first, and no member may exceed its own. Raises UnreadableDocument for a zip that is no
    document, broken, encrypted or too large.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            if len(infos) > limits.members:
                raise UnreadableDocument(f"has more than {limits.members:,} files in it")
            if any(info.flag_bits & 1 for info in infos):
                raise UnreadableDocument("is encrypted; save it without a password")
            if any(info.compress_type not in (0, zipfile.ZIP_DEFLATED) for info in infos):
                raise UnreadableDocument("uses an unsupported compression; save it again")
            sizes = [info.file_size for info in infos]
            if max(sizes, default=0) > limits.member_bytes or sum(sizes) > limits.all_bytes:
                raise UnreadableDocument("is too large unpacked for a file of its size; split it")
            members = {info.filename: archive.read(info) for info in infos}
    except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError) as error:
        raise UnreadableDocument(DAMAGED.format(error)) from None
    for name, member in members.items():
        if name.endswith((".xml", ".rels")) and b"<!ENTITY" in member.replace(b"\0", b""):
            raise UnreadableDocument("declares XML entities, which are refused for safety")
    for beginning, kind in _KINDS.items():
        if any(name.startswith(beginning) for name in members):
            return kind, members
    raise UnreadableDocument("is a zip archive, not a document; unpack it and ingest its files")


def zipped(members: dict[str, bytes]) -> io.BytesIO:
    """Pack members into an uncompressed zip."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return out
