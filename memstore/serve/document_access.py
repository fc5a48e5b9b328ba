"""Which documents of the memory an API key may see, read and change."""

from memstore.disk.format.document import is_of_prompt
from memstore.serve.api_errors import not_found
from memstore.serve.api_keys import Access
from memstore.store.memory_store import MemoryStore


class DocumentAccess:
    """The documents of a memory, as those who ask may know of them: none of a prompt."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def readable(self, access: Access, names: list[str] | None = None) -> list[str]:
        """The names of the finished documents that may be read: those that are named, or all,
        oldest first. Raises ApiError (404), InvalidInput (partly read).
        """
        if names is None:
            return [document.name for document in self._store.ready() if access.sees(document.name)]
        once = list(dict.fromkeys(names))  # a name that is given often is read once
        for name in once:
            self.check(access, name)
        return [document.name for document in self._store.ready(once)] if once else []

    def visible(self, access: Access, name: str) -> bool:
        """Is there a document of this name that may be known of?"""
        return access.sees(name) and not is_of_prompt(name) and self._store.has(name)

    def check(self, access: Access, name: str) -> None:
        """Raises ApiError (404) where there is none."""
        if not self.visible(access, name):
            raise not_found("document", name)

    def writable(self, access: Access) -> bool:
        """May documents be read and forgotten?"""
        return access.write and not self._store.read_only
