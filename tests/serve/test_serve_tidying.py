"""What a server forgets by itself, and what it keeps of conversations that were left."""

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from memstore.disk.format.document import PROMPT, is_of_prompt
from memstore.errors import InvalidInput
from memstore.serve.api_errors import ApiError
from memstore.serve.background import garbage_collection
from memstore.serve.state.database import Database
from memstore.serve.state.turn_tree import TurnTree
from memstore.serve.state.turns import Turn
from support.asked_service import asked
from support.diary import ANSWER, LETTER, QUESTION

NEXT = "What is the price of the brown mare?"


def an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used for the last time until now was so long ago."""
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    monkeypatch.setattr("memstore.serve.answering.warm_sessions.time", later)


def test_a_conversation_that_is_left_becomes_a_document_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked(tmp_path / "mem") as server:
        for question in (QUESTION, NEXT):
            server.said_in("barns", question)
        server.said_in("brief", "Who?")
        an_hour_later(monkeypatch)
        server.collect_garbage()
        assert server.service.sessions.count == 0
        (name,) = server.hidden  # what fits into a prompt is none
        server.collect_garbage()
        third = server.said_in("barns", QUESTION)
        assert third.cached_tokens == server.service.store.document(name).tokens
        assert third.text.endswith(ANSWER) and server.hidden == [name]
        server.service.forgetting.conversation("local", "barns")
        assert server.hidden == []


def test_what_is_forgotten_while_it_becomes_a_document_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked(tmp_path / "mem") as server:
        service = server.service
        for question in (QUESTION, NEXT):
            server.said_in("barns", question)
        an_hour_later(monkeypatch)
        service.worker.call("test/1", service.sessions.evict).result(60)
        service.worker.call("test/1", service.garbage.remember).result(60)
        service.forgetting.conversation("local", "barns")
        server.collect_garbage()
        assert not [row for row in service.store.documents() if is_of_prompt(row.name)]


def test_who_goes_on_takes_over_what_is_read_in_the_background(tmp_path: Path) -> None:
    with asked(tmp_path / "mem") as server:
        service, sessions = server.service, server.service.sessions
        for question in (QUESTION, NEXT):
            server.said_in("barns", question)
        service.worker.call("test/1", sessions.forget).result(60)
        turns = service.tree.turns(service.conversations.get("local", "barns").head)
        (text,) = sessions.window.plan("local", turns, "").documents

        behind = sessions.read_behind(text)
        service.worker.call("test/1", lambda: next(behind)).result(60)
        assert server.said_in("barns", QUESTION).text.endswith(ANSWER)
        assert server.hidden == [text.name]
        assert service.worker.call("test/1", lambda: [*behind]).result(60) == []


def test_what_somebody_waits_for_is_not_read_in_the_background_too(tmp_path: Path) -> None:
    with asked(tmp_path / "mem") as server:
        sessions, turns = server.service.sessions, [Turn(QUESTION, LETTER)]

        def both() -> tuple[list[None], str]:
            waited_for = sessions.begin("local", turns, NEXT, ["diary"])
            next(waited_for)
            (text,) = sessions.window.plan("local", turns, "").documents
            behind = [*sessions.read_behind(text)]
            for _ in waited_for:
                pass
            return behind, text.name

        behind, name = server.service.worker.call("test/1", both).result(60)
        assert behind == [] and server.hidden == [name]


def test_beyond_so_many_the_longest_unused_conversations_are_forgotten(tmp_path: Path) -> None:
    with asked(tmp_path / "mem", conversations=2) as server:
        known = server.service.conversations
        for name in ("first", "second", "third"):
            server.said_in(name, f"{name.title()}: who?")
        server.said_in("first", NEXT)
        server.collect_garbage()
        assert known.find("local", "second") is None
        assert len(server.service.tree.turns(known.get("local", "first").head)) == 2
        assert len(server.service.tree.turns(known.get("local", "third").head)) == 1
        assert server.service.sessions.count == 2  # that of the forgotten one is closed


def test_who_stores_much_has_his_own_forgotten_and_nothing_of_others(tmp_path: Path) -> None:
    with asked(tmp_path / "mem", conversations=2, conversations_bytes=100_000) as server:
        service = server.service
        known, tree = service.conversations, service.tree

        def say(owner: str, text: str) -> bytes:
            """As a response in a conversation of its own does."""
            made = known.create(owner)
            with known.continuing(owner, made):
                key = known.add_turn(owner, [], Turn(text, "Yes."), [], made)
            body = {"id": key.hex(), "created_at": 1, "conversation": {"id": made.id}}
            known.add_response(owner, key, [], body)
            return key

        kept = [say("few", text) for text in ("a", "b")]
        for number in range(40):
            known.create("crowd")
            say("crowd", f"{number}")
        server.collect_garbage()
        assert all(map(tree.known, kept))
        rows = service.database.rows("SELECT owner, COUNT(*) AS n FROM responses GROUP BY owner")
        assert {row["owner"]: row["n"] for row in rows} == {"few": 2, "crowd": 1}
        rows = service.database.rows("SELECT owner FROM conversations")
        assert Counter(row["owner"] for row in rows) == {"few": 2, "crowd": 2}

        long, longer = say("crowd", "x" * 60_000), say("crowd", "y" * 60_000)
        server.collect_garbage()
        assert all(map(tree.known, kept)) and tree.known(longer) and not tree.known(long)


def test_a_prompt_beyond_the_quota_is_refused_while_it_is_read(tmp_path: Path) -> None:
    with asked(tmp_path / "mem", conversations_bytes=1000) as server:
        with pytest.raises(ApiError, match="ask with less text") as refused:
            server.ask(f"{LETTER * 8}\n\n{QUESTION}")
        assert refused.value.status == 413 and server.hidden == []
        assert server.ask(QUESTION).text == ANSWER


def test_a_database_of_another_format_is_refused_by_one_line(tmp_path: Path) -> None:
    before = Database(tmp_path)
    TurnTree(before)
    before.execute("PRAGMA user_version = 0")
    before.close()
    for _ in range(2):  # it is closed again
        with pytest.raises(InvalidInput, match="another version of memstore; move it away"):
            Database(tmp_path)


def test_what_was_not_used_for_so_long_is_forgotten_with_its_documents(tmp_path: Path) -> None:
    with asked(tmp_path / "mem", keep_seconds=1000.0) as server:
        service = server.service
        old = server.said_in("old", f"{LETTER}\n\n{QUESTION}")
        assert len(server.hidden) == 1
        service.database.execute("UPDATE turns SET used = used - 2000")
        service.database.execute("UPDATE conversations SET used = used - 2000")
        new = server.said_in("new", NEXT)
        server.collect_garbage()
        assert server.hidden == [] and not service.tree.known(old.key)
        assert service.tree.known(new.key)
        with pytest.raises(ApiError):
            service.conversations.get("local", "old")


def test_conversations_take_no_more_than_their_quota(tmp_path: Path) -> None:
    with asked(tmp_path / "one") as server:
        server.ask(f"{LETTER}\n\n{QUESTION}")
        (only,) = server.hidden
        size = server.service.store.document(only).bytes
    with asked(tmp_path / "mem", conversations_bytes=size + size // 2) as server:
        server.ask(f"{LETTER}\n\n{QUESTION}")
        (first,) = server.hidden
        server.collect_garbage()
        assert server.hidden == [first]
        kept = server.ask(f"A second one. {LETTER}\n\n{QUESTION}")
        server.collect_garbage()
        (second,) = server.hidden
        assert second != first and server.service.tree.known(kept.key)


def test_the_document_of_a_prompt_that_was_never_answered_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked(tmp_path / "mem") as server:
        server.service.reader.ingest(LETTER, server.service.store, name=PROMPT + "0" * 32)
        server.ask(f"{LETTER}\n\n{QUESTION}")
        server.collect_garbage()
        assert len(server.hidden) == 2  # it may be one that is being answered
        monkeypatch.setattr(garbage_collection, "UNCLAIMED", -1.0)
        server.collect_garbage()
        assert len(server.hidden) == 1 and server.hidden != [PROMPT + "0" * 32]
