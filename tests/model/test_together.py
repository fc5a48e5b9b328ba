"""Several answers generated in shared passes equal those generated alone, and one that fails does
not disturb the others.
"""

from contextlib import ExitStack, closing, contextmanager
from itertools import islice

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


@contextmanager
def begun(remembered, lengths=(5, 5, 5), temperature=0.0):
    """Context with answers of these lengths to the prompts, each in a session of its own."""
    reader, store = remembered
    with ExitStack() as stack:
        running = []
        for seed, (prompt, length) in enumerate(zip(PROMPTS, lengths)):
            session = stack.enter_context(closing(reader.session(store)))
            state = session.ask(prompt, lambda: None)
            running.append(session.generate(state, length, temperature=temperature, seed=seed))
        yield running


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_generated_together_equal_those_generated_alone(remembered, temperature):
    def answers(running, ahead):
        said: list[list[int]] = [[] for _ in running]
        while True:
            ahead(running)
            tokens = [next(one, None) for one in running]
            if tokens == [None] * len(running):
                break
            for words, token in zip(said, tokens):
                words += [] if token is None else [token]
        sessions = [one.session for one in running]
        counted = [(session.lookups, session.read_tokens) for session in sessions]
        return said, counted, torch.cat([session.feed([7, 8, 9]) for session in sessions])

    lengths = 6, 25, 44  # over the ends of blocks, and of chunks
    with begun(remembered, lengths, temperature) as running:
        *together, after = answers(running, read_pending)
    with begun(remembered, lengths, temperature) as running:
        *alone, expected = answers(running, lambda running: None)
    assert together == alone
    torch.testing.assert_close(after, expected, atol=2e-5, rtol=2e-5)


def test_a_failing_answer_raises_alone_and_the_others_go_on(remembered, monkeypatch):
    with begun(remembered) as running:
        alone = [list(one) for one in running]

    def gone(layer_idx, *qkv):
        raise DocumentNotFound("it was forgotten")

    with begun(remembered) as running:
        said = [[next(one)] for one in running]
        monkeypatch.setattr(running[1].session, "attend", gone)
        for _ in range(4):
            read_pending(running)
            for number in (0, 2):
                said[number] += islice(running[number], 1)
        with pytest.raises(DocumentNotFound, match="forgotten"):
            next(running[1])
    assert [said[0], said[2]] == [alone[0], alone[2]]


def test_an_unexpected_error_ends_every_answer_of_the_shared_pass(remembered, monkeypatch):
    def broken(layer_idx, *qkv):
        raise ZeroDivisionError

    with begun(remembered) as running:
        for one in running:
            next(one)
        monkeypatch.setattr(running[1].session, "attend", broken)
        read_pending(running)
        for one in running:
            with pytest.raises(ZeroDivisionError):
                next(one)
