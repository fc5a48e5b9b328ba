"""PDF: the text of every page, with the number of the page."""

import io
import logging

from memstore.documents.compose import Composer
from memstore.documents.converted import Converted, Limits
from memstore.errors import UnreadableDocument


def read_pdf(data: bytes, limits: Limits) -> Converted:
    """The text of a PDF, with its pages, counted from 1. Raises UnreadableDocument, and whatever
    pypdf raises.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    logging.getLogger("pypdf").disabled = True  # of what it mends it would tell
    composer = Composer(limits)
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableDocument("is encrypted; save it without a password")
        pages = len(reader.pages)
        if pages > limits.pages:
            raise UnreadableDocument(f"has more than {limits.pages:,} pages")
        for number, page in enumerate(reader.pages, 1):
            composer.page(number, page.extract_text())
    except (DependencyError, FileNotDecryptedError):
        raise UnreadableDocument("is encrypted; save it without a password") from None
    if not pages:
        raise UnreadableDocument("is broken: it has no pages")
    if not composer.begun:
        raise UnreadableDocument(
            f"has no text: its {pages:,} pages are pictures; run a text recognition on it first"
        )
    return composer.done("pdf")
