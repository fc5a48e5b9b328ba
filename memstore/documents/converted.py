"""What a file turns into: its text, and where the parts of it stand."""

from dataclasses import dataclass
from typing import Literal

from memstore.disk.places import Place

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
    pages: int = 20_000
    characters: int = 64 << 20  # of the text
    seconds: int = 300  # of the processor
    memory: int = 3 << 30  # bytes of address space


LIMITS = Limits()
