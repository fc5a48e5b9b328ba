"""Plain text: UTF-8, and nothing that is no text."""

from memstore.documents.converted import Converted, Limits
from memstore.errors import UnreadableDocument


def decode_text(data: bytes, limits: Limits) -> str:
    """UTF-8 as text. Raises UnreadableDocument."""
    if b"\0" in data:
        raise UnreadableDocument(
            f"is binary (a NUL byte at {data.index(0)}); only text can be read"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableDocument(f"is not UTF-8 text (near byte {error.start})") from None
    if not text.strip():
        raise UnreadableDocument("is empty; there is nothing to read")
    if len(text) > limits.characters:
        raise UnreadableDocument(f"has more than {limits.characters:,} characters")
    return text


def read_text(data: bytes, limits: Limits) -> Converted:
    """The text as it is. Raises UnreadableDocument."""
    return Converted(decode_text(data, limits), (), "text")
