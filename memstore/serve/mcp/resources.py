"""MCP resources: every document of the memory, and parts of it by their characters."""

import re
from urllib.parse import quote, unquote

import mcp_types as types
from mcp.shared.exceptions import MCPError

from memstore.model.adapter import TextTokenizer
from memstore.model.texts.document_text import document_text
from memstore.serve.api_errors import ApiError
from memstore.serve.api_keys import Access
from memstore.serve.document_access import DocumentAccess
from memstore.store.memory_store import MemoryStore

_SCHEME = "memstore://documents/"
_URI = re.compile(re.escape(_SCHEME) + r"([^/?#]+)(?:/([0-9]{1,15})-([0-9]{1,15}))?")
_PAGE = 200  # resources listed at once
_LONGEST = 1_000_000  # characters of a resource
TEMPLATE = types.ResourceTemplate(
    name="a part of a document",
    uri_template=f"{_SCHEME}{{name}}/{{first}}-{{end}}",
    description="Its characters `first` up to `end`, as the spans of sources count them.",
    mime_type="text/plain",
)


class Resources:
    """The documents that an API key may read."""

    def __init__(
        self, store: MemoryStore, tokenizer: TextTokenizer, documents: DocumentAccess
    ) -> None:
        self._store, self._tokenizer, self._documents = store, tokenizer, documents

    def page(
        self, access: Access, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """A page of them. Raises MCPError for a cursor that is none."""
        cursor = params.cursor if params is not None and params.cursor else "0"
        if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 16):
            raise MCPError(types.INVALID_PARAMS, "the cursor is none that this server gave")
        names, end = self._documents.readable(access), int(cursor) + _PAGE
        resources = [
            types.Resource(name=name, uri=_uri(name), mime_type="text/plain")
            for name in names[int(cursor) : end]
        ]
        more = str(end) if end < len(names) else None
        return types.ListResourcesResult(resources=resources, next_cursor=more)

    def read(self, access: Access, uri: str) -> str:
        """The text of one. Raises ApiError for what is none, or is too long."""
        match = _URI.fullmatch(uri)
        name = unquote(match[1]) if match else ""
        if match is None or not self._documents.visible(access, name):
            raise ApiError(404, f"there is no document {uri!r}")
        first, end = (0, None) if match[2] is None else (int(match[2]), int(match[3]))
        (document,) = self._store.ready([name])
        parts, at = list[str](), 0
        for text in document_text(self._tokenizer, self._store, document):
            if end is not None and at >= end:
                break
            parts.append(text[max(0, first - at) : None if end is None else max(0, end - at)])
            at += len(text)
            if sum(map(len, parts)) > _LONGEST:
                raise ApiError(
                    413,
                    f"{name!r} is longer than {_LONGEST:,} characters; read a part of it: "
                    f"{_uri(name)}/0-{_LONGEST}",
                )
        return "".join(parts)


def _uri(name: str) -> str:
    return _SCHEME + quote(name, safe="")
