"""Tables of named conversations and of responses: each stands at a node of the tree of turns."""

import json
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from sqlite3 import Row
from typing import Annotated, Any

from pydantic import Field

from memstore.serve.api_errors import ApiError, not_found
from memstore.serve.state.database import Database
from memstore.serve.state.turn_tree import TurnTree, size_of
from memstore.serve.state.turns import Turn, keys_of, root_key

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
        # by owner and name, of those that a request goes on with: set where one is forgotten, since
        # another may have its name then. The model's thread alone adds and removes.
        self._continued: dict[tuple[str, str], threading.Event] = {}

    @contextmanager
    def continuing(self, owner: str, conversation: Conversation | None) -> Iterator[None]:
        """Nobody else goes on with a conversation within, of which one turn would be lost. Raises
        ApiError: 409 where somebody does, or did; 404 where it was forgotten.
        """
        if conversation is None:
            yield
            return
        who = owner, conversation.id
        stands = self.get(*who).head == conversation.head
        if who in self._continued or not stands:
            raise ApiError(
                409,
                f"another request goes on with conversation {conversation.id!r}; ask again when it "
                "is answered",
                code="conversation_locked",
            )
        self._continued[who] = threading.Event()
        try:
            yield
        finally:
            del self._continued[who]

    def add_turn(
        self,
        owner: str,
        before: Sequence[Turn],
        turn: Turn,
        documents: Iterable[str],
        conversation: Conversation | None = None,
    ) -> bytes:
        """Store a turn behind others, which are stored where they are not yet; its key, or none
        where the conversation that goes on with it was forgotten meanwhile. documents: names of
        what did not fit into its prompt.
        """
        with self._database.transaction():
            if conversation is not None:
                current = self.find(owner, conversation.id)
                forgotten = self._continued[owner, conversation.id].is_set()
                if forgotten or current is None or current.head != conversation.head:
                    return b""
            keys = keys_of(owner, before)
            self._tree.add_all(owner, before, keys)
            key = self._tree.add(owner, keys[-1], turn, documents)
            if conversation is not None:
                self._move(owner, conversation.id, key)
        return key

    def turns(self, conversation: Conversation) -> list[Turn]:
        """All turns of a conversation, the first one first."""
        return self._tree.turns(conversation.head)

    def create(
        self, owner: str, name: str | None = None, metadata: dict[str, str] | None = None
    ) -> Conversation:
        """A new conversation, without turns."""
        made = Conversation(
            name or f"conv_{secrets.token_hex(16)}",
            root_key(owner),
            metadata or {},
            int(time.time()),
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
        conversation = self.find(owner, name)
        if conversation is None:
            raise not_found("conversation", name)
        return conversation

    def get_or_create(self, owner: str, name: str) -> Conversation:
        """An owner's conversation of this name, new if there is none."""
        with self._database.transaction():
            return self.find(owner, name) or self.create(owner, name)

    def _move(self, owner: str, name: str, head: bytes) -> None:
        """Have a conversation stand at another turn."""
        self._database.execute(
            "UPDATE conversations SET head = ?, used = ? WHERE id = ? AND owner = ?",
            (head, time.time(), name, owner),
        )
        self._database.execute(
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
        """Forget a conversation with its responses, and the turns that are its alone, also those
        that were edited; the keys of the turns that it stood at, and the names of documents that
        nothing else needs. Raises ApiError (404).
        """
        continued = self._continued.get((owner, name))
        if continued is not None:
            continued.set()
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

    def response(self, owner: str, name: str) -> Row:
        """The row of a response: "key" of its turn, "input" and "body" in JSON. Raises ApiError
        (404).
        """
        row = self._database.row(
            "SELECT * FROM responses WHERE id = ? AND owner = ?", (name, owner)
        )
        if row is None:
            raise not_found("response", name)
        return row

    def turns_of_response(self, owner: str, name: str) -> list[Turn]:
        """All turns up to a response. Raises ApiError (404)."""
        return self._tree.turns(self.response(owner, name)["key"])

    def forget_response(self, owner: str, name: str) -> tuple[bytes, list[str]]:
        """Forget a response, and the turns that are its alone; the key of its turn, and the names
        of documents that nothing else needs. Raises ApiError (404).
        """
        with self._database.transaction() as database:
            key: bytes = self.response(owner, name)["key"]
            database.execute("DELETE FROM responses WHERE id = ?", (name,))
            return key, self._tree.forget_branch(key)

    def unused_responses(self, seconds: float | None, most: int) -> list[tuple[str, str]]:
        """(owner, id) of responses that are older than that, or beyond so many of one owner's."""
        return self._unused("responses", "json_extract(body, '$.created_at')", seconds, most)

    def unused_names(self, seconds: float | None, most: int) -> list[tuple[str, str]]:
        """(owner, name) of conversations that had no turn for so long, or that are beyond
        so many of one owner's.
        """
        return self._unused("conversations", "used", seconds, most)

    def _unused(
        self, table: str, used: str, seconds: float | None, most: int
    ) -> list[tuple[str, str]]:
        before = 0.0 if seconds is None else time.time() - seconds
        rows = self._database.rows(
            f"SELECT owner, id FROM (SELECT owner, id, {used} AS used, row_number() OVER"
            f" (PARTITION BY owner ORDER BY {used} DESC, rowid DESC) AS rank FROM {table})"
            " WHERE rank > ? OR used < ?",
            (most, before),
        )
        return [(row["owner"], row["id"]) for row in rows]
