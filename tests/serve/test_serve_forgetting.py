"""Conversations that several go on with at once, and those that are forgotten: no turn is lost, and
nothing is left of what shall be forgotten.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.serve.api_errors import ApiError
from memstore.serve.state.turns import Turn
from support.asked_service import Asked, asked
from support.diary import QUESTION

NEXT = "What is the price of the brown mare?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with asked(tmp_path_factory.mktemp("asked") / "mem") as made:
        yield made


def questions(server: Asked) -> list[str]:
    """All that is stored of what was asked."""
    rows = server.service.database.rows("SELECT question FROM turns ORDER BY question")
    return [row["question"] for row in rows]


def respond(server: Asked, name: str, text: str) -> None:
    """Answer in a conversation, and store the response, as its endpoint does."""
    keep(server, name, server.said_in(name, text).key)


def keep(server: Asked, name: str, key: bytes) -> None:
    body = {"id": f"resp_{secrets.token_hex(4)}", "conversation": {"id": name}, "created_at": 0}
    server.service.conversations.add_response("local", key, [], body)


def responses(server: Asked) -> int:
    return len(server.service.database.rows("SELECT * FROM responses"))


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
    server.service.forgetting.conversation("local", "both")
    assert questions(server) == []
    server.said_in("both", NEXT)  # it is free for another of this name
    server.service.forgetting.conversation("local", "both")


def test_an_answer_that_is_given_up_lets_its_conversation_go(server: Asked) -> None:
    given_up = server.begin_in("up", QUESTION)
    server.step(given_up)
    server.service.worker.call("test/1", given_up.close).result(60)
    server.said_in("up", QUESTION)
    server.service.forgetting.conversation("local", "up")
    assert questions(server) == []


def test_a_conversation_is_forgotten_with_what_was_said_otherwise_before(server: Asked) -> None:
    first = server.said_in("edited", "Zebra one?")
    server.said_in("edited", "Zebra two?", (Turn("Zebra one?", first.text),))
    server.said_in("edited", "Zebra two, in other words?", (Turn("Zebra one?", first.text),))
    server.said_in("edited", "Zebra one, in other words?", ())
    other = server.said_in("other", "Zebra one?")  # is said elsewhere, too
    assert len(questions(server)) == 4
    server.service.forgetting.conversation("local", "edited")
    assert questions(server) == ["Zebra one?"] and server.service.tree.known(other.key)
    server.service.forgetting.conversation("local", "other")
    assert questions(server) == []


def test_a_conversation_is_forgotten_with_its_responses(server: Asked) -> None:
    respond(server, "asked", QUESTION)
    respond(server, "asked", NEXT)
    respond(server, "asked", "And then?")
    # as one that an older server wrote, which did not note where a conversation had stood
    server.service.database.execute("DELETE FROM stands")
    assert responses(server) == 3
    server.service.forgetting.conversation("local", "asked")
    assert questions(server) == [] and responses(server) == 0


def test_a_response_that_comes_after_its_conversation_was_forgotten_is_not_stored(
    server: Asked,
) -> None:
    key = server.said_in("late", QUESTION).key
    server.said_in("other", QUESTION)  # the turn is there still
    server.service.forgetting.conversation("local", "late")
    assert server.service.tree.known(key)
    keep(server, "late", key)
    server.service.forgetting.conversation("local", "other")
    keep(server, "late", key)
    assert responses(server) == 0 and questions(server) == []


def test_what_is_forgotten_while_it_is_answered_is_not_stored_again(server: Asked) -> None:
    server.said_in("gone", QUESTION)
    answer = server.begin_in("gone", NEXT)
    server.step(answer)
    server.service.forgetting.conversation("local", "gone")
    warm = server.service.sessions.count
    outcome = server.finish(answer)
    assert outcome.text and outcome.key == b"" and questions(server) == []
    assert server.service.sessions.count == warm


def test_what_was_forgotten_is_not_said_in_another_conversation_of_its_name(server: Asked) -> None:
    answer = server.begin_in("again", QUESTION)
    server.step(answer)
    server.service.forgetting.conversation("local", "again")
    anew = server.begin_in("again", NEXT)  # at once
    assert server.finish(answer).key == b"" and questions(server) == []
    assert server.finish(anew).key
    assert questions(server) == [NEXT]
    server.service.forgetting.conversation("local", "again")


def test_responses_that_are_old_or_too_many_are_forgotten(tmp_path: Path) -> None:
    with asked(tmp_path / "mem", conversations=1, keep_seconds=1000.0) as made:
        service = made.service
        now = made.said_in("one", QUESTION).key
        times = {f"resp_{number}": 2_000_000_000 + number for number in range(20)}
        for id_, created in {**times, "resp_old": 1}.items():
            body = {"id": id_, "conversation": None, "created_at": created}
            service.conversations.add_response("local", now, [], body)
        made.collect_garbage()
        left = {row["id"] for row in service.database.rows("SELECT id FROM responses")}
        assert left == {f"resp_{number}" for number in range(4, 20)}
        assert service.tree.known(now)
