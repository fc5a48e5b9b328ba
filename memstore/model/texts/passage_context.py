"""What is read in front of a passage, though it stands elsewhere in the document: the sentence
before it, the heading above it, the header row of its table.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from memstore.disk.format.citations import Place, Places
from memstore.model.texts.sentences import Level, Unit, heading_of

Context = Literal["none", "sentence", "heading", "header", "all"]
"""The sentence before, which in a table is its header row; the heading above; the header row alone;
what there is of these.
"""
CONTEXTS: tuple[Context, ...] = get_args(Context)

_DELIMITERS = (("\t", 1), ("|", 2), (",", 2), (";", 2))  # and how many a row has at least


class Contexts:
    """The contexts of passages, which are told in order; it remembers what stood before."""

    def __init__(self, context: Context, places: Sequence[Place]) -> None:
        self._context = context
        self._places = Places(places) if any(place.level for place in places) else None
        self._heading = ""  # above the unit that was seen last
        self._sentence = ""  # the last one of the passage before
        self._header, self._row = "", ("", 0)  # the header row of the table now, and its shape

    def before(self, text: str, units: Sequence[Unit], begins: int) -> list[str]:
        """What may stand in front of the passage of these units, the best first; text: which they
        are parts of, and which begins at a character of the document.
        """
        if self._context == "none":
            return []
        first = units[0]
        sentence, heading, header = self._sentence, self._heading, ""
        for number, unit in enumerate(units):
            own = text[unit.start : unit.end]
            if self._follows(own, unit) and number == 0:
                header = self._header
            if unit.heading:
                lines = own.splitlines()
                self._heading = heading_of(lines[0], lines[1] if len(lines) > 1 else "") or lines[0]
        self._sentence = "" if units[-1].heading or self._header else own
        if self._places is not None:
            heading = (self._places.headings(begins + first.start) or ("",))[-1]
        if first.heading:
            sentence = heading = ""
        if first.level is Level.HEADING or self._row[1]:
            sentence = ""
        joiner = " " if first.level < Level.LINE else "\n"
        sentence, heading, header = (
            part + end if part else ""
            for part, end in ((sentence, joiner), (heading, "\n"), (header, "\n"))
        )
        match self._context:
            case "sentence":  # which a row of a table has not
                found = [header or sentence]
            case "heading":
                found = [heading]
            case "header":
                found = [header]
            case _:
                found = [header] if header else [heading + sentence, sentence, heading]
        return [part for part in dict.fromkeys(found) if part]

    def _follows(self, row: str, unit: Unit) -> bool:
        """Is this a later row of the table that was seen last?"""
        if unit.level < Level.LINE:
            return bool(self._header)
        shape = _shape(row)
        if shape[1] and shape == self._row and unit.level is Level.LINE:
            return True
        self._row, self._header = shape, row if shape[1] else ""
        return False


def _shape(row: str) -> tuple[str, int]:
    """The delimiter of a table's row and how often it has it; 0 for what is no row."""
    if len(row) > 2000 or "\n" in row:
        return "", 0
    for delimiter, least in _DELIMITERS:
        count = row.count(delimiter)
        if count >= least and (delimiter in "\t|" or f"{delimiter} " not in row):
            return delimiter, count
    return "", 0
