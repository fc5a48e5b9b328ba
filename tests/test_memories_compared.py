"""What benchmarks of several memories count and score, on tiny random models."""

from pathlib import Path
from random import Random

import numpy as np
import torch
from tiny_model import text, tiny_model

from benchmarks.common.needle_memory import reply
from benchmarks.common.needles import Plan, Question
from benchmarks.common.sessions import Texts
from benchmarks.common.streamed import ask_streamed
from memstore.model.checkpoint import save_checkpoint
from memstore.rivals.config import MEMORIES
from memstore.rivals.reading import load_rival
from memstore.rivals.transformer import RivalTransformer


def test_a_memory_without_documents_reads_again_what_stands_before_a_question(
    tmp_path: Path,
) -> None:
    landmarks = tiny_model(tmp_path / "landmarks")
    rival = RivalTransformer(landmarks.config, MEMORIES["transformer-xl"])
    rival.initialise(torch.Generator().manual_seed(1))
    save_checkpoint(rival, landmarks.tokenizer, tmp_path / "model")
    model = load_rival(tmp_path / "model")
    texts = Texts(tmp_path)
    for number, name in enumerate(("filler 0", "a", "b")):
        texts.ids[name] = np.array(model.tokenizer.encode(text(70, seed=number)))
    texts.save()
    lengths = {name: len(ids) for name, ids in texts.ids.items()}
    questions = [Question("fact", f"What is {name}?", " 7", ["b", "a"]) for name in "xyz"]
    plan = Plan({}, [], {name: lengths[name] for name in "ab"}, questions)
    plan.save(tmp_path)
    total = lengths["a"] + lengths["b"]
    row = ask_streamed(model, tmp_path, "fact", total, trials=2, seed=0)
    assert row is not None and row["trials"] == 2
    assert row["state_bytes"] == 2 * 32 * 32 * 4
    for question, wrong in zip(questions[:2], row["wrong"], strict=True):
        documents = plan.documents(question, total, Random(0))
        assert documents is not None and sorted(documents) == ["a", "b"]
        answers = set()
        for order in (["a", "b"], ["b", "a"]):
            with model.session() as session:
                for name in order:
                    session.feed(texts.ids[name].tolist())
                answers.add(reply(model, session, question, generate=False).text)
        assert wrong["got"] in answers
    assert ask_streamed(model, tmp_path, "passkey", total, trials=2, seed=0) is None
