"""What a file is, by what it begins with; its name decides only between kinds of text, and says
what was expected.
"""

import re
from pathlib import PurePath
from typing import Literal

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
_PICTURE, _PACKED = "picture", "packed file"
_MAGIC: dict[bytes, str] = {
    b"\x89PNG\r\n\x1a\n": "picture (PNG)",
    b"\xff\xd8\xff": "picture (JPEG)",
    b"GIF8": "picture (GIF)",
    **dict.fromkeys((b"II*\0", b"MM\0*"), "picture (TIFF)"),
    b"8BPS": "picture (PSD)",
    b"\x1f\x8b": "packed file (gzip)",
    b"BZh": "packed file (bzip2)",
    b"\xfd7zXZ\0": "packed file (xz)",
    b"7z\xbc\xaf\x27\x1c": "packed file (7z)",
    b"Rar!\x1a\x07": "packed file (RAR)",
    b"\x28\xb5\x2f\xfd": "packed file (zstd)",
    **dict.fromkeys((b"RIFF", b"ID3", b"OggS", b"fLaC", b"\x1aE\xdf\xa3"), "recording"),
    b"AT&TFORM": "DjVu book; save it as PDF",
    b"{\\rtf": "RTF document; save it as DOCX",
    b"PK\x05\x06": "empty zip",
}
_ADVICE = {"picture": "; run text recognition (OCR) on it first", "packed": "; unpack it first"}
_PRINTED = bytes((0, *range(9, 14), 27, *range(32, 127), *range(128, 256)))  # and NUL of UTF-16
# Atomic, so that it takes time in proportion to the beginning: a comment ends where it first may.
_HTML = re.compile(
    r"\s*+(?:<\?xml[^>]*+>\s*+)?+(?:(?><!--.*?-->)\s*+)*+(?:<!doctype\s+html|<html[\s>])",
    re.IGNORECASE | re.DOTALL,
)
_MAIL = re.compile(r"(?:[A-Za-z-]+:.*+\r?\n(?:[ \t].*+\r?\n)*+)*?MIME-Version:", re.IGNORECASE)


def form_of(data: bytes, name: str) -> Form:
    """What to read a file as; data: its first 4,096 bytes, or more. Raises UnreadableDocument for
    what is known and not read.
    """
    head, suffix = data[:4096], PurePath(name).suffix.lower()
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head.startswith(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"):
        if "EncryptedPackage".encode("utf-16-le") in data:
            raise UnreadableDocument("is an encrypted Office file; save it without a password")
        raise UnreadableDocument("is an old Office file (such as .doc); save it as DOCX or XLSX")
    what = next((what for magic, what in _MAGIC.items() if head.startswith(magic)), "")
    if head[4:8] == b"ftyp":
        what = "picture (HEIC)" if head[8:11] in (b"hei", b"mif", b"avi") else "recording"
    if head[60:68] == b"BOOKMOBI":
        what = "Kindle book; save it as EPUB"
    if what:
        raise UnreadableDocument(f"is a {what}{_ADVICE.get(what.split(' ')[0], '')}")
    if suffix in _PROMISED and head.strip():
        raise UnreadableDocument(f"is no {suffix[1:].upper()}, or its beginning is lost")
    text = head.replace(b"\0", b"").decode("utf-8-sig", "replace").lstrip("\ufffd")  # or UTF-16
    if _HTML.match(text):
        return "html"
    if 20 * len(head.translate(None, _PRINTED)) > len(head) + 20:
        raise UnreadableDocument("is binary; only text can be read")
    return "mail" if _MAIL.match(text) else _NAMED.get(suffix, "text")
