"""Documents that are zips: what is unpacked is bounded before any library sees it."""

import io
import zipfile
import zlib

from memstore.documents.converted import Kind, Limits
from memstore.errors import UnreadableDocument

# How the name of a member begins that only this kind has
_KINDS: dict[str, Kind] = {
    "META-INF/container.xml": "epub",
    "word/document": "docx",
    "ppt/presentation": "pptx",
    "xl/workbook": "xlsx",
    "content.xml": "odf",
}


def unzipped(data: bytes, limits: Limits) -> tuple[Kind, dict[str, bytes]]:
    """The kind of a document, and its members by name. Raises UnreadableDocument for what is no
    document, broken, encrypted or too large; no member can be larger than the directory says, which
    is added up first.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            if len(infos) > limits.members:
                raise UnreadableDocument(f"has more than {limits.members:,} members")
            if any(info.flag_bits & 1 for info in infos):
                raise UnreadableDocument("is encrypted; save it without a password")
            if any(info.compress_type not in (0, zipfile.ZIP_DEFLATED) for info in infos):
                raise UnreadableDocument("is compressed as documents are not; save it again")
            sizes = [info.file_size for info in infos]
            if max(sizes, default=0) > limits.member_bytes or sum(sizes) > limits.all_bytes:
                raise UnreadableDocument("is too large unpacked for a file of its size; split it")
            members = {info.filename: archive.read(info) for info in infos}
    except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError) as error:
        raise UnreadableDocument(f"is broken: {error}") from None
    for name, member in members.items():
        if name.endswith((".xml", ".rels")) and b"<!ENTITY" in member.replace(b"\0", b""):
            raise UnreadableDocument("declares entities, which are not read for safety")
    for beginning, kind in _KINDS.items():
        if any(name.startswith(beginning) for name in members):
            return kind, members
    raise UnreadableDocument("is a zip and no document; unpack it, and ingest what is in it")


def zipped(members: dict[str, bytes]) -> io.BytesIO:
    """Members as a zip that is not compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return out
