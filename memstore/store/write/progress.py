"""How far the writing of a document is, and what of it is read again where it is appended to."""

from dataclasses import replace

from memstore.disk.format.document import Document
from memstore.disk.format.passage_parts import Passage
from memstore.disk.tables.catalog import Catalog
from memstore.store.stored_passages import Continued
from memstore.store.stored_tokens import TokenSpan, read_tokens
from memstore.store.write.commits import Commits


class Progress:
    """What a writer tells of its document."""

    _catalog: Catalog
    _commits: Commits
    _before: Continued | None  # of a document of passages, what it has
    _blocks: int
    _tokens: int
    _characters: int

    @property
    def document(self) -> Document:
        """The document as committed so far; where it is appended to, before the first commit,
        without what will be replaced.
        """
        row, base = self._commits.row, self._commits.base
        if self._commits.cut:
            return replace(row, blocks=base, tokens=self._commits.base_tokens)
        return row

    @property
    def blocks(self) -> int:
        """Blocks so far, staged ones included: the number of the next block."""
        return self._blocks

    @property
    def tokens(self) -> int:
        """Content tokens so far, staged ones included: continue reading from here."""
        return self._tokens

    @property
    def base_tokens(self) -> int:
        """Tokens that the document had before it was appended to; 0 otherwise."""
        return self._commits.row.appended_to

    @property
    def characters(self) -> int:
        """Of a document of passages, its characters up to the end of the last one so far, staged
        ones included: continue reading from here.
        """
        return self._characters

    @property
    def base_characters(self) -> int:
        """Of a document of passages, its characters before it was appended to, tail and all: where
        what is appended begins; 0 otherwise.
        """
        return self._commits.row.appended_at

    def replaced_passages(self) -> list[Passage]:
        """The last passage of a document that is appended to, to be read again in front of what is
        appended, after which the writer has not committed yet; its gap begins at `characters`.
        """
        return [] if self._before is None or not self._commits.cut else self._before.replaced

    def replaced_tail(self) -> str:
        """The text that stood behind that passage, in front of what is appended."""
        return "" if self._before is None else self._before.tail

    def replaced_tokens(self) -> TokenSpan:
        """Stored tokens behind `tokens`, and where their characters begin: to be read again with
        what is appended.

        There are none but in an append that has not committed yet, where the document ended within
        a chunk; where the characters begin is told even so.
        """
        with self._catalog.database.read() as txn:
            return read_tokens(self._catalog, txn, self._commits.row, self._tokens)
