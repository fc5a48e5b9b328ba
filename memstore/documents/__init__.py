"""PDF, HTML, DOCX, Markdown and EPUB turned into text with places; the only room that imports the
libraries which read them.
"""

from memstore.documents.conversion import plain_text, read
from memstore.documents.converted import Converted

__all__ = ["Converted", "plain_text", "read"]
