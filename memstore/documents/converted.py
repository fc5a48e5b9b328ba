"""The result of a conversion: text, places of its parts, and notes of what could not be read."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from memstore.disk.format.document import LEVELS, Place, plain_name
from memstore.errors import UnreadableDocument

Kind = Literal[
    "text", "markdown", "html", "pdf", "docx", "pptx", "xlsx", "odf", "epub", "csv", "mail",
    "notebook",
]  # fmt: skip
TOO_MUCH = "needs too much memory or time to be read; split it, or save it again"
DAMAGED = "is damaged ({}); open it and save it again"
TOO_LONG = "has more than {:,} characters, too many for a file of its size; split it"


@dataclass(frozen=True)
class Converted:
    """A document's text. places: its pages and headings, in order; notes: parts of the file that
    the text lacks.
    """

    text: str
    places: tuple[Place, ...]
    kind: Kind
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Limits of a conversion; a file beyond one of them is refused."""

    file_bytes: int = 256 << 20  # of a file that is converted (plain text is not)
    members: int = 10_000  # of an archive
    member_bytes: int = 64 << 20  # of one of them, unpacked
    all_bytes: int = 256 << 20  # of all of them, unpacked
    pages: int = 20_000
    characters: int = 64 << 20  # of the text
    seconds: int = 300  # of the processor
    memory: int = 3 << 30  # bytes of address space

    def of_size(self, size: int) -> "Limits":
        """Limits for a file of `size` bytes: several times what real files need."""
        return replace(
            self,
            all_bytes=min(self.all_bytes, (16 << 20) + 100 * size),
            pages=min(self.pages, 100 + size // 100),
            characters=min(self.characters, (1 << 20) + 100 * size),
            seconds=min(self.seconds, 60 + size // 16_384),
        )


LIMITS = Limits()


class Block(NamedTuple):
    """A paragraph, table or list item. level: of the heading (1, 2, ...) or page (0) that begins
    here, None for neither; a block without text marks the next one. name: of that place, if not the
    text.
    """

    text: str
    level: int | None = None
    name: str = ""
    item: bool = False


def compose(blocks: Iterable[Block], kind: Kind, limits: Limits, notes: list[str]) -> Converted:
    """Join blocks to one text, with an empty line between them. Raises UnreadableDocument for no
    text, or more than the limit.
    """
    parts, places, length, after_item = list[str](), list[Place](), 0, False
    waiting = list[tuple[int, str]]()  # places of the next text
    for block in blocks:
        if block.level is not None:
            level = min(block.level, LEVELS - 1)
            # a page or chapter without text has no place
            waiting = [one for one in waiting if (one[0] < level if level else one[0])]
            waiting.append((level, plain_name(block.name or block.text)))
        if not block.text.strip():
            continue
        if parts:
            parts.append("\n" if block.item and after_item else "\n\n")
            length += len(parts[-1])
        places += [Place(length, level, name) for level, name in waiting]
        waiting, after_item = [], block.item
        parts.append(block.text)
        length += len(block.text)
        if length > limits.characters:
            raise UnreadableDocument(TOO_LONG.format(limits.characters))
    if not parts:
        raise UnreadableDocument("has no text" + "".join(f"; {note}" for note in notes[:1]))
    return Converted("".join((*parts, "\n")), tuple(places), kind, tuple(notes))
