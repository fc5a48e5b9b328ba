"""Conversations that have a name, and responses: each stands at a turn of what was said."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from memstore.serve.api_errors import ApiError
from memstore.serve.state.database import Database
from memstore.serve.state.turn_tree import TurnTree, size_of
from memstore.serve.state.turns import root_key

ConversationId = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\w.:@-]+$")]
"""A name that a client may give to a conversation."""


@dataclass(frozen=True)
class Conversation:
    """A conversation with a name."""

    id: str
    head: bytes
    metadata: dict[str, str]
    created: int


class Conversations:
    """Those that are stored, in tables of the tree. Every call is one transaction, or none; any
    thread may call.
    """

    def __init__(self, database: Database, tree: TurnTree) -> None:
        """tree: of the same database."""
        self._database, self._tree = database, tree

    def create(
        self, owner: str, name: str | None = None, metadata: dict[str, str] | None = None
    ) -> Conversation:
        """A new conversation, of which nothing was said yet."""
        made = Conversation(
            name or f"conv_{secrets.token_hex(16)}", root_key(owner), metadata or {}, _now()
        )
        values = (made.id, owner, made.head, json.dumps(made.metadata), made.created, time.time())
        self._database.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)", values)
        return made

    def find(self, owner: str, name: str) -> Conversation | None:
        """An owner's conversation of this name."""
        row = self._database.row(
            "SELECT * FROM conversations WHERE id = ? AND owner = ?", (name, owner)
        )
        if row is None:
            return None
        return Conversation(name, row["head"], json.loads(row["metadata"]), row["created"])

    def get(self, owner: str, name: str) -> Conversation:
        """The same. Raises ApiError (404)."""
        found = self.find(owner, name)
        if found is None:
            raise ApiError(404, f"no conversation {name!r}", code="not_found")
        return found

    def found_or_created(self, owner: str, name: str) -> Conversation:
        """An owner's conversation of this name, new if there is none."""
        with self._database.transaction():
            return self.find(owner, name) or self.create(owner, name)

    def stands(self, owner: str, conversation: Conversation) -> bool:
        """Is it there still, and stands where it stood?"""
        found = self.find(owner, conversation.id)
        return found is not None and found.head == conversation.head

    def move(self, owner: str, name: str, head: bytes) -> None:
        """Have a conversation stand where all of `head` was said."""
        with self._database.transaction() as database:
            database.execute(
                "UPDATE conversations SET head = ?, used = ? WHERE id = ? AND owner = ?",
                (head, time.time(), name, owner),
            )
            database.execute(
                "INSERT OR IGNORE INTO stands (owner, conversation, key) VALUES (?, ?, ?)",
                (owner, name, head),
            )

    def describe(self, owner: str, name: str, metadata: dict[str, str]) -> Conversation:
        """Give a conversation other metadata. Raises ApiError (404)."""
        self.get(owner, name)
        self._database.execute(
            "UPDATE conversations SET metadata = ? WHERE id = ? AND owner = ?",
            (json.dumps(metadata), name, owner),
        )
        return self.get(owner, name)

    def forget(self, owner: str, name: str) -> tuple[list[bytes], list[str]]:
        """Forget a conversation with its responses, and what was said in it alone, also before it
        was said otherwise; the keys of the turns that it stood at, and the names of documents that
        nothing else needs. Raises ApiError (404).
        """
        with self._database.transaction() as database:
            head = self.get(owner, name).head
            rows = database.rows(
                "SELECT key FROM stands WHERE owner = ? AND conversation = ? ORDER BY number DESC",
                (owner, name),
            )
            its = "FROM responses WHERE owner = ? AND json_extract(body, '$.conversation.id') = ?"
            rows += database.rows(f"SELECT key {its} ORDER BY rowid DESC", (owner, name))
            keys = list(dict.fromkeys([head, *(row["key"] for row in rows)]))
            database.execute("DELETE FROM conversations WHERE id = ? AND owner = ?", (name, owner))
            database.execute(f"DELETE {its}", (owner, name))
            documents: list[str] = []
            for key in keys:  # the latest first: nothing goes before what follows it
                documents += self._tree.forget_branch(key)
            return keys, self._tree.not_needed(documents)

    # Responses

    def add_response(
        self, owner: str, key: bytes, items: Sequence[Any], body: Mapping[str, Any]
    ) -> None:
        """Store a response that stands at a turn, with the items of its request; not where the
        turn, or its conversation, was forgotten meanwhile.
        """
        conversation = body["conversation"]
        with self._database.transaction() as database:
            if self._tree.known(key) and (
                conversation is None or self.find(owner, conversation["id"]) is not None
            ):
                texts = json.dumps(items), json.dumps(body)
                values = body["id"], owner, key, *texts, size_of(*texts)
                database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", values)

    def forget_response(self, owner: str, name: str) -> tuple[bytes, list[str]] | None:
        """Forget a response, and what was said for it alone; the key of its turn, and the names of
        documents that nothing else needs. None if there is none.
        """
        with self._database.transaction() as database:
            row = database.row(
                "SELECT key FROM responses WHERE id = ? AND owner = ?", (name, owner)
            )
            if row is None:
                return None
            database.execute("DELETE FROM responses WHERE id = ?", (name,))
            return row["key"], self._tree.forget_branch(row["key"])

    def unused_responses(self, seconds: float | None, most: int) -> list[tuple[str, str]]:
        """(owner, id) of responses that are older than that, or beyond so many of one owner's."""
        return self._unused("responses", "json_extract(body, '$.created_at')", seconds, most)

    def unused_names(self, seconds: float | None, most: int) -> list[tuple[str, str]]:
        """(owner, name) of conversations that nothing was said in for so long, or that are beyond
        so many of one owner's.
        """
        return self._unused("conversations", "used", seconds, most)

    def _unused(
        self, table: str, used: str, seconds: float | None, most: int
    ) -> list[tuple[str, str]]:
        before = 0.0 if seconds is None else time.time() - seconds
        rows = self._database.rows(
            f"SELECT owner, id FROM (SELECT owner, id, {used} AS used, row_number() OVER"
            f" (PARTITION BY owner ORDER BY {used} DESC, rowid DESC) AS place FROM {table})"
            " WHERE place > ? OR used < ?",
            (most, before),
        )
        return [(row["owner"], row["id"]) for row in rows]


def _now() -> int:
    return int(time.time())


def told(conversation: Conversation) -> dict[str, Any]:
    """A conversation as OpenAI's API describes it."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": conversation.metadata,
    }
