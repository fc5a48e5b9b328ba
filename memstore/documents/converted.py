"""What a file turns into: its text, and where the parts of it stand."""

from dataclasses import dataclass, replace
from typing import Literal

from memstore.disk.format.citations import Place

Kind = Literal["text", "markdown", "html", "docx", "epub", "pdf"]


@dataclass(frozen=True)
class Converted:
    """A document's text. places: pages and headings, in order of where they begin."""

    text: str
    places: tuple[Place, ...]
    kind: Kind


@dataclass(frozen=True)
class Limits:
    """What a file may ask of its reader; whatever asks for more is refused."""

    file_bytes: int = 256 << 20  # of a file that is converted (plain text is not)
    members: int = 10_000  # of an archive
    member_bytes: int = 64 << 20  # of one of them, when it is not compressed any more
    all_bytes: int = 256 << 20  # of all that are read
    depth: int = 10_000  # of elements within elements
    elements: int = 10_000_000  # of all parts
    pages: int = 20_000
    drawn_bytes: int = 1 << 30  # of what draws pages, counted each time that it is drawn
    characters: int = 64 << 20  # of the text
    seconds: int = 300  # of the processor
    memory: int = 3 << 30  # bytes of address space

    def of_size(self, size: int) -> "Limits":
        """What a file of so many bytes may ask for: some that every one may, and several times what
        files of its size hold that nobody made in order to be large.
        """
        return replace(
            self,
            all_bytes=min(self.all_bytes, (16 << 20) + 100 * size),
            elements=min(self.elements, 200_000 + 4 * size),
            pages=min(self.pages, 100 + size // 100),
            drawn_bytes=min(self.drawn_bytes, (4 << 20) + 20 * size),
            characters=min(self.characters, (1 << 20) + 100 * size),
            seconds=min(self.seconds, 60 + size // 16_384),
        )


LIMITS = Limits()
