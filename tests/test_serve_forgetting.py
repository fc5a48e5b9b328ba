"""Conversations that several go on with at once, and those that are forgotten: no turn is lost, and
nothing is left of what shall be forgotten.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from asked_service import Asked, asked
from diary import QUESTION

from memstore.serve.errors import ApiError
from memstore.serve.turns import Turn

NEXT = "What is the price of the brown mare?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with asked(tmp_path_factory.mktemp("asked") / "mem") as made:
        yield made


def questions(server: Asked) -> list[str]:
    """All that is stored of what was asked."""
    rows = server.service.database.rows("SELECT question FROM turns ORDER BY question")
    return [row["question"] for row in rows]


def respond(server: Asked, name: str, text: str, created: float = 0.0) -> None:
    """Store a response of a conversation, as one that was asked by its endpoint is."""
    outcome = server.said_in(name, text)
    body = json.dumps({"conversation": {"id": name}, "created_at": created})
    values = f"resp_{text}_{created}", "local", outcome.key, "[]", body
    server.service.database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", values)


def test_who_asks_in_a_conversation_that_is_being_answered_in_is_told_so(server: Asked) -> None:
    first, second = server.begin_in("both", QUESTION), server.begin_in("both", NEXT)
    server.step(first)
    with pytest.raises(ApiError) as refused:
        server.step(second)
    assert (refused.value.status, refused.value.code) == (409, "conversation_locked")
    server.finish(first)
    late = server.begin_in("both", NEXT, ())
    server.said_in("both", "And then?")
    with pytest.raises(ApiError, match="another request"):  # it would lose that turn
        server.step(late)
    server.said_in("both", NEXT)
    assert questions(server) == sorted([QUESTION, "And then?", NEXT])
    server.service.forget_conversation("local", "both")
    assert questions(server) == [] and not server.service.conversing


def test_an_answer_that_is_given_up_lets_its_conversation_go(server: Asked) -> None:
    given_up = server.begin_in("up", QUESTION)
    server.step(given_up)
    server.service.worker.call("test/1", given_up.close).result(60)
    server.said_in("up", QUESTION)
    server.service.forget_conversation("local", "up")
    assert questions(server) == []


def test_a_conversation_is_forgotten_with_what_was_said_otherwise_before(server: Asked) -> None:
    first = server.said_in("edited", "Zebra one?")
    server.said_in("edited", "Zebra two?", (Turn("Zebra one?", first.text),))
    server.said_in("edited", "Zebra two, in other words?", (Turn("Zebra one?", first.text),))
    server.said_in("edited", "Zebra one, in other words?", ())
    other = server.said_in("other", "Zebra one?")  # is said elsewhere, too
    assert len(questions(server)) == 4
    server.service.forget_conversation("local", "edited")
    assert questions(server) == ["Zebra one?"] and server.service.tree.known(other.key)
    server.service.forget_conversation("local", "other")
    assert questions(server) == []


def test_a_conversation_is_forgotten_with_its_responses(server: Asked) -> None:
    respond(server, "asked", QUESTION)
    respond(server, "asked", NEXT)
    server.service.forget_conversation("local", "asked")
    assert questions(server) == []
    assert server.service.database.rows("SELECT * FROM responses") == []


def test_what_is_forgotten_while_it_is_answered_is_not_stored_again(server: Asked) -> None:
    server.said_in("gone", QUESTION)
    answer = server.begin_in("gone", NEXT)
    server.step(answer)
    server.service.forget_conversation("local", "gone")
    warm = server.service.sessions.count
    outcome = server.finish(answer)
    assert outcome.text and outcome.key == b"" and questions(server) == []
    assert server.service.sessions.count == warm


def test_responses_that_are_old_or_too_many_are_forgotten(tmp_path: Path) -> None:
    with asked(tmp_path / "mem", conversations=1, keep_seconds=1000.0) as made:
        service = made.service
        now = made.said_in("one", QUESTION).key
        body = '{"created_at": %d}'
        for number in range(20):
            values = f"resp_{number}", "local", now, "[]", body % (2_000_000_000 + number)
            service.database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", values)
        values = "resp_old", "local", now, "[]", body % 1
        service.database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", values)
        made.tidy()
        left = {row["id"] for row in service.database.rows("SELECT id FROM responses")}
        assert left == {f"resp_{number}" for number in range(4, 20)}
        assert service.tree.known(now)
