"""What was said, in the server's database: a tree of turns, and conversations that stand at one of
them.
"""

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from memstore.serve.database import Database
from memstore.serve.errors import ApiError
from memstore.serve.turns import Turn, next_key, root_key

SCHEMA = """
CREATE TABLE IF NOT EXISTS turns (
    key BLOB PRIMARY KEY,           -- of all that was said up to here: see memstore.serve.turns
    parent BLOB NOT NULL,           -- the key of what was said before; the root's has no row
    origin BLOB NOT NULL,           -- the key of the first turn
    owner TEXT NOT NULL,
    question TEXT NOT NULL,
    answer TEXT NOT NULL,
    documents TEXT NOT NULL,        -- JSON: names of what did not fit into its prompt
    used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS turns_parent ON turns (parent);
CREATE INDEX IF NOT EXISTS turns_origin ON turns (origin, used);
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    head BLOB NOT NULL,             -- where it stands
    metadata TEXT NOT NULL,
    created INTEGER NOT NULL,
    used REAL NOT NULL,
    PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS conversations_head ON conversations (head);
CREATE TABLE IF NOT EXISTS stands (  -- every turn that a conversation stood at
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    conversation TEXT NOT NULL,
    key BLOB NOT NULL REFERENCES turns ON DELETE CASCADE,
    UNIQUE (owner, conversation, key),
    FOREIGN KEY (owner, conversation) REFERENCES conversations (owner, id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS stands_key ON stands (key);
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    key BLOB NOT NULL,              -- of the turn that it stands at
    input TEXT NOT NULL,            -- JSON: the items of its request
    body TEXT NOT NULL              -- JSON: as it was answered
);
CREATE INDEX IF NOT EXISTS responses_key ON responses (key);
CREATE INDEX IF NOT EXISTS responses_created ON responses (json_extract(body, '$.created_at'));
"""


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
    """The stored tree. Every call is one transaction, or none; any thread may call."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(SCHEMA)

    # Turns

    def add(self, owner: str, before: bytes, turn: Turn, documents: Iterable[str]) -> bytes:
        """Store a turn behind what has the key `before`; the key of both."""
        key, now = next_key(before, turn), time.time()
        with self._database.transaction() as database:
            parent = database.row("SELECT origin FROM turns WHERE key = ?", (before,))
            origin = key if parent is None else parent["origin"]
            database.execute(
                "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET used = excluded.used, "
                "documents = excluded.documents",
                (
                    key,
                    before,
                    origin,
                    owner,
                    turn.question,
                    turn.answer,
                    json.dumps(sorted(documents)),
                    now,
                ),
            )
        return key

    def add_all(self, owner: str, turns: Sequence[Turn], keys: Sequence[bytes]) -> None:
        """Store turns that a client says were said. keys: before the first, and after each."""
        with self._database.transaction():
            for number, turn in enumerate(turns):
                if not self.known(keys[number + 1]):
                    self.add(owner, keys[number], turn, ())

    def known(self, key: bytes) -> bool:
        """Was this said, and is it stored?"""
        return self._database.row("SELECT 1 FROM turns WHERE key = ?", (key,)) is not None

    def need(self, key: bytes, documents: Iterable[str]) -> bool:
        """Have what was said up to a key need these documents, too; is it still stored?"""
        with self._database.transaction() as database:
            row = database.row("SELECT documents FROM turns WHERE key = ?", (key,))
            if row is None:
                return False
            names = json.dumps(sorted({*json.loads(row["documents"]), *documents}))
            database.execute("UPDATE turns SET documents = ? WHERE key = ?", (names, key))
        return True

    def turns(self, key: bytes) -> list[Turn]:
        """All turns up to a key, from the first on."""
        rows = self._database.rows(
            "WITH RECURSIVE path (key, parent, question, answer, depth) AS ("
            "SELECT key, parent, question, answer, 0 FROM turns WHERE key = ? UNION ALL "
            "SELECT turns.key, turns.parent, turns.question, turns.answer, depth + 1 "
            "FROM turns JOIN path ON turns.key = path.parent) "
            "SELECT question, answer FROM path ORDER BY depth DESC",
            (key,),
        )
        return [Turn(row["question"], row["answer"]) for row in rows]

    def unused(self, seconds: float | None, most: int) -> list[bytes]:
        """Origins of conversations that were not used for so long, and of those beyond so many that
        were used last.
        """
        before = 0.0 if seconds is None else time.time() - seconds
        rows = self._database.rows(
            "SELECT origin, max(used) AS used FROM turns GROUP BY origin ORDER BY used DESC"
        )
        return [
            row["origin"] for place, row in enumerate(rows) if place >= most or row["used"] < before
        ]

    def with_documents(self) -> list[bytes]:
        """Origins of conversations that need documents, the longest unused one first."""
        rows = self._database.rows(
            "SELECT origin, max(used) AS used FROM turns GROUP BY origin "
            "HAVING max(documents <> '[]') ORDER BY used"
        )
        return [row["origin"] for row in rows]

    def keys_from(self, origin: bytes) -> list[bytes]:
        """The keys of all turns from a first one on."""
        rows = self._database.rows("SELECT key FROM turns WHERE origin = ?", (origin,))
        return [row["key"] for row in rows]

    def forget_origin(self, origin: bytes) -> list[str]:
        """Forget all that was said after a first turn, with conversations and responses; the
        names of documents that nothing else that was said needs.
        """
        with self._database.transaction() as database:
            rows = database.rows("SELECT key, documents FROM turns WHERE origin = ?", (origin,))
            for table, place in (("conversations", "head"), ("responses", "key")):
                database.execute(
                    f"DELETE FROM {table} WHERE {place} IN "
                    "(SELECT key FROM turns WHERE origin = ?)",
                    (origin,),
                )
            database.execute("DELETE FROM turns WHERE origin = ?", (origin,))
            return self.not_needed(name for row in rows for name in json.loads(row["documents"]))

    def forget_branch(self, key: bytes) -> list[str]:
        """Forget a turn, and those before it to which nothing else leads, unless something was said
        after it, or a conversation or a response stands there; the names of documents that nothing
        else needs.
        """
        found: list[str] = []
        with self._database.transaction() as database:
            while (row := database.row("SELECT * FROM turns WHERE key = ?", (key,))) is not None:
                needed = database.row(
                    "SELECT 1 FROM turns WHERE parent = ? UNION ALL "
                    "SELECT 1 FROM conversations WHERE head = ? UNION ALL "
                    "SELECT 1 FROM responses WHERE key = ?",
                    (key, key, key),
                )
                if needed is not None:
                    break
                database.execute("DELETE FROM turns WHERE key = ?", (key,))
                found += json.loads(row["documents"])
                key = row["parent"]
            return self.not_needed(found)

    def not_needed(self, names: Iterable[str]) -> list[str]:
        """Those of these documents that nothing that was said needs."""

        def needed(name: str) -> bool:
            row = self._database.row(
                "SELECT 1 FROM turns, json_each(turns.documents) AS name WHERE name.value = ?",
                (name,),
            )
            return row is not None

        return [name for name in sorted(set(names)) if not needed(name)]

    def documents(self) -> set[str]:
        """The names of all documents that something that was said needs."""
        rows = self._database.rows(
            "SELECT DISTINCT name.value AS name FROM turns, json_each(turns.documents) AS name"
        )
        return {row["name"] for row in rows}

    # Conversations with a name

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
            keys = list(dict.fromkeys([head, *(row["key"] for row in rows)]))
            database.execute("DELETE FROM conversations WHERE id = ? AND owner = ?", (name, owner))
            documents: list[str] = []
            for key in keys:
                database.execute(
                    "DELETE FROM responses WHERE key = ? AND owner = ?"
                    " AND json_extract(body, '$.conversation.id') = ?",
                    (key, owner, name),
                )
            for (
                key
            ) in keys:  # what was said last first: nothing is forgotten before what follows it
                documents += self.forget_branch(key)
            return keys, self.not_needed(documents)

    # Responses

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
            return row["key"], self.forget_branch(row["key"])

    def unused_responses(self, seconds: float | None, most: int) -> list[tuple[str, str]]:
        """(owner, id) of responses that are older than that, or beyond so many."""
        created = "json_extract(body, '$.created_at')"
        before = 0.0 if seconds is None else time.time() - seconds
        rows = self._database.rows(
            f"SELECT owner, id FROM responses WHERE {created} < ?", (before,)
        )
        rows += self._database.rows(
            f"SELECT owner, id FROM responses ORDER BY {created} DESC LIMIT -1 OFFSET ?", (most,)
        )
        return list(dict.fromkeys((row["owner"], row["id"]) for row in rows))

    def unused_names(self, seconds: float | None, most: int) -> list[tuple[str, str]]:
        """(owner, name) of conversations that nothing was said in, or that are beyond so many."""
        before = 0.0 if seconds is None else time.time() - seconds
        rows = self._database.rows("SELECT id, owner, used FROM conversations ORDER BY used DESC")
        return [
            (row["owner"], row["id"])
            for place, row in enumerate(rows)
            if place >= most or row["used"] < before
        ]


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
