"""The tree of turns in the server's database: each stands behind the turn before it."""

import json
import time
from collections.abc import Iterable, Sequence

from memstore.serve.state.database import Database
from memstore.serve.state.turns import Turn, next_key

SCHEMA = """
CREATE TABLE IF NOT EXISTS turns (
    key BLOB PRIMARY KEY,           -- of the history up to here: see turns.py
    parent BLOB NOT NULL,           -- the key of the turn before; the root's has no row
    origin BLOB NOT NULL,           -- the key of the first turn
    owner TEXT NOT NULL,
    question TEXT NOT NULL,
    answer TEXT NOT NULL,
    documents TEXT NOT NULL,        -- JSON: names of what did not fit into its prompt
    used REAL NOT NULL,
    size INTEGER NOT NULL           -- bytes of its texts
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS turns_parent ON turns (parent);
CREATE INDEX IF NOT EXISTS turns_origin ON turns (origin, used);
CREATE INDEX IF NOT EXISTS turns_owner ON turns (owner, size);
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
    body TEXT NOT NULL,             -- JSON: as it was answered
    size INTEGER NOT NULL           -- bytes of both
);
CREATE INDEX IF NOT EXISTS responses_owner ON responses (owner, size);
CREATE INDEX IF NOT EXISTS responses_key ON responses (key);
CREATE INDEX IF NOT EXISTS responses_conversation
    ON responses (json_extract(body, '$.conversation.id'));
CREATE INDEX IF NOT EXISTS responses_created ON responses (json_extract(body, '$.created_at'));
"""


class TurnTree:
    """The stored turns. Every call is one transaction, or none; any thread may call.

    A turn stays as long as a turn stands behind it, or a conversation or a response stands
    there (memstore.serve.state.conversations).
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(SCHEMA)

    def add(self, owner: str, before: bytes, turn: Turn, documents: Iterable[str]) -> bytes:
        """Store a turn behind what has the key `before`; the key of both."""
        key, now = next_key(before, turn), time.time()
        with self._database.transaction() as database:
            parent = database.row("SELECT origin FROM turns WHERE key = ?", (before,))
            origin = key if parent is None else parent["origin"]
            database.execute(
                "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
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
                    size_of(turn.question, turn.answer),
                ),
            )
        return key

    def add_all(self, owner: str, turns: Sequence[Turn], keys: Sequence[bytes]) -> None:
        """Store the turns of a client's history. keys: before the first, and after each."""
        with self._database.transaction():
            for number, turn in enumerate(turns):
                if not self.known(keys[number + 1]):
                    self.add(owner, keys[number], turn, ())

    def known(self, key: bytes) -> bool:
        """Is this turn stored?"""
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
        """Origins of conversations that were not used for so long, and of those beyond so many of
        one owner's that were used last.
        """
        before = 0.0 if seconds is None else time.time() - seconds
        rows = self._database.rows(
            "SELECT origin FROM (SELECT origin, used, row_number() OVER"
            " (PARTITION BY owner ORDER BY used DESC) AS rank FROM"
            " (SELECT origin, owner, max(used) AS used FROM turns GROUP BY origin))"
            " WHERE rank > ? OR used < ?",
            (most, before),
        )
        return [row["origin"] for row in rows]

    def origins(self, owner: str) -> list[bytes]:
        """Origins of an owner's conversations, the longest unused one first."""
        rows = self._database.rows(
            "SELECT origin, max(used) AS used FROM turns WHERE owner = ? GROUP BY origin"
            " ORDER BY used",
            (owner,),
        )
        return [row["origin"] for row in rows]

    def sizes(self) -> dict[str, int]:
        """Bytes of what was said and answered, by owner."""
        rows = self._database.rows(
            "SELECT owner, sum(size) AS size FROM (SELECT owner, size FROM turns UNION ALL"
            " SELECT owner, size FROM responses) GROUP BY owner"
        )
        return {row["owner"]: row["size"] for row in rows}

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
        documents: list[str] = []
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
                documents += json.loads(row["documents"])
                key = row["parent"]
            return self.not_needed(documents)

    def not_needed(self, names: Iterable[str]) -> list[str]:
        """Those of these documents that nothing that was said needs."""

        def needed(name: str) -> bool:
            row = self._database.row(
                "SELECT 1 FROM turns, json_each(turns.documents) AS name WHERE name.value = ?",
                (name,),
            )
            return row is not None

        return [name for name in sorted(set(names)) if not needed(name)]

    def documents(self) -> dict[str, str]:
        """The names of all documents that something that was said needs, and whose they are."""
        rows = self._database.rows(
            "SELECT DISTINCT name.value AS name, owner FROM turns, json_each(turns.documents)"
            " AS name"
        )
        return {row["name"]: row["owner"] for row in rows}


def size_of(*texts: str) -> int:
    """Bytes of texts, as they are stored."""
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)
