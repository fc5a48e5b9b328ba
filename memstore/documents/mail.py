"""Mail, saved web pages (MHT) and notebooks."""

import json
import re
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage, MIMEPart

from memstore.documents.converted import Block, Converted, Limits
from memstore.documents.decoding import clean, decode
from memstore.documents.html import read_html
from memstore.documents.markdown import headings
from memstore.errors import UnreadableDocument

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of what is printed to a terminal


def read_mail(data: bytes, limits: Limits, notes: list[str]) -> Iterator[Block]:
    """The subject as heading, who wrote to whom, and the text; attachments are named in notes."""
    mail = message_from_bytes(data, EmailMessage, policy=policy.default)
    if subject := _header(mail, "Subject"):
        yield Block(subject, 1)
    saved = mail.get_content_type() == "multipart/related"  # a web page
    headers = {name: _header(mail, name) for name in ("From", "To", "Cc", "Date")}
    lines = [f"{name}: {value}" for name, value in headers.items() if value]
    yield Block("" if saved else "\n".join(lines))
    yield from _texts(mail, limits, notes)


def _header(mail: EmailMessage, name: str) -> str:
    """The first header of a name, decoded; undecoded if the email package fails on it."""
    try:
        return clean(str(mail[name] or ""))
    except (IndexError, AttributeError, ValueError):  # of malformed addresses
        values = (value for known, value in mail.raw_items() if known.lower() == name.lower())
        return clean(" ".join(str(next(values)).split()))


def _texts(
    part: MIMEPart, limits: Limits, notes: list[str], *, noted: bool = True
) -> Iterator[Block]:
    """The texts of a message or of a part of it, in order; of alternatives one. noted: notes name a
    part that is not read.
    """
    kind = part.get_content_type()
    if part.get_content_maintype() == "multipart":
        parts = [*part.iter_parts()]
        if kind == "multipart/alternative":
            texts = [one for one in parts if one.get_body(("html", "plain"))]
            parts = [one for one in texts if one.get_body(("html",))][:1] or texts[:1]
        for one in parts:  # a page's pictures and styles are not attached to it
            yield from _texts(one, limits, notes, noted=kind != "multipart/related")
    elif kind in ("text/html", "text/plain") and not part.is_attachment():
        content, charset = part.get_payload(decode=True), part.get_content_charset("")
        content = content if isinstance(content, bytes) else b""
        if kind == "text/html":
            yield from read_html(content, limits, notes, charset)
        else:
            yield Block(clean(decode(content, notes, charset)).strip())
    elif noted:
        notes.append(f"the attachment {clean(part.get_filename() or kind)} is not read")


def read_notebook(data: bytes, limits: Limits, notes: list[str]) -> Converted:
    """A notebook as Markdown: text cells, code and printed results. Raises UnreadableDocument."""
    try:
        cells, parts = json.loads(decode(data, notes))["cells"], list[str]()
        for number, cell in enumerate(cells, 1):
            source = "".join(cell["source"])
            code = cell["cell_type"] == "code" and source.strip()
            parts.append(f"```\n{source}\n```" if code else source)
            for output in cell.get("outputs", ()):
                shown = output.get("data", {})
                printed = output.get("text") or shown.get("text/plain") or ""
                parts.append(_COLOUR.sub("", "".join(printed)))
                if any(kind.startswith("image/") for kind in shown):
                    notes.append(f"a picture of cell {number} is not read")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableDocument(f"is not a notebook: {error!r}") from None
    text = "\n\n".join(part for part in parts if part.strip()) + "\n"
    if not text.strip():
        raise UnreadableDocument("has no text")
    return Converted(text, tuple(headings(text)), "notebook", tuple(notes))
