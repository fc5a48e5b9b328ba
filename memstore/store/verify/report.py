"""The result of a verification."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written."""

    document: int | None  # id; None = the memory itself
    name: str  # of the document, as far as it can be read
    what: str


@dataclass(frozen=True)
class Report:
    """The result of a verification; `documents`, `records` and `bytes` count what is whole."""

    documents: int = 0
    records: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # names of the documents that repair removed

    @property
    def clean(self) -> bool:
        """Is everything as it was written?"""
        return not self.problems
