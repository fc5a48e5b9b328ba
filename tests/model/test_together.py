"""Several answers generated in shared passes equal those generated alone, and one that fails does
not disturb the others.
"""

import pytest
import torch

from memstore.errors import DocumentNotFound
from memstore.model.session import read_pending
from memstore.store.memory_store import MemoryStore
from support.passage_reader import memory as choosing_memory
from support.passage_reader import reader_of
from support.tiny_model import text, tiny_model

PROMPTS = ("the old man at the gate", "a river", "in the morning the wind had turned, and we")


@pytest.fixture(scope="module", params=["landmarks", "choosing"])
def remembered(request, tmp_path_factory):
    """A model with a memory of one document."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "choosing":
        pytest.importorskip("transformers")
        reader = reader_of()
        store = choosing_memory(reader, path)
    else:
        reader = tiny_model(path)
        store = MemoryStore.create(path / "m", reader.signature)
        reader.ingest(text(400), store, name="book")
    with store:
        yield reader, store


def begun(reader, store, prompts=PROMPTS):
    """A session a prompt, and the state that its answer begins with."""
    sessions = [reader.session(store) for _ in prompts]
    return sessions, [
        session.ask(prompt, lambda: None) for session, prompt in zip(sessions, prompts)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_generated_together_equal_those_generated_alone(remembered, temperature):
    reader, store = remembered

    def answers(ahead):
        sessions, states = begun(reader, store)
        running = [  # over the ends of blocks, and of chunks
            session.generate(state, 6 + 19 * number, temperature=temperature, seed=number)
            for number, (session, state) in enumerate(zip(sessions, states))
        ]
        said: list[list[int]] = [[] for _ in running]
        while True:
            ahead(running)
            tokens = [next(one, None) for one in running]
            if tokens == [None] * len(running):
                break
            for words, token in zip(said, tokens):
                words += [] if token is None else [token]
        counted = [(session.lookups, session.read_tokens) for session in sessions]
        after = [session.feed([7, 8, 9]) for session in sessions]
        for session in sessions:
            session.close()
        return said, counted, torch.cat(after)

    *together, after = answers(read_pending)
    *alone, expected = answers(lambda running: None)
    assert together == alone
    torch.testing.assert_close(after, expected, atol=2e-5, rtol=2e-5)


def test_a_failing_answer_raises_alone_and_the_others_go_on(remembered, monkeypatch):
    reader, store = remembered
    sessions, states = begun(reader, store)
    running = [session.generate(state, 5) for session, state in zip(sessions, states)]
    expected, others = begun(reader, store)
    alone = [list(session.generate(state, 5)) for session, state in zip(expected, others)]

    def gone(layer_idx, *qkv):
        raise DocumentNotFound("it was forgotten")

    said = [[next(one)] for one in running]
    monkeypatch.setattr(sessions[1], "attend", gone)
    for _ in range(4):
        read_pending(running)
        for number in (0, 2):
            said[number] += [token for token in [next(running[number], None)] if token is not None]
    with pytest.raises(DocumentNotFound, match="forgotten"):
        next(running[1])
    assert [said[0], said[2]] == [alone[0], alone[2]]
    for session in (*sessions, *expected):
        session.close()


def test_an_unexpected_error_ends_every_answer_of_the_shared_pass(remembered, monkeypatch):
    reader, store = remembered
    sessions, states = begun(reader, store)
    running = [session.generate(state, 5) for session, state in zip(sessions, states)]
    for one in running:
        next(one)

    def broken(layer_idx, *qkv):
        raise ZeroDivisionError

    monkeypatch.setattr(sessions[1], "attend", broken)
    read_pending(running)
    for one in running:
        with pytest.raises(ZeroDivisionError):
            next(one)
    for session in sessions:
        session.close()
