"""Mail, saved web pages (MHT) and notebooks."""

import json
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage

from memstore.documents.converted import Block, Converted, Limits
from memstore.documents.decoding import clean, decode
from memstore.documents.html import read_html
from memstore.documents.markdown import headings
from memstore.errors import UnreadableDocument


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


def _texts(mail: EmailMessage, limits: Limits, notes: list[str]) -> Iterator[Block]:
    """The text of a message or of a part of it, and the texts that are shown below it."""
    body = mail.get_body(("html", "plain"))
    if body is not None:
        content, charset = body.get_payload(decode=True), body.get_content_charset("")
        content = content if isinstance(content, bytes) else b""
        if body.get_content_subtype() == "html":
            yield from read_html(content, limits, notes, charset)
        else:
            yield Block(clean(decode(content, notes, charset)).strip())
    nested = mail.get_content_maintype() == "multipart"
    for part in mail.iter_attachments() if nested else ():
        kind = part.get_content_maintype()
        if kind == "multipart" or (kind == "text" and not part.is_attachment()):
            yield from _texts(part, limits, notes)
        elif mail.get_content_subtype() != "related":  # a page's pictures and styles
            name = part.get_filename() or part.get_content_type()
            notes.append(f"the attachment {clean(name)} is not read")


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
                parts.append("".join(printed))
                if any(kind.startswith("image/") for kind in shown):
                    notes.append(f"a picture of cell {number} is not read")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableDocument(f"is not a notebook: {error!r}") from None
    text = "\n\n".join(part for part in parts if part.strip()) + "\n"
    if not text.strip():
        raise UnreadableDocument("has no text")
    return Converted(text, tuple(headings(text)), "notebook", tuple(notes))
