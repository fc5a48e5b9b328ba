"""A text put together from what a converter meets: words, breaks, headings, pages."""

import re

from memstore.disk.format.citations import LEVELS, PAGE, Place, plain_name
from memstore.documents.converted import Converted, Kind, Limits
from memstore.errors import UnreadableDocument

_CONTROL = (*range(9), *range(11, 32), 127)
_INVISIBLE = (0xAD, 0x200B, 0xFEFF)  # soft hyphens, spaces without width, byte order marks
_CLEAN: dict[int, str | None] = {
    **dict.fromkeys((*_CONTROL, *_INVISIBLE)),
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
    0xA0: " ",
}
# What may not be collapsed stands in a line as a control character, which no text has any more.
_BREAK, _SPACE, _TAB = "\x00", "\x01", "\x02"
_KEPT = str.maketrans({"\n": _BREAK, " ": _SPACE, "\t": _TAB})
_SHOWN = str.maketrans({_BREAK: "\n", _SPACE: " ", _TAB: "\t"})
_BLANKS, _AROUND_BREAK = re.compile(r"[ \t\r\n\f\v]+"), re.compile(f" ?{_BREAK} ?")


def clean(text: str) -> str:
    """A text without control characters (but line breaks and tabs), invisible ones, and halves of
    surrogate pairs.
    """
    return text.translate(_CLEAN)


class Composer:
    """Paragraphs with an empty line between them, and the places that begin in them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parts: list[str] = []
        self._length = self._gathered = 0
        self._line: list[str] = []  # of the paragraph that is open
        self._prefix = ""  # of the next paragraph: of an item of a list
        self._after_item = False
        self._places: list[Place] = []
        self._next: list[tuple[int, str]] = []  # places that begin with the next paragraph
        self.headings = 0

    @property
    def open(self) -> bool:
        """Has a paragraph been begun?"""
        return bool(self._line)

    @property
    def begun(self) -> bool:
        """Is there any text yet?"""
        return bool(self._parts)

    def add(self, text: str, *, verbatim: bool = False) -> None:
        """Words, whose blanks count as one; verbatim: every blank as it is. Raises
        UnreadableDocument for too much of them.
        """
        text = text.translate(_CLEAN)
        self._gathered += len(text)
        self._check_length()
        self._line.append(text.translate(_KEPT) if verbatim else text)

    def break_line(self) -> None:
        """The next words begin a line."""
        if self._line:
            self._line.append(_BREAK)

    def item(self, prefix: str) -> None:
        """The next paragraph is an item of a list."""
        self.end_paragraph()
        self._prefix = prefix

    def end_paragraph(self, heading: int = 0) -> str:
        """What follows is another paragraph; heading: the level of this one, if it is a heading.
        The paragraph.
        """
        line = _BLANKS.sub(" ", "".join(self._line))
        self._line = []
        line = _AROUND_BREAK.sub(_BREAK, line).strip(f" {_BREAK}").translate(_SHOWN).rstrip()
        if not line.strip():
            return ""
        if heading:
            self.place(heading, line)
            self.headings += 1
        item, self._prefix = self._prefix, ""
        self._begin("\n" if item and self._after_item else "\n\n")
        self._after_item = bool(item)
        self._put(item + line)
        return line

    def place(self, level: int, name: str) -> None:
        """A heading (level 1, 2, ...) or page (0) begins with the next paragraph; without a name,
        it ends the headings from its level down.
        """
        level = min(level, LEVELS - 1)
        self._next = [other for other in self._next if other[1] or other[0] < level]
        self._next.append((level, plain_name(name)))

    def drop_places(self) -> bool:
        """No paragraph came that they could begin with. Were there any?"""
        dropped, self._next = bool(self._next), []
        return dropped

    def page(self, number: int, text: str) -> None:
        """A page as it is, if anything stands on it."""
        text = clean(text).strip("\n").rstrip()
        if not text.strip():
            return
        self._gathered += len(text)
        self._check_length()
        self.place(PAGE, str(number))
        self._begin("\n\n")
        self._put(text)

    def done(self, kind: Kind) -> Converted:
        """The text. Raises UnreadableDocument where there is none."""
        self.end_paragraph()
        if not self._parts:
            raise UnreadableDocument("has no text")
        self._put("\n")
        return Converted("".join(self._parts), tuple(self._places), kind)

    def _check_length(self) -> None:
        if self._gathered > self._limits.characters:
            raise UnreadableDocument(
                f"has more than {self._limits.characters:,} characters, too many for a file of its "
                "size; split it, or save it anew"
            )

    def _begin(self, separator: str) -> None:
        if self._parts:
            self._put(separator)
        self._places += (Place(self._length, level, name) for level, name in self._next)
        self._next = []

    def _put(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)
