"""Extract the text of a PDF page by page, within a budget of drawing instructions."""

import io
import logging
from typing import Any

from memstore.documents.compose import Composer
from memstore.documents.converted import Converted, Limits
from memstore.errors import UnreadableDocument

# Cost of loading a font, as the number of content-stream bytes that take as long to parse
_FONT_COST, _COMPOSITE_FONT_COST, _CMAP_BYTES_PER_COST = 500, 4000, 4


def read_pdf(data: bytes, limits: Limits) -> Converted:
    """Extract the text; pages count from 1. Raises UnreadableDocument, and pypdf's errors."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    logging.getLogger("pypdf").disabled = True  # it warns about every defect it repairs
    composer, budget = Composer(limits), _DrawingBudget(limits)
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise FileNotDecryptedError
        pages = len(reader.pages)
        if pages > limits.pages:
            raise UnreadableDocument(
                f"has more than {limits.pages:,} pages, too many for a file of its size; split it, "
                "or save it again"
            )
        for number, page in enumerate(reader.pages, 1):
            composer.page(number, budget.text(page))
    except (DependencyError, FileNotDecryptedError):
        raise UnreadableDocument("is encrypted; save it without a password") from None
    if not pages:
        raise UnreadableDocument("is broken: it has no pages")
    if not composer.begun:
        raise UnreadableDocument(
            f"has no text: its {pages:,} pages are pictures; run text recognition (OCR) on it first"
        )
    return composer.done("pdf")


class _DrawingBudget:
    """Limits the work of one file. Before pypdf parses a page or a form, its content stream and its
    fonts are charged to the budget, again every time it is drawn.
    """

    def __init__(self, limits: Limits) -> None:
        self._left = self._limit = limits.drawn_bytes

    def text(self, page: Any) -> str:
        """Extract a page's text. Raises UnreadableDocument over budget, and pypdf's errors."""
        extract_form = page.extract_xform_text

        def form_text(form: Any, *arguments: Any, **named: Any) -> str:
            text: str = extract_form(form, *arguments, **named) if self._charge(form, form) else ""
            return text

        page.extract_xform_text = form_text
        text: str = page.extract_text() if self._charge(page, page.get("/Contents")) else ""
        del page.extract_xform_text
        if self._left < 0:  # not raised in form_text: pypdf would swallow it
            raise UnreadableDocument(
                f"draws more than {self._limit >> 20} MB on its pages, too much for a file of its "
                "size; save it again"
            )
        return text

    def _charge(self, owner: Any, content: Any) -> bool:
        """Charge a page or form with its fonts; False if it has no text or is over budget."""
        if "/Resources" not in owner:
            return False  # no fonts; pypdf would search every parent for some
        content = _resolved(content)
        for part in content if isinstance(content, list) else (content,):
            self._left -= 1 + _size(part)
            if self._left < 0:
                return False
        for font in _dictionary(_dictionary(owner["/Resources"]).get("/Font")).values():
            font = _dictionary(font)
            self._left -= _COMPOSITE_FONT_COST if "/DescendantFonts" in font else _FONT_COST
            self._left -= _size(font.get("/ToUnicode")) // _CMAP_BYTES_PER_COST
            if self._left < 0:
                return False
        return True


def _size(item: Any) -> int:
    """Uncompressed bytes of a stream; 0 for any other object."""
    stream = _resolved(item)
    return len(stream.get_data()) if hasattr(stream, "get_data") else 0


def _dictionary(item: Any) -> dict[Any, Any]:
    """The object if it is a dictionary, else an empty one."""
    resolved = _resolved(item)
    return resolved if isinstance(resolved, dict) else {}


def _resolved(item: Any) -> Any:
    """The object that a reference points to; any other object unchanged."""
    return item.get_object() if hasattr(item, "get_object") else item
