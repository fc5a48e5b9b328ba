"""What a file is, by what it begins with; its name decides only between kinds of text, and says
what was expected.
"""

import re
from pathlib import PurePath
from typing import Literal

from memstore.errors import UnreadableDocument

HEAD = 4096  # bytes that are looked at
Form = Literal["text", "markdown", "html", "pdf", "zip"]

_OLE, _ZIP, _PDF = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", b"PK\x03\x04", b"%PDF-"
_MARKDOWN = {".md", ".markdown", ".mdown", ".mkd"}
_HTML = {".html", ".htm", ".xhtml"}
# What a name promises that no text can be
_PROMISED = {".pdf": "PDF", ".docx": "DOCX", ".epub": "EPUB"}
_PICTURE = "is a picture ({}); only text can be read, so run a text recognition on it first"
_PACKED = "is a packed file ({}); unpack it, and ingest what is in it"
_SOUND = "is sound or film ({}); only text can be read"
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", _PICTURE.format("PNG")),
    (b"\xff\xd8\xff", _PICTURE.format("JPEG")),
    (b"GIF87a", _PICTURE.format("GIF")),
    (b"GIF89a", _PICTURE.format("GIF")),
    (b"II*\0", _PICTURE.format("TIFF")),
    (b"MM\0*", _PICTURE.format("TIFF")),
    (b"8BPS", _PICTURE.format("PSD")),
    (b"AT&TFORM", "is DjVu, which is not read; save it as PDF"),
    (b"\x1f\x8b", _PACKED.format("gzip")),
    (b"BZh", _PACKED.format("bzip2")),
    (b"\xfd7zXZ\0", _PACKED.format("xz")),
    (b"7z\xbc\xaf\x27\x1c", _PACKED.format("7z")),
    (b"Rar!\x1a\x07", _PACKED.format("RAR")),
    (b"\x28\xb5\x2f\xfd", _PACKED.format("zstd")),
    (b"PK\x05\x06", "is an empty zip; there is nothing to read"),
    (b"ID3", _SOUND.format("MP3")),
    (b"OggS", _SOUND.format("Ogg")),
    (b"fLaC", _SOUND.format("FLAC")),
    (b"\x1aE\xdf\xa3", _SOUND.format("Matroska")),
    (b"{\\rtf", "is RTF, which is not read; save it as DOCX"),
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# Atomic, so that it takes as long as the beginning is: a comment ends where it first may.
_BEGINS_HTML = re.compile(
    r"\ufeff?\s*+(?:<\?xml[^>]*+>\s*+)?+(?:(?><!--.*?-->)\s*+)*+(?:<!doctype\s+html|<html[\s>])",
    re.IGNORECASE | re.DOTALL,
)


def form_of(data: bytes, name: str) -> Form:
    """What to read a file as; data: its first HEAD bytes, or more. Raises UnreadableDocument for
    what is known and not read.
    """
    head = data[:HEAD]
    suffix = PurePath(name).suffix.lower()
    if _PDF in head[:1024]:
        return "pdf"
    if head.startswith(_ZIP):
        return "zip"
    if head.startswith(_OLE):
        raise UnreadableDocument(_office(data))
    for magic, why in _OTHERS:
        if head.startswith(magic):
            raise UnreadableDocument(why)
    if head.startswith(b"BM") and len(head) > 26 and not any(head[6:10]):
        raise UnreadableDocument(_PICTURE.format("BMP"))
    if head.startswith(b"RIFF"):
        webp = head[8:12] == b"WEBP"
        raise UnreadableDocument((_PICTURE if webp else _SOUND).format("WebP" if webp else "RIFF"))
    if head[4:8] == b"ftyp":
        picture = head[8:12] in (b"heic", b"heix", b"mif1", b"avif")
        raise UnreadableDocument((_PICTURE if picture else _SOUND).format(_ascii(head[8:12])))
    if head[60:68] == b"BOOKMOBI":
        raise UnreadableDocument("is a Kindle book, which is not read; save it as EPUB")
    if suffix in _PROMISED and head.strip():
        raise UnreadableDocument(f"is no {_PROMISED[suffix]}, or its beginning is lost")
    text = head.decode("utf-16" if head[:2] in _UTF16 else "utf-8", "replace")
    if _BEGINS_HTML.match(text) or suffix in _HTML:
        return "html"
    if head[:2] in _UTF16:
        raise UnreadableDocument("is UTF-16 text; save it as UTF-8")
    return "markdown" if suffix in _MARKDOWN else "text"


def _office(data: bytes) -> str:
    if "EncryptedPackage".encode("utf-16-le") in data:
        return "is an encrypted Office file; save it without a password"
    return "is an old Office file (such as .doc), which is not read; save it as DOCX"


def _ascii(data: bytes) -> str:
    return data.decode("ascii", "replace").strip()
