"""PDF: the text of every page, with the number of the page."""

import io
import logging
from typing import Any

from memstore.documents.compose import Composer
from memstore.documents.converted import Converted, Limits
from memstore.errors import UnreadableDocument

# What the fonts of a page take, in bytes of drawings that take as long
_FONT, _COMPOSITE_FONT, _CODES_A_BYTE = 500, 4000, 4


def read_pdf(data: bytes, limits: Limits) -> Converted:
    """The text of a PDF, with its pages, counted from 1. Raises UnreadableDocument, and whatever
    pypdf raises.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    logging.getLogger("pypdf").disabled = True  # of what it mends it would tell
    composer, drawn = Composer(limits), _Drawn(limits)
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableDocument("is encrypted; save it without a password")
        pages = len(reader.pages)
        if pages > limits.pages:
            raise UnreadableDocument(
                f"has more than {limits.pages:,} pages, too many for a file of its size; split it, "
                "or save it anew"
            )
        for number, page in enumerate(reader.pages, 1):
            composer.page(number, drawn.text(page))
    except (DependencyError, FileNotDecryptedError):
        raise UnreadableDocument("is encrypted; save it without a password") from None
    if not pages:
        raise UnreadableDocument("is broken: it has no pages")
    if not composer.begun:
        raise UnreadableDocument(
            f"has no text: its {pages:,} pages are pictures; run a text recognition on it first"
        )
    return composer.done("pdf")


class _Drawn:
    """Counts what draws the pages before it is looked at: a page, or a form on it, each time that
    it is drawn, and each time its fonts.
    """

    def __init__(self, limits: Limits) -> None:
        self._left = self._most = limits.drawn_bytes

    def text(self, page: Any) -> str:
        """That of a page. Raises UnreadableDocument, and whatever pypdf raises."""
        extract_form = page.extract_xform_text

        def form_text(form: Any, *arguments: Any, **named: Any) -> str:
            text: str = extract_form(form, *arguments, **named) if self._count(form, form) else ""
            return text

        page.extract_xform_text = form_text
        text: str = page.extract_text() if self._count(page, page.get("/Contents")) else ""
        del page.extract_xform_text
        if self._left < 0:  # raised in a form, pypdf would pass over it
            raise UnreadableDocument(
                f"draws more than {self._most >> 20} MB on its pages, too much for a file of its "
                "size; save it anew"
            )
        return text

    def _count(self, shown: Any, drawing: Any) -> bool:
        """Count what something shows; False if that is no text, or too much."""
        if "/Resources" not in shown:
            return False  # there is no font; pypdf would look for one in all that it stands in
        drawing = _resolved(drawing)
        for part in drawing if isinstance(drawing, list) else (drawing,):
            self._left -= 1 + _size(part)
            if self._left < 0:
                return False
        for font in _dictionary(_dictionary(shown["/Resources"]).get("/Font")).values():
            font = _dictionary(font)
            self._left -= _COMPOSITE_FONT if "/DescendantFonts" in font else _FONT
            self._left -= _size(font.get("/ToUnicode")) // _CODES_A_BYTE
            if self._left < 0:
                return False
        return True


def _size(found: Any) -> int:
    """Bytes of a stream, not compressed; 0 for what is none."""
    stream = _resolved(found)
    return len(stream.get_data()) if hasattr(stream, "get_data") else 0


def _dictionary(found: Any) -> dict[Any, Any]:
    """Of what should be one; empty for anything else."""
    resolved = _resolved(found)
    return resolved if isinstance(resolved, dict) else {}


def _resolved(found: Any) -> Any:
    """What a reference leads to, or what is none itself."""
    return found.get_object() if hasattr(found, "get_object") else found
