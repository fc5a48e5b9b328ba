"""Elements of XML and HTML, counted as they begin: how many all parts of a document have, and how
deep they are nested.
"""

from memstore.documents.converted import Limits
from memstore.errors import UnreadableDocument


class Elements:
    """Counts elements. depth: so many are open in the part that is read."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._count = limits, 0
        self.depth = 0

    def begin_part(self) -> None:
        """Another part of the document is read."""
        self.depth = 0

    def begin(self) -> None:
        """An element begins. Raises UnreadableDocument for one too many, or too deep."""
        self.depth += 1
        self._count += 1
        if self.depth > self._limits.depth:
            raise UnreadableDocument(f"has elements nested deeper than {self._limits.depth:,}")
        if self._count > self._limits.elements:
            raise UnreadableDocument(
                f"has more than {self._limits.elements:,} elements, too many for a file of its "
                "size; save it anew, or as text"
            )
